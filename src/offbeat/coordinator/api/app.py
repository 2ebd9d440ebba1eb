"""The coordinator's ASGI application.

Each call is checked in this order: server state, authentication, rate limit, role, then type, size and schema of the
body; only then does it reach the coordinator. A call that fails a check changes nothing and is answered with one status
and one line of text (`errors`). Each kind of body has one schema (`wire`) and is parsed once. Every answer carries the
digest of its body in a header, unless it is a file.

Workers' frequent calls are looked up in a dictionary. A router, which is slow, handles rare and unknown paths.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from offbeat.coordinator.api import errors, metrics, trainer_routes, worker_routes
from offbeat.coordinator.api.access import address
from offbeat.coordinator.api.bodies import seal
from offbeat.coordinator.api.connection_guard import prove
from offbeat.coordinator.api.errors import Refusal
from offbeat.coordinator.api.state import ApiState, Route
from offbeat.net import is_loopback

Endpoint = Callable[[Request], Awaitable[Response]]

PAGE = "/page"
GONE = 499
"""Status of a call whose caller hung up; it is only counted, never sent."""


class App:
    """The ASGI application of one run."""

    def __init__(self, api: ApiState):
        self._routed = Starlette(exception_handlers={HTTPException: _unrouted})
        self._direct: dict[tuple[str, str], Endpoint] = {}
        for route in (*worker_routes.ROUTES, *worker_routes.JUDGE_ROUTES, *trainer_routes.ROUTES):
            self._add(api, route.method, route.path, partial(_admitted, api, route))
        self._add(api, "POST", "/v1/join", partial(worker_routes.join, api))
        self._add(api, "GET", "/healthz", partial(_health, api))
        self._add(api, "GET", "/metrics", partial(_metrics, api))
        if api.served.page is not None:
            self._routed.mount(PAGE, _closing_with(api, api.served.page))
        self._submit = self._direct.pop(("PUT", worker_routes.SUBMIT_PATH))

    def _add(self, api: ApiState, method: str, path: str, inner: Endpoint) -> None:
        endpoint = _counted(api, path, inner)
        self._routed.add_route(path, endpoint, methods=[method])
        if "{" not in path or path == worker_routes.SUBMIT_PATH:
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


async def _admitted(api: ApiState, route: Route, request: Request) -> Response:
    worker = api.access.admit(request, route.roles)
    prove(request)
    return await route.handler(api, worker, request)


def _counted(api: ApiState, path: str, inner: Endpoint) -> Endpoint:
    """Wraps `inner` to refuse calls while the server is not open, to turn errors into responses and to count calls."""

    async def endpoint(request: Request) -> Response:
        start_s = api.clock()
        try:
            api.check_open()
            response = await inner(request)
        except ClientDisconnect:
            response = Response(status_code=GONE)
        except Exception as error:  # noqa: BLE001 - a bug in one call must not end others
            response = errors.answer(error)
        finally:
            api.bodies.release(request)
        if not isinstance(response, StreamingResponse):
            await seal(response)
        api.figures.add(path, response.status_code, api.clock() - start_s)
        return response

    return endpoint


async def _health(api: ApiState, request: Request) -> Response:
    return Response(msgspec.json.encode({"state": api.server_state.value}), media_type=errors.JSON)


async def _metrics(api: ApiState, request: Request) -> Response:
    if api.served.behind_proxy or not is_loopback(address(request)):
        api.access.admit(request, worker_routes.ANYONE)
    ledger = api.coordinator.ledger
    counts = await api.coordinator.call(ledger.counts)
    leased = await api.coordinator.call(ledger.num_leased)
    page = metrics.text(counts, leased, api.figures, api.coordinator.presence.figures)
    return Response(page, media_type=metrics.CONTENT_TYPE)


def _closing_with(api: ApiState, page: ASGIApp) -> ASGIApp:
    """Wraps the page: it is refused while the server is not open, and its streams end when the server closes."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            api.check_open()
        except Refusal as error:
            await errors.answer(error)(scope, receive, send)
            return
        await page(scope, partial(api.until_closing, receive), send)

    return app


async def _unrouted(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    response = errors.refuse(error.status_code, f"{request.method} {request.url.path[:200]}: {error.detail}")
    await seal(response)
    return response
