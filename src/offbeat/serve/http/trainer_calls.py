"""The calls of the trainer: batches to train on, and the versions that came of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from fastapi import Request, Response
from starlette.requests import ClientDisconnect

from offbeat.ledger.workers import Role, Worker
from offbeat.serve.http import coding, wire
from offbeat.serve.http.bodies import check_type, reply
from offbeat.serve.http.desk import Desk, Route, coordinate
from offbeat.serve.http.pieces import MAX_MANIFEST_BYTES, MAX_PIECE_BYTES
from offbeat.serve.http.refusals import Refusal

TRAINER = frozenset({Role.TRAINER})


async def claim(desk: Desk, worker: Worker, request: Request) -> Response:
    call = await desk.bodies.record(request, wire.ClaimCall)
    work = desk.coordinator.claim(call.step, min(call.wait_s, desk.settings.max_wait_s))
    return await reply(request, await desk.patiently(request, work))


async def put_weights(desk: Desk, worker: Worker, request: Request) -> Response:
    check_type(request, wire.OCTETS)
    digest = coding.read_digest(request.headers, coding.CONTENT_DIGEST)
    if digest is None:
        raise Refusal(400, f"{coding.CONTENT_DIGEST}: missing; the blake3 digest of the file is needed")
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
    return await reply(request, await desk.coordinator.reconcile(call.step, call.version))


async def next_version(desk: Desk, worker: Worker, request: Request) -> Response:
    await desk.bodies.record(request, wire.Nothing)
    return await reply(request, wire.NextVersion(await desk.coordinator.next_version()))


async def introduce(desk: Desk, worker: Worker, request: Request) -> Response:
    call = await desk.bodies.record(request, wire.IntroduceCall)
    await desk.coordinator.call(desk.coordinator.ledger.add_signer, call.key, worker.name)
    return Response(status_code=204)


async def missing_pieces(desk: Desk, worker: Worker, request: Request) -> Response:
    call = await desk.bodies.record(request, wire.MissingCall)
    return await reply(request, wire.Missing(await desk.pieces.missing(call.pieces)))


async def put_piece(desk: Desk, worker: Worker, request: Request) -> Response:
    await desk.pieces.take_piece(request.path_params["digest"], await desk.bodies.octets(request, MAX_PIECE_BYTES))
    return Response(status_code=201)


async def put_manifest(desk: Desk, worker: Worker, request: Request) -> Response:
    sealed = await desk.bodies.octets(request, MAX_MANIFEST_BYTES)
    await desk.pieces.take_manifest(coordinate(request, "number"), request.path_params["digest"], sealed)
    return Response(status_code=201)


async def publish(desk: Desk, worker: Worker, request: Request) -> Response:
    call = await desk.bodies.record(request, wire.PublishCall)
    await desk.coordinator.publish(await desk.settle(call.version))
    return Response(status_code=204)


async def commit(desk: Desk, worker: Worker, request: Request) -> Response:
    call = await desk.bodies.record(request, wire.CommitCall)
    await desk.coordinator.commit(call.step, await desk.settle(call.version), call.audited, call.compared)
    return Response(status_code=204)


async def checkpointed(desk: Desk, worker: Worker, request: Request) -> Response:
    call = await desk.bodies.record(request, wire.CheckpointedCall)
    await desk.coordinator.checkpointed(call.step)
    return Response(status_code=204)


async def report(desk: Desk, worker: Worker, request: Request) -> Response:
    call = await desk.bodies.record(request, wire.ReportCall)
    await desk.coordinator.report(call.row)
    return Response(status_code=204)


ROUTES = (
    Route("POST", "/v1/claim", claim, TRAINER),
    Route("PUT", "/v1/weights/{number}/{file}", put_weights, TRAINER),
    Route("POST", "/v1/introduce", introduce, TRAINER),
    Route("POST", "/v1/pieces/missing", missing_pieces, TRAINER),
    Route("PUT", "/v1/pieces/{digest}", put_piece, TRAINER),
    Route("PUT", "/v1/manifests/{number}/{digest}", put_manifest, TRAINER),
    Route("POST", "/v1/reconcile", reconcile, TRAINER),
    Route("POST", "/v1/next-version", next_version, TRAINER),
    Route("POST", "/v1/publish", publish, TRAINER),
    Route("POST", "/v1/commit", commit, TRAINER),
    Route("POST", "/v1/checkpointed", checkpointed, TRAINER),
    Route("POST", "/v1/report", report, TRAINER),
)
