"""The calls of the trainer: batches to train on, and the versions that came of them."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator

from fastapi import Request, Response
from starlette.requests import ClientDisconnect

from offbeat.ledger.trainers import Arrival
from offbeat.ledger.workers import Role, Worker
from offbeat.serve.http import coding, wire
from offbeat.serve.http.bodies import check_type, needed_digest, reply
from offbeat.serve.http.desk import Desk, Handler, Route, coordinate
from offbeat.serve.http.pieces import MAX_MANIFEST_BYTES, MAX_PIECE_BYTES, checked
from offbeat.serve.http.refusals import Refusal

TRAINER = frozenset({Role.TRAINER})


async def claim(desk: Desk, worker: Worker, request: Request) -> Response:
    call = await desk.bodies.record(request, wire.ClaimCall)
    wait_s = min(call.wait_s, desk.settings.max_wait_s)
    work = desk.coordinator.claim(call.step, wait_s, generation=_generation(request))
    return await reply(request, await desk.patiently(request, work))


async def put_weights(desk: Desk, worker: Worker, request: Request) -> Response:
    check_type(request, wire.OCTETS)
    digest = needed_digest(request)
    pieces = _pieces(request, desk.settings.body_within_s)
    is_new = await desk.files.receive(coordinate(request, "number"), request.path_params["file"], pieces, digest)
    return Response(status_code=201 if is_new else 200)


async def _pieces(request: Request, within_s: float) -> AsyncIterator[bytes]:
    """A body of any length, as it comes; what must not happen is that nothing comes."""
    more = True
    while more:
        try:
            async with asyncio.timeout(within_s):
                message = await request.receive()
        except TimeoutError:
            raise Refusal(408, f"nothing came for {within_s:g} s", close=True) from None
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        more = message.get("more_body", False)
        yield message.get("body", b"")


async def reconcile(desk: Desk, worker: Worker, request: Request) -> Response:
    call = await desk.bodies.record(request, wire.ReconcileCall)
    arrival = Arrival(worker.name, call.host, call.home, call.from_scratch)
    return await reply(request, await desk.coordinator.reconcile(call.step, call.version, arrival))


async def next_version(desk: Desk, worker: Worker, request: Request) -> Response:
    await desk.bodies.record(request, wire.Nothing)
    return await reply(request, wire.NextVersion(await desk.coordinator.next_version(generation=_generation(request))))


async def introduce(desk: Desk, worker: Worker, request: Request) -> Response:
    call = await desk.bodies.record(request, wire.IntroduceCall)
    await desk.coordinator.call(desk.coordinator.ledger.add_signer, call.key, worker.name)
    return Response(status_code=204)


async def missing_pieces(desk: Desk, worker: Worker, request: Request) -> Response:
    call = await desk.bodies.record(request, wire.MissingCall)
    return await reply(request, wire.Missing(await desk.pieces.missing(call.pieces)))


async def put_piece(desk: Desk, worker: Worker, request: Request) -> Response:
    name = checked(request.path_params["digest"])
    await desk.pieces.take_piece(name, await desk.bodies.octets(request, MAX_PIECE_BYTES, bytes.fromhex(name)))
    return Response(status_code=201)


async def put_manifest(desk: Desk, worker: Worker, request: Request) -> Response:
    sealed = await desk.bodies.octets(request, MAX_MANIFEST_BYTES)
    await desk.pieces.take_manifest(coordinate(request, "number"), request.path_params["digest"], sealed)
    return Response(status_code=201)


async def publish(desk: Desk, worker: Worker, request: Request) -> Response:
    call = await desk.bodies.record(request, wire.PublishCall)
    await desk.coordinator.publish(await desk.settle(call.version), generation=_generation(request))
    return Response(status_code=204)


async def commit(desk: Desk, worker: Worker, request: Request) -> Response:
    call = await desk.bodies.record(request, wire.CommitCall)
    version, generation = await desk.settle(call.version), _generation(request)
    await desk.coordinator.commit(call.step, version, call.audited, call.compared, generation=generation)
    return Response(status_code=204)


async def checkpointed(desk: Desk, worker: Worker, request: Request) -> Response:
    call = await desk.bodies.record(request, wire.CheckpointedCall)
    await desk.coordinator.checkpointed(call.step, generation=_generation(request))
    return Response(status_code=204)


async def report(desk: Desk, worker: Worker, request: Request) -> Response:
    call = await desk.bodies.record(request, wire.ReportCall)
    await desk.coordinator.report(call.row, generation=_generation(request))
    return Response(status_code=204)


def _generation(request: Request) -> int:
    """The generation that a trainer names; 0 where it has none, which is older than any."""
    text = request.headers.get(coding.GENERATION, "")
    return int(text) if re.fullmatch(r"[0-9]{1,18}", text) else 0


def _fenced(handler: Handler) -> Handler:
    """Refuses a trainer that was replaced before anything of its body is read; what writes to the ledger checks again
    within its transaction."""

    async def guarded(desk: Desk, worker: Worker, request: Request) -> Response:
        desk.reader.check_generation(_generation(request))
        return await handler(desk, worker, request)

    return guarded


ROUTES = (
    Route("POST", "/v1/reconcile", reconcile, TRAINER),
    Route("POST", "/v1/claim", _fenced(claim), TRAINER),
    Route("PUT", "/v1/weights/{number}/{file}", _fenced(put_weights), TRAINER),
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
