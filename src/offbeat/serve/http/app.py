"""The coordinator's face as an application: every call's way in and out.

A call passes, in this order: are we open, who is it, not too often, may they, the body's kind, size and form, and then
the coordinator. Whatever goes wrong on the way has one status and one line (`refusals`), and has changed nothing.
Bodies are raw bytes of one schema each (`wire`), so nothing is parsed twice.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import msgspec
from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from offbeat.serve.http import metrics, refusals, trainer_calls, worker_calls
from offbeat.serve.http.access import address, is_loopback
from offbeat.serve.http.desk import Desk, Doors, Route, sent_away

Endpoint = Callable[[Request], Awaitable[Response]]

GONE = 499
"""The caller hung up: nobody reads this status, but it is counted."""


def make_app(desk: Desk) -> FastAPI:
    app = FastAPI(
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        exception_handlers={HTTPException: _unrouted},
    )
    for route in (*worker_calls.ROUTES, *trainer_calls.ROUTES):
        app.add_route(route.path, _counted(desk, route.path, _guarded(desk, route)), methods=[route.method])
    for path, handler, method in (
        ("/v1/join", _stranger(desk), "POST"),
        ("/healthz", _health(desk), "GET"),
        ("/metrics", _metrics(desk), "GET"),
    ):
        app.add_route(path, _counted(desk, path, handler), methods=[method])
    return app


def _guarded(desk: Desk, route: Route) -> Endpoint:
    async def endpoint(request: Request) -> Response:
        desk.check_open()
        worker = desk.access.admit(request, route.roles)
        return await route.handler(desk, worker, request)

    return endpoint


def _stranger(desk: Desk) -> Endpoint:
    async def endpoint(request: Request) -> Response:
        desk.check_open()
        return await worker_calls.join(desk, request)

    return endpoint


def _counted(desk: Desk, path: str, inner: Endpoint) -> Endpoint:
    """Turns errors into answers, and counts both."""

    async def endpoint(request: Request) -> Response:
        start_s = desk.clock()
        try:
            response = await inner(request)
        except ClientDisconnect:
            response = Response(status_code=GONE)
        except Exception as error:  # noqa: BLE001 - a bug in one call is that call's alone
            response = refusals.answer(error)
        desk.figures.add(path, response.status_code, desk.clock() - start_s)
        return response

    return endpoint


def _health(desk: Desk) -> Endpoint:
    async def endpoint(request: Request) -> Response:
        if desk.doors is not Doors.OPEN:
            raise sent_away(desk.doors)
        return Response(msgspec.json.encode({"state": desk.doors.value}), media_type=refusals.JSON)

    return endpoint


def _metrics(desk: Desk) -> Endpoint:
    async def endpoint(request: Request) -> Response:
        desk.check_open()
        if desk.served.behind_proxy or not is_loopback(address(request)):
            desk.access.admit(request, worker_calls.ANYONE)
        ledger = desk.coordinator.ledger
        counts = await desk.coordinator.call(ledger.counts)
        leased = await desk.coordinator.call(ledger.num_leased)
        return Response(metrics.text(counts, leased, desk.figures), media_type=metrics.CONTENT_TYPE)

    return endpoint


async def _unrouted(request: Request, error: HTTPException) -> Response:
    return refusals.told(error.status_code, f"{request.method} {request.url.path[:200]}: {error.detail}")
