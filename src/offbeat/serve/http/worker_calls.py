"""The calls of workers: work, heartbeats, trajectories, and weights to load."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from functools import partial
from typing import Any

from fastapi import Request, Response
from fastapi.responses import StreamingResponse

from offbeat.control.step_time import Timing
from offbeat.ledger.errors import Forbidden
from offbeat.ledger.records import Outcome
from offbeat.ledger.workers import Role, Worker, WorkerState
from offbeat.serve.http import coding, wire
from offbeat.serve.http.access import HOW_TO_JOIN, address
from offbeat.serve.http.bodies import reply
from offbeat.serve.http.desk import Desk, Route, coordinate
from offbeat.serve.http.refusals import Refusal
from offbeat.serve.http.weights import pieces_of
from offbeat.serve.relaying import place_of
from offbeat.weights.ranges import RangeError, byte_range

ROLLOUT = frozenset({Role.ROLLOUT})
ANYONE = frozenset(Role)
SUBMIT_PATH = "/v1/trajectories/{task}/{fence}"


async def submit(desk: Desk, worker: Worker, request: Request) -> Response:
    task, fence = coordinate(request, "task"), coordinate(request, "fence")
    trajectory = await desk.bodies.read(request, desk.max_trajectory_bytes, wire.trajectory)
    if trajectory.task != task:
        raise Refusal(400, f"the path names task {task}, the body task {trajectory.task}")
    outcome = await desk.coordinator.submit(worker.name, trajectory, fence)
    return await reply(request, wire.Submitted(outcome), 200 if outcome is Outcome.REPEATED else 201)


async def lease(desk: Desk, worker: Worker, request: Request) -> Response:
    call = await desk.bodies.record(request, wire.LeaseCall)
    await welcome_back(desk, worker)
    wait_s = min(call.wait_s, desk.settings.max_wait_s)
    work = desk.coordinator.lease(worker.name, call.capacity, call.have_version, wait_s)
    return await reply(request, await desk.patiently(request, work))


async def welcome_back(desk: Desk, worker: Worker) -> None:
    """One that had said goodbye asks for work again."""
    if worker.state is WorkerState.LEFT:
        await desk.move(worker, WorkerState.ACTIVE)


async def heartbeat(desk: Desk, worker: Worker, request: Request) -> Response:
    call = await desk.bodies.record(request, wire.HeartbeatCall)
    beat = await desk.coordinator.heartbeat(worker.name, call.held, call.life, call.figures)
    return await reply(request, beat)


async def fail(desk: Desk, worker: Worker, request: Request) -> Response:
    call = await desk.bodies.record(request, wire.FailCall)
    await desk.coordinator.fail(worker.name, call.task, call.fence, call.reason)
    return Response(status_code=204)


async def give_back(desk: Desk, worker: Worker, request: Request) -> Response:
    call = await desk.bodies.record(request, wire.GiveBackCall)
    await desk.coordinator.give_back(worker.name, call.leases)
    return Response(status_code=204)


async def round_over(desk: Desk, worker: Worker, request: Request) -> Response:
    call = await desk.bodies.record(request, wire.RoundOverCall)
    work = desk.coordinator.round_over(call.number, min(call.wait_s, desk.settings.max_wait_s))
    return await reply(request, wire.RoundOver(await desk.patiently(request, work)))


async def timings(desk: Desk, worker: Worker, request: Request) -> Response:
    call = await desk.bodies.record(request, wire.TimingsCall)
    desk.coordinator.timed(worker.name, [Timing(*told) for told in call.timings])
    return Response(status_code=204)


async def newer(desk: Desk, worker: Worker, request: Request) -> Response:
    call = await desk.bodies.record(request, wire.NewerCall)
    work = desk.coordinator.newer(call.have_version, min(call.wait_s, desk.settings.max_wait_s))
    return await reply(request, wire.Newer(await desk.patiently(request, work)))


async def leave(desk: Desk, worker: Worker, request: Request) -> Response:
    await desk.bodies.record(request, wire.Nothing)
    await desk.coordinator.leave(worker.name)
    await desk.move(worker, WorkerState.LEFT)
    return Response(status_code=204)


async def run_info(desk: Desk, worker: Worker, request: Request) -> Response:
    return await reply(request, wire.RunInfo(desk.served.name, dict(desk.served.config)))


async def weight_files(desk: Desk, worker: Worker, request: Request) -> Response:
    return await reply(request, wire.WeightFiles(await desk.files.files(coordinate(request, "number"))))


async def weight_file(desk: Desk, worker: Worker, request: Request) -> Response:
    number, name = coordinate(request, "number"), request.path_params["file"]
    path, size, digest = await desk.files.find(number, name)
    return _ranged(request, size, partial(pieces_of, path), {coding.WHOLE_DIGEST: coding.digest_header(digest)})


async def signers(desk: Desk, worker: Worker, request: Request) -> Response:
    return await reply(request, wire.Signers(desk.signers()))


async def sources(desk: Desk, worker: Worker, request: Request) -> Response:
    call = await desk.bodies.record(request, wire.SourcesCall)
    served, relaying = desk.served, desk.coordinator.relaying
    place = place_of(
        call.site, address(request), call.host, call.port, served.peer_networks, behind_proxy=served.behind_proxy
    )
    measured = replace(place, up_bytes_per_s=call.up_bytes_per_s, root_bytes_per_s=call.root_bytes_per_s)
    relaying.keep(desk.reader.active_workers())
    peers = [wire.Peer(*source.address, source.key) for source in relaying.sources(worker.name, measured)]
    return await reply(request, wire.SourceList(peers, relaying.guests(worker.name)))


async def manifest(desk: Desk, worker: Worker, request: Request) -> Response:
    number, digest = coordinate(request, "number"), request.path_params.get("digest")
    return Response(await desk.pieces.manifest(number, digest), media_type=wire.OCTETS)


async def piece(desk: Desk, worker: Worker, request: Request) -> Response:
    digest = request.path_params["digest"]
    return _ranged(request, await desk.pieces.size(digest), partial(desk.pieces.bytes_of, digest), {})


def _ranged(
    request: Request, size: int, read: Callable[[int, int], AsyncIterator[bytes]], headers: dict[str, str]
) -> Response:
    """What a Range header asks for, or all."""
    try:
        wanted = byte_range(request.headers.get("range"), size)
    except RangeError as error:
        raise Refusal(error.status, str(error)) from error
    start, stop = wanted or (0, size)
    headers |= {"Accept-Ranges": "bytes", "Content-Length": str(stop - start)}
    if wanted is not None:
        headers["Content-Range"] = f"bytes {start}-{stop - 1}/{size}"
    return StreamingResponse(read(start, stop), 206 if wanted else 200, headers, wire.OCTETS)


async def join(desk: Desk, request: Request) -> Response:
    """Makes a worker of a caller with a token; the only call that a stranger may make. Made again with the same token
    and hash of a secret, as where our answer was lost, it is answered with the same worker."""
    token = desk.access.admit_stranger(request)
    call = await desk.bodies.record(request, wire.Join)
    _check_plain(call.capabilities)
    coordinator, run = desk.coordinator, desk.served
    try:
        joined = await coordinator.call(
            coordinator.ledger.redeem, token, call.name, call.capabilities, call.secret_hash
        )
    except Forbidden as error:
        raise Refusal(401, f"{error}; {HOW_TO_JOIN}") from error
    return await reply(request, wire.Welcome(joined.name, joined.role, run.name, dict(run.config)), 201)


def _check_plain(capabilities: dict[str, Any]) -> None:
    try:
        json.dumps(capabilities)
    except (TypeError, ValueError, RecursionError) as error:
        raise Refusal(400, f"capabilities: {error}; allowed is what JSON can hold") from error


ROUTES = (
    Route("PUT", SUBMIT_PATH, submit, ROLLOUT),
    Route("POST", "/v1/lease", lease, ROLLOUT),
    Route("POST", "/v1/heartbeat", heartbeat, ROLLOUT),
    Route("POST", "/v1/fail", fail, ROLLOUT),
    Route("POST", "/v1/newer", newer, ROLLOUT),
    Route("POST", "/v1/round-over", round_over, ROLLOUT),
    Route("POST", "/v1/give-back", give_back, ROLLOUT),
    Route("POST", "/v1/timings", timings, ROLLOUT),
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
"""The most frequent first: they are looked through in order."""
