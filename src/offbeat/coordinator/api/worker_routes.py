"""API calls of workers (tasks, heartbeats, trajectories, weights) and of judges (samples, rewards)."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from functools import partial

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from offbeat.client import wire
from offbeat.coordinator.api.access import HOW_TO_JOIN, address
from offbeat.coordinator.api.bodies import reply
from offbeat.coordinator.api.errors import Refusal
from offbeat.coordinator.api.state import ApiState, Route, coordinate
from offbeat.coordinator.api.weights import file_bytes
from offbeat.coordinator.relays import site_of
from offbeat.ledger.errors import Forbidden
from offbeat.ledger.records import Outcome
from offbeat.ledger.workers import Role, WorkerRecord, WorkerState
from offbeat.net import RangeError, byte_range

ROLLOUT = frozenset({Role.ROLLOUT})
ANYONE = frozenset(Role)
SUBMIT_PATH = "/v1/trajectories/{task}/{fence}"


async def submit(api: ApiState, worker: WorkerRecord, request: Request) -> Response:
    task, fence = coordinate(request, "task"), coordinate(request, "fence")
    trajectory = await api.bodies.read(request, api.max_trajectory_bytes, wire.trajectory)
    if trajectory.task != task:
        raise Refusal(400, f"the URL names task {task}, but the body is a trajectory of task {trajectory.task}")
    outcome = await api.coordinator.submit(worker.name, trajectory, fence)
    return await reply(request, wire.Submitted(outcome), 200 if outcome is Outcome.REPEATED else 201)


async def lease(api: ApiState, worker: WorkerRecord, request: Request) -> Response:
    call = await api.bodies.record(request, wire.LeaseCall)
    await mark_active(api, worker)
    wait_s = min(call.wait_s, api.settings.max_wait_s)
    work = api.coordinator.lease(worker.name, call.capacity, call.have_version, wait_s)
    return await reply(request, await api.wait_for(request, work))


async def mark_active(api: ApiState, worker: WorkerRecord) -> None:
    """Reactivates a worker that left and now asks for work again."""
    if worker.state is WorkerState.LEFT:
        await api.move(worker, WorkerState.ACTIVE)


async def heartbeat(api: ApiState, worker: WorkerRecord, request: Request) -> Response:
    call = await api.bodies.record(request, wire.HeartbeatCall)
    beat = await api.coordinator.heartbeat(worker.name, call.held, call.life, call.figures)
    return await reply(request, beat)


async def fail(api: ApiState, worker: WorkerRecord, request: Request) -> Response:
    call = await api.bodies.record(request, wire.FailCall)
    await api.coordinator.fail(worker.name, call.task, call.fence, call.reason)
    return Response(status_code=204)


async def give_back(api: ApiState, worker: WorkerRecord, request: Request) -> Response:
    call = await api.bodies.record(request, wire.GiveBackCall)
    await api.coordinator.give_back(worker.name, call.leases)
    return Response(status_code=204)


async def round_over(api: ApiState, worker: WorkerRecord, request: Request) -> Response:
    call = await api.bodies.record(request, wire.RoundOverCall)
    work = api.coordinator.rounds.is_over(call.number, min(call.wait_s, api.settings.max_wait_s))
    return await reply(request, wire.RoundOver(await api.wait_for(request, work)))


async def newer(api: ApiState, worker: WorkerRecord, request: Request) -> Response:
    call = await api.bodies.record(request, wire.NewerCall)
    work = api.coordinator.newer(call.have_version, min(call.wait_s, api.settings.max_wait_s))
    return await reply(request, wire.Newer(await api.wait_for(request, work)))


async def leave(api: ApiState, worker: WorkerRecord, request: Request) -> Response:
    await api.bodies.record(request, wire.Nothing)
    await api.coordinator.leave(worker.name)
    await api.move(worker, WorkerState.LEFT)
    return Response(status_code=204)


async def run_info(api: ApiState, worker: WorkerRecord, request: Request) -> Response:
    return await reply(request, wire.RunInfo(api.served.name, dict(api.served.config)))


async def weight_files(api: ApiState, worker: WorkerRecord, request: Request) -> Response:
    return await reply(request, wire.WeightFiles(await api.weights.files(coordinate(request, "number"))))


async def weight_file(api: ApiState, worker: WorkerRecord, request: Request) -> Response:
    path, size = api.weights.find_file(coordinate(request, "number"), request.path_params["file"])
    return _ranged(request, size, partial(file_bytes, path))


async def signers(api: ApiState, worker: WorkerRecord, request: Request) -> Response:
    return await reply(request, wire.Signers(api.reader.signers()))


async def sources(api: ApiState, worker: WorkerRecord, request: Request) -> Response:
    call = await api.bodies.record(request, wire.SourcesCall)
    served, relays = api.served, api.coordinator.relays
    site = site_of(
        call.site, address(request), call.host, call.port, served.peer_networks, behind_proxy=served.behind_proxy
    )
    measured = replace(site, root_bytes_per_s=call.root_bytes_per_s)
    relays.keep(api.reader.active_workers())
    peers = [wire.Peer(*source.address, source.key) for source in relays.sources(worker.name, measured)]
    return await reply(request, wire.SourceList(peers, relays.guests(worker.name)))


async def manifest(api: ApiState, worker: WorkerRecord, request: Request) -> Response:
    number, digest = coordinate(request, "number"), request.path_params.get("digest")
    return Response(await api.weights.manifest(number, digest), media_type=wire.OCTETS)


async def piece(api: ApiState, worker: WorkerRecord, request: Request) -> Response:
    digest = request.path_params["digest"]
    return _ranged(request, await api.weights.piece_size(digest), partial(api.weights.piece_bytes, digest))


def _ranged(request: Request, size: int, read: Callable[[int, int], AsyncIterator[bytes]]) -> Response:
    """Returns the bytes that the request's Range header asks for, or all `size` bytes without such a header."""
    try:
        wanted = byte_range(request.headers.get("range"), size)
    except RangeError as error:
        raise Refusal(error.status, str(error)) from error
    start, stop = wanted or (0, size)
    headers = {"Accept-Ranges": "bytes", "Content-Length": str(stop - start)}
    if wanted is not None:
        headers["Content-Range"] = f"bytes {start}-{stop - 1}/{size}"
    return StreamingResponse(read(start, stop), 206 if wanted else 200, headers, wire.OCTETS)


async def join(api: ApiState, request: Request) -> Response:
    """Makes a caller with a join token a member of the run; all other calls need a member's secret. If the call is
    repeated with the same token and secret hash, for example after a lost answer, it returns the same worker."""
    token = api.access.admit_stranger(request)
    call = await api.bodies.record(request, wire.Join)
    coordinator, run = api.coordinator, api.served
    try:
        joined = await coordinator.call(coordinator.ledger.redeem, token, call.name, {}, call.secret_hash)
    except Forbidden as error:
        raise Refusal(401, f"{error}; {HOW_TO_JOIN}") from error
    return await reply(request, wire.Welcome(joined.name, joined.role, run.name, dict(run.config)), 201)


ROUTES = (
    Route("PUT", SUBMIT_PATH, submit, ROLLOUT),
    Route("POST", "/v1/lease", lease, ROLLOUT),
    Route("POST", "/v1/heartbeat", heartbeat, ROLLOUT),
    Route("POST", "/v1/fail", fail, ROLLOUT),
    Route("POST", "/v1/newer", newer, ROLLOUT),
    Route("POST", "/v1/round-over", round_over, ROLLOUT),
    Route("POST", "/v1/give-back", give_back, ROLLOUT),
    Route("POST", "/v1/leave", leave, ANYONE),
    Route("GET", "/v1/run", run_info, ANYONE),
    Route("POST", "/v1/sources", sources, ROLLOUT),
    Route("GET", "/v1/signers", signers, ANYONE),
    Route("GET", "/v1/manifests/{number}", manifest, ANYONE),
    Route("GET", "/v1/manifests/{number}/{digest}", manifest, ANYONE),
    Route("GET", "/v1/pieces/{digest}", piece, ANYONE),
    Route("GET", "/v1/weights/{number}", weight_files, ANYONE),
    Route("GET", "/v1/weights/{number}/{file}", weight_file, ANYONE),
)
"""Most frequent routes first: the router, which gets calls that `App` does not look up, tries them in order."""

REWARD = frozenset({Role.REWARD})


async def lease_rewards(api: ApiState, worker: WorkerRecord, request: Request) -> Response:
    call = await api.bodies.record(request, wire.LeaseRewardsCall)
    await mark_active(api, worker)
    work = api.coordinator.rewards.lease(worker.name, call.capacity, min(call.wait_s, api.settings.max_wait_s))
    return await reply(request, await api.wait_for(request, work))


async def submit_rewards(api: ApiState, worker: WorkerRecord, request: Request) -> Response:
    call = await api.bodies.record(request, wire.SubmitRewardsCall)
    results = [wire.reward_result(result) for result in call.results]
    await api.coordinator.rewards.submit(worker.name, call.ticket, results)
    return Response(status_code=204)


JUDGE_ROUTES = (
    Route("POST", "/v1/rewards/lease", lease_rewards, REWARD),
    Route("POST", "/v1/rewards", submit_rewards, REWARD),
)
