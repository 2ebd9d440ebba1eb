"""API calls of the trainer: to get batches, and to publish the versions trained on them."""

from __future__ import annotations

import re

from starlette.requests import Request
from starlette.responses import Response

from offbeat.client import wire
from offbeat.coordinator.api.bodies import reply
from offbeat.coordinator.api.state import ApiState, Handler, Route, coordinate
from offbeat.coordinator.api.weights import MAX_MANIFEST_BYTES, MAX_PIECE_BYTES, checked
from offbeat.ledger.records import Arrival
from offbeat.ledger.workers import Role, WorkerRecord

TRAINER = frozenset({Role.TRAINER})


async def claim(api: ApiState, worker: WorkerRecord, request: Request) -> Response:
    call = await api.bodies.record(request, wire.ClaimCall)
    wait_s = min(call.wait_s, api.settings.max_wait_s)
    work = api.coordinator.claim(call.step, wait_s, generation=_generation(request))
    return await reply(request, await api.wait_for(request, work))


async def reconcile(api: ApiState, worker: WorkerRecord, request: Request) -> Response:
    call = await api.bodies.record(request, wire.ReconcileCall)
    arrival = Arrival(worker.name, call.host, call.home, call.from_scratch)
    return await reply(request, await api.coordinator.reconcile(call.step, call.version, arrival))


async def next_version(api: ApiState, worker: WorkerRecord, request: Request) -> Response:
    await api.bodies.record(request, wire.Nothing)
    return await reply(request, wire.NextVersion(await api.coordinator.next_version(generation=_generation(request))))


async def introduce(api: ApiState, worker: WorkerRecord, request: Request) -> Response:
    call = await api.bodies.record(request, wire.IntroduceCall)
    await api.coordinator.call(api.coordinator.ledger.add_signer, call.key, worker.name)
    return Response(status_code=204)


async def missing_pieces(api: ApiState, worker: WorkerRecord, request: Request) -> Response:
    call = await api.bodies.record(request, wire.MissingCall)
    return await reply(request, wire.Missing(await api.weights.missing(call.pieces)))


async def put_piece(api: ApiState, worker: WorkerRecord, request: Request) -> Response:
    name = checked(request.path_params["digest"])
    await api.weights.store_piece(name, await api.bodies.octets(request, MAX_PIECE_BYTES, bytes.fromhex(name)))
    return Response(status_code=201)


async def put_manifest(api: ApiState, worker: WorkerRecord, request: Request) -> Response:
    sealed = await api.bodies.octets(request, MAX_MANIFEST_BYTES)
    await api.weights.store_manifest(coordinate(request, "number"), request.path_params["digest"], sealed)
    return Response(status_code=201)


async def publish(api: ApiState, worker: WorkerRecord, request: Request) -> Response:
    call = await api.bodies.record(request, wire.PublishCall)
    await api.coordinator.publish(await api.weights.check_complete(call.version), generation=_generation(request))
    return Response(status_code=204)


async def commit(api: ApiState, worker: WorkerRecord, request: Request) -> Response:
    call = await api.bodies.record(request, wire.CommitCall)
    version, generation = await api.weights.check_complete(call.version), _generation(request)
    await api.coordinator.commit(call.step, version, call.audited, call.compared, generation=generation)
    return Response(status_code=204)


async def checkpointed(api: ApiState, worker: WorkerRecord, request: Request) -> Response:
    call = await api.bodies.record(request, wire.CheckpointedCall)
    await api.coordinator.checkpointed(call.step, generation=_generation(request))
    return Response(status_code=204)


async def report(api: ApiState, worker: WorkerRecord, request: Request) -> Response:
    call = await api.bodies.record(request, wire.ReportCall)
    await api.coordinator.report(call.row, generation=_generation(request))
    return Response(status_code=204)


def _generation(request: Request) -> int:
    """Returns the generation in the request's header: the number, from 1, that the trainer got from `reconcile`. 0 if
    the header is missing."""
    text = request.headers.get(wire.GENERATION, "")
    return int(text) if re.fullmatch(r"[0-9]{1,18}", text) else 0


def _fenced(handler: Handler) -> Handler:
    """Wraps `handler` to refuse a trainer that a newer one has replaced, before the body of its call is read. Calls
    that write to the ledger check this again within their transaction."""

    async def guarded(api: ApiState, worker: WorkerRecord, request: Request) -> Response:
        api.reader.check_generation(_generation(request))
        return await handler(api, worker, request)

    return guarded


ROUTES = (
    Route("POST", "/v1/reconcile", reconcile, TRAINER),
    Route("POST", "/v1/claim", _fenced(claim), TRAINER),
    Route("POST", "/v1/introduce", _fenced(introduce), TRAINER),
    Route("POST", "/v1/pieces/missing", _fenced(missing_pieces), TRAINER),
    Route("PUT", "/v1/pieces/{digest}", _fenced(put_piece), TRAINER),
    Route("PUT", "/v1/manifests/{number}/{digest}", _fenced(put_manifest), TRAINER),
    Route("POST", "/v1/next-version", _fenced(next_version), TRAINER),
    Route("POST", "/v1/publish", _fenced(publish), TRAINER),
    Route("POST", "/v1/commit", _fenced(commit), TRAINER),
    Route("POST", "/v1/checkpointed", _fenced(checkpointed), TRAINER),
    Route("POST", "/v1/report", _fenced(report), TRAINER),
)
