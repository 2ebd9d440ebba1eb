"""Serves the page of one or more runs, with changes as server-sent events.

Every call needs the page's token, also on this machine, because other users of it can reach a loopback port: once in
the link, which sets a cookie, then in the cookie. In a notebook, whose frame gets no cookie, the token is part of every
address. The token only lets read. An event's id is a cursor, so that a browser that was asleep goes on where it
stopped. All reads take a snapshot, in a thread; the ledger's writer is never held.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import math
import secrets
import socket
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response
from starlette.responses import StreamingResponse as Stream
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from offbeat.errors import OffbeatError, UserError
from offbeat.files import create_atomic
from offbeat.tools.page.answer_index import ORDERS, Asked
from offbeat.tools.page.document import document, names_of
from offbeat.tools.page.feed import POLL_S, Cursor, RunFeed

TOKEN = "page.token"
END_WITHIN_S = 5
PING_EVERY_S = 15.0
"""A silent stream is written to this often, so that proxies do not end it."""
ANSWERS_PER_CALL = 1000
TEXTS_PER_CALL = 64
METRICS_PER_CALL = 64
OWN_SHARE, BESIDE_SHARE = 0.6, 0.05
"""Shares of a core for reading ahead: in a process of the page's own, and in one with other work to do."""
HEADERS = {
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
NOTEBOOKS = "http://localhost:* http://127.0.0.1:* https://localhost:* https://127.0.0.1:* vscode-webview:"
"""Origins whose pages may show the page in a frame, if it is made for a notebook."""


class PageApp:
    """The ASGI application of the page of the runs in folders `paths`."""

    def __init__(self, paths: Sequence[Path], token: str, *, share: float = OWN_SHARE, is_framed: bool = False):
        self._token, self._is_framed = token, is_framed
        self.is_closing: Callable[[], bool] = lambda: False
        """Whether the server is about to end, so that streams end, too."""
        self._feeds = {name: RunFeed(path, name, share) for name, path in names_of(paths).items()}
        self._epoch = secrets.token_hex(4)
        self._cookie = f"offbeat_{hashlib.sha256(token.encode()).hexdigest()[:12]}"
        routes = {"": self._page, "data/answers": self._answers, "data/texts": self._texts}
        routes |= {"data/metrics": self._metrics, "data/timeline": self._timeline, "data/changes": self._changes}
        folder = "/{token}/" if is_framed else "/"
        self._app = Starlette(routes=[Route(f"{folder}{path}", endpoint) for path, endpoint in routes.items()])

    @property
    def link(self) -> str:
        """Path and query of the link to the page."""
        return f"/{self._token}/" if self._is_framed else f"/?token={self._token}"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        request = Request(scope, receive)
        if self._is_framed:
            may_enter = self._is(scope["path"].removeprefix(scope.get("root_path", "")).split("/")[1:2])
        else:
            may_enter = self._is([request.cookies.get(self._cookie)])
        if may_enter:
            await self._app(scope, receive, send)
        elif not self._is_framed and self._is([request.query_params.get("token")]):
            await self._enter(scope)(scope, receive, send)
        else:
            # The same answer for a wrong token as for none.
            text = "this page needs the whole link, with its token, as the run or offbeat page has printed it"
            await PlainTextResponse(text, 401, self._headers)(scope, receive, send)

    def _is(self, shown: Sequence[str | None]) -> bool:
        return any(word is not None and hmac.compare_digest(word.encode(), self._token.encode()) for word in shown)

    @property
    def _headers(self) -> Mapping[str, str]:
        return HEADERS if self._is_framed else {**HEADERS, "X-Frame-Options": "DENY"}

    def _enter(self, scope: Scope) -> Response:
        """Returns the answer to a link with the token: the same address without it, and a cookie."""
        folder = scope.get("root_path", "") + "/"
        response = RedirectResponse(folder, 303, self._headers)
        is_secure = scope["scheme"] == "https"
        response.set_cookie(self._cookie, self._token, path=folder, httponly=True, samesite="strict", secure=is_secure)
        return response

    async def _page(self, request: Request) -> Response:
        text, policy = document(f"{', '.join(self._feeds)} – Offbeat", None)
        frames = NOTEBOOKS if self._is_framed else "'none'"
        headers = {**self._headers, "Content-Security-Policy": f"{policy}; frame-ancestors {frames}"}
        return HTMLResponse(text, headers=headers)

    async def _answers(self, request: Request) -> Response:
        try:
            asked, order, start, count = _asked(request.query_params)
        except ValueError as error:
            return PlainTextResponse(str(error), 400, self._headers)
        return await self._told(request, lambda feed: asyncio.to_thread(feed.answers, asked, order, start, count))

    async def _texts(self, request: Request) -> Response:
        words = request.query_params.get("tasks", "").split(",")[:TEXTS_PER_CALL]
        tasks = [task for word in words if (task := _whole(word)) is not None]
        is_brief = "brief" in request.query_params
        return await self._told(request, lambda feed: feed.texts(tasks, is_brief=is_brief))

    async def _metrics(self, request: Request) -> Response:
        names = request.query_params.getlist("name")[:METRICS_PER_CALL]
        low, high = (_real(request.query_params.get(end)) for end in ("low", "high"))
        steps = None if low is None or high is None else (low, high)
        return await self._told(request, lambda feed: asyncio.to_thread(feed.metrics, names, steps))

    async def _timeline(self, request: Request) -> Response:
        begin, end = (_real(request.query_params.get(name)) for name in ("begin", "end"))
        return await self._told(request, lambda feed: feed.timeline(begin, end))

    async def _told(self, request: Request, read: Callable[[RunFeed], Any]) -> Response:
        """Returns what `read` finds of the run that a call is about: the one named, else the first."""
        feed = self._feeds.get(request.query_params.get("run", next(iter(self._feeds))))
        if feed is None:
            return PlainTextResponse(f"no such run here; there are {', '.join(self._feeds)}", 404, self._headers)
        try:
            found = await read(feed)
            # Encoded in a thread too, so that the coordinator's event loop does not wait.
            data = await asyncio.to_thread(_encoded, found)
            return Response(data, headers=self._headers, media_type="application/json")
        except OffbeatError as error:
            return PlainTextResponse(str(error), 422, self._headers)

    async def _changes(self, request: Request) -> Response:
        cursors = self._cursors(request.headers.get("last-event-id", ""))
        return Stream(self._stream(cursors), 200, self._headers, "text/event-stream")

    def _cursors(self, told: str) -> list[Cursor]:
        """Returns the cursors in an event's id; new ones unless the id is from this server's life."""
        epoch, _, rest = told.partition("/")
        words = rest.split("/")
        if epoch != self._epoch or len(words) != len(self._feeds):
            return [Cursor() for _ in self._feeds]
        numbers = [[_whole(number.removeprefix("-")) for number in word.split(".")] for word in words]
        is_whole = all(len(known) == len(fields(Cursor)) and None not in known for known in numbers)
        return [Cursor(*map(int, word.split("."))) if is_whole else Cursor() for word in words]

    async def _stream(self, cursors: list[Cursor]) -> AsyncIterator[bytes]:
        feeds = list(self._feeds.values())
        is_first, written_s, trouble = (
            all(cursor.metrics < 0 for cursor in cursors),
            time.monotonic(),
            [""] * len(feeds),
        )
        try:
            await asyncio.gather(*(feed.enter() for feed in feeds))
            while not self.is_closing():
                changes = []
                for number, (feed, cursor) in enumerate(zip(feeds, cursors, strict=True)):
                    change = await asyncio.to_thread(feed.changes, cursor)
                    if feed.trouble != trouble[number]:
                        change["trouble"] = trouble[number] = feed.trouble
                    if change:
                        changes.append({"run": feed.name, **({"is_whole": True} if is_first else {}), **change})
                if changes:
                    mark = "/".join([self._epoch, *map(str, cursors)])
                    yield await asyncio.to_thread(_event, mark, {"runs": changes})
                    written_s, is_first = time.monotonic(), False
                elif time.monotonic() - written_s > PING_EVERY_S:
                    yield b": still here\n\n"
                    written_s = time.monotonic()
                await asyncio.wait(
                    [asyncio.ensure_future(feed.wait(POLL_S)) for feed in feeds], return_when=asyncio.FIRST_COMPLETED
                )
        finally:
            for feed in feeds:
                feed.leave()


def page_token(run: Path) -> str:
    """Returns the token of the page that a run's coordinator serves, the same after a restart; makes it if there is
    none. It is in a file that only the run's owner can read."""
    file = run / TOKEN
    create_atomic(file, secrets.token_urlsafe(24).encode(), 0o600)
    return file.read_text().strip()


def _asked(given: Mapping[str, str]) -> tuple[Asked, str, int, int]:
    """Returns the conditions, the order and the range that a call for answers names. Raises `ValueError` about the
    first that cannot be."""
    asked = Asked()
    for name, kind in Asked.__annotations__.items():
        if word := given.get(name):
            value: Any = word if "str" in kind else _whole(word) if "int" in kind else _real(word)
            if value is None:
                raise ValueError(f"{name} must be a {'whole ' if 'int' in kind else ''}number")
            setattr(asked, name, value)
    order, start, count = given.get("order", "newest"), _whole(given.get("from", "0")), _whole(given.get("count", "50"))
    if order not in ORDERS:
        raise ValueError(f"order must be one of {', '.join(ORDERS)}")
    if start is None or count is None:
        raise ValueError("from and count must be whole numbers")
    return asked, order, start, min(count, ANSWERS_PER_CALL)


def _whole(word: str) -> int | None:
    return int(word) if word.isascii() and word.isdecimal() and len(word) <= 18 else None


def _real(word: str | None) -> float | None:
    try:
        value = float(word or "")
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _encoded(value: Any) -> bytes:
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError:  # half of a surrogate pair, which only the standard library escapes
        return json.dumps(value).encode()


def _event(cursor: str, change: dict[str, Any]) -> bytes:
    return b"id: %b\ndata: %b\n\n" % (cursor.encode(), _encoded(change))


async def serve_page(app: PageApp, port: int, on_link: Callable[[str], None]) -> None:
    """Serves the page on loopback until a signal ends it; calls `on_link` with its address once it listens."""
    listener = listen(port)
    on_link(f"http://127.0.0.1:{listener.getsockname()[1]}{app.link}")
    await server_of(app).serve([listener])


def listen(port: int) -> socket.socket:
    """Returns a socket that listens at `port` of this machine; 0: at any free one."""
    try:
        return socket.create_server(("127.0.0.1", port))
    except (OSError, OverflowError) as error:
        why = str(getattr(error, "strerror", None) or error).split(" (while")[0]
        raise UserError(f"--port {port}: cannot listen there: {why}; leave it out for any free port") from error


def server_of(app: PageApp) -> uvicorn.Server:
    """Returns the server of a page, whose streams end with it."""
    config = uvicorn.Config(
        app, log_config=None, access_log=False, lifespan="off", ws="none", timeout_graceful_shutdown=END_WITHIN_S
    )
    server = uvicorn.Server(config)
    app.is_closing = lambda: server.should_exit
    return server
