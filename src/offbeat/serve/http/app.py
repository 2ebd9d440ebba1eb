"""The coordinator's face as an application: every call's way in and out.

A call passes, in this order: are we open, who is it, not too often, may they, the body's kind, size and form, and then
the coordinator. Whatever goes wrong on the way has one status and one line (`refusals`), and has changed nothing.
Bodies are raw bytes of one schema each (`wire`), so nothing is parsed twice. Every answer carries its digest, unless it
is a file.

FastAPI routes what is rare, and says no to what is unknown. The calls that hundreds of workers make all the time go
straight to their endpoints, because its layers would cost them as much as all the rest.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from offbeat.serve.http import judge_calls, metrics, refusals, trainer_calls, worker_calls
from offbeat.serve.http.access import address, is_loopback
from offbeat.serve.http.bodies import seal
from offbeat.serve.http.connections import prove
from offbeat.serve.http.desk import Desk, Doors, Route, sent_away

Endpoint = Callable[[Request], Awaitable[Response]]

GONE = 499
"""The caller hung up: nobody reads this status, but it is counted."""


class App:
    """The ASGI application of one desk."""

    def __init__(self, desk: Desk):
        self._routed = FastAPI(
            openapi_url=None,
            docs_url=None,
            redoc_url=None,
            exception_handlers={HTTPException: _unrouted},
        )
        self._direct: dict[tuple[str, str], Endpoint] = {}
        for route in (*worker_calls.ROUTES, *judge_calls.ROUTES, *trainer_calls.ROUTES):
            self._add(route.method, route.path, _counted(desk, route.path, _guarded(desk, route)))
        self._add("POST", "/v1/join", _counted(desk, "/v1/join", _stranger(desk)))
        self._add("GET", "/healthz", _counted(desk, "/healthz", _health(desk)))
        self._add("GET", "/metrics", _counted(desk, "/metrics", _metrics(desk)))
        self._submit = self._direct.pop(("PUT", worker_calls.SUBMIT_PATH))

    def _add(self, method: str, path: str, endpoint: Endpoint) -> None:
        self._routed.add_route(path, endpoint, methods=[method])
        if "{" not in path or path == worker_calls.SUBMIT_PATH:
            self._direct[method, path] = endpoint

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        endpoint = self._find(scope) if scope["type"] == "http" else None
        if endpoint is None:
            await self._routed(scope, receive, send)
            return
        response = await endpoint(Request(scope, receive))
        await response(scope, receive, send)

    def _find(self, scope: Scope) -> Endpoint | None:
        method, path = scope["method"], scope["path"]
        if method == "PUT":
            parts = path.split("/")
            if len(parts) == 5 and parts[2] == "trajectories" and parts[1] == "v1":
                scope["path_params"] = {"task": parts[3], "fence": parts[4]}
                return self._submit
        return self._direct.get((method, path))


def _guarded(desk: Desk, route: Route) -> Endpoint:
    async def endpoint(request: Request) -> Response:
        desk.check_open()
        worker = desk.access.admit(request, route.roles)
        prove(request)
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
        finally:
            desk.bodies.release(request)
        if not isinstance(response, StreamingResponse):
            await seal(response)
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
        page = metrics.text(counts, leased, desk.figures, desk.coordinator.worker_figures)
        return Response(page, media_type=metrics.CONTENT_TYPE)

    return endpoint


async def _unrouted(request: Request, error: HTTPException) -> Response:
    response = refusals.told(error.status_code, f"{request.method} {request.url.path[:200]}: {error.detail}")
    await seal(response)
    return response
