"""Serves the page of a run, with changes as server-sent events.

Every call needs the page's token, also on this machine, because other users of it can reach a loopback port: once in
the link, which sets a cookie, then in the cookie. The token only lets read. An event's id is a cursor, so that a
browser that was asleep goes on where it stopped. All reads take a snapshot, in a thread; the ledger's writer is never
held.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import secrets
import socket
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response
from starlette.responses import StreamingResponse as Stream
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from offbeat.errors import OffbeatError, UserError
from offbeat.files import create_atomic
from offbeat.launch.run_folder import LEDGER
from offbeat.tools.page.document import document
from offbeat.tools.page.run_data import RunData
from offbeat.tools.page.timeline import Spans
from offbeat.tools.trajectories import Decode, decoder

TOKEN = "page.token"
POLL_S = 1.0
"""How often files are looked at for new rows."""
REPORT_EVERY_S = 3.0
REPORT_SHARE = 20
"""The ledger's report is read again after `REPORT_SHARE` times the seconds that it took, and not within
`REPORT_EVERY_S`. So the pages of a large run take less than five per cent of a core for it."""
PING_EVERY_S = 15.0
"""A silent stream is written to this often, so that proxies do not end it."""
ANSWERS_PER_CALL = 5000
TEXTS_PER_CALL = 64
SPANS_PER_EVENT = 20_000
HEADERS = {
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


class PageApp:
    """The ASGI application of the page of the run in folder `path`."""

    def __init__(self, path: Path, token: str):
        self.path, self._token = path, token
        self._decode: Decode | None = None
        self._preparing: asyncio.Task[Decode] | None = None
        self._cookie = f"offbeat_{hashlib.sha256(token.encode()).hexdigest()[:12]}"
        self._loading, self._reporting, self._tracing = asyncio.Lock(), asyncio.Lock(), asyncio.Lock()
        self._spans = Spans(path)
        self._report: dict[str, Any] = {}
        self._report_due_s, self._report_mark = 0.0, (0, 0)
        self._app = Starlette(
            routes=[
                Route("/", self._page),
                Route("/data/answers", self._answers),
                Route("/data/texts", self._texts),
                Route("/data/changes", self._changes),
            ]
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        request = Request(scope, receive)
        if self._is(request.cookies.get(self._cookie)):
            await self._app(scope, receive, send)
        elif self._is(request.query_params.get("token")):
            await self._enter(scope)(scope, receive, send)
        else:
            # The same answer for a wrong token as for none.
            text = "this page needs the whole link, with its token, as the run or offbeat page has printed it"
            await PlainTextResponse(text, 401, HEADERS)(scope, receive, send)

    def _is(self, shown: str | None) -> bool:
        return shown is not None and hmac.compare_digest(shown.encode(), self._token.encode())

    def _enter(self, scope: Scope) -> Response:
        """Returns the answer to a link with the token: the same address without it, and a cookie."""
        folder = scope.get("root_path", "") + "/"
        response = RedirectResponse(folder, 303, HEADERS)
        is_secure = scope["scheme"] == "https"
        response.set_cookie(self._cookie, self._token, path=folder, httponly=True, samesite="strict", secure=is_secure)
        return response

    async def _page(self, request: Request) -> Response:
        self._preparing = asyncio.create_task(self._load())  # soon, an answer will be opened
        text, policy = document(f"{self.path.absolute().name} – Offbeat", None)
        return HTMLResponse(text, headers={**HEADERS, "Content-Security-Policy": f"{policy}; frame-ancestors 'none'"})

    async def _answers(self, request: Request) -> Response:
        after = _whole(request.query_params.get("after", "0"))
        if after is None:
            return PlainTextResponse("after must be a whole number", 400, HEADERS)
        return await self._read(lambda: RunData(self.path, _no_text).answers(after, ANSWERS_PER_CALL))

    async def _texts(self, request: Request) -> Response:
        tasks = [_whole(word) for word in request.query_params.get("tasks", "").split(",")[:TEXTS_PER_CALL]]
        known = [task for task in tasks if task is not None]
        data = RunData(self.path, await self._load())
        return await self._read(lambda: data.texts(known, with_history=True))

    async def _load(self) -> Decode:
        """Returns the run's tokenizer, which takes seconds to load the first time."""
        async with self._loading:
            if self._decode is None:
                self._decode = await asyncio.to_thread(decoder, self.path)
            return self._decode

    async def _read(self, read: Callable[[], Any]) -> Response:
        try:
            # Encoded in the thread too, so that the coordinator's event loop does not wait.
            data = await asyncio.to_thread(lambda: json.dumps(read()).encode())
            return Response(data, headers=HEADERS, media_type="application/json")
        except OffbeatError as error:
            return PlainTextResponse(str(error), 422, HEADERS)

    async def _changes(self, request: Request) -> Response:
        cursor = [_whole(word) or 0 for word in request.headers.get("last-event-id", "").split(".")]
        return Stream(self._stream(*cursor if len(cursor) == 3 else (0, 0, 0)), 200, HEADERS, "text/event-stream")

    async def _stream(self, metrics_at: int, events_at: int, spans_at: int) -> AsyncIterator[bytes]:
        data = RunData(self.path, _no_text)
        is_first, written_s = not (metrics_at or events_at or spans_at), time.monotonic()
        report: dict[str, Any] | None = None
        while True:
            change: dict[str, Any] = {"is_whole": True} if is_first else {}
            rows, metrics_at = await asyncio.to_thread(data.metrics, metrics_at)
            events, events_at = await asyncio.to_thread(data.events, events_at)
            change |= ({"metrics": rows} if rows else {}) | ({"events": events} if events else {})
            async with self._tracing:
                await asyncio.to_thread(self._spans.read)
            timeline = self._spans.since(spans_at, SPANS_PER_EVENT)
            if timeline["spans"]:
                change["timeline"] = timeline
                spans_at += len(timeline["spans"])
            if is_first or events:
                change["about"] = await asyncio.to_thread(data.about)
            if change:
                yield await asyncio.to_thread(_event, f"{metrics_at}.{events_at}.{spans_at}", change)
                written_s, is_first = time.monotonic(), False
            elif time.monotonic() - written_s > PING_EVERY_S:
                yield b": still here\n\n"
                written_s = time.monotonic()
            if rows or timeline["spans"]:
                continue  # a long file is read in parts
            newest = await self._newest_report(data)
            if newest is not report:
                report = newest
                yield await asyncio.to_thread(_event, f"{metrics_at}.{events_at}.{spans_at}", {"ledger": report})
            await asyncio.sleep(POLL_S)

    async def _newest_report(self, data: RunData) -> dict[str, Any]:
        """Returns the ledger's report, which all open pages share: the same object until it is read again."""
        async with self._reporting:
            mark = await asyncio.to_thread(self._mark)
            if mark != self._report_mark and time.monotonic() >= self._report_due_s:
                start_s = time.monotonic()
                self._report, self._report_mark = await asyncio.to_thread(data.ledger), mark
                took_s = time.monotonic() - start_s
                self._report_due_s = time.monotonic() + max(REPORT_EVERY_S, REPORT_SHARE * took_s)
            return self._report

    def _mark(self) -> tuple[int, int]:
        """Times of the last changes of the ledger's files."""
        files = (self.path / LEDGER, self.path / f"{LEDGER}-wal")
        first, second = (file.stat().st_mtime_ns if file.is_file() else 0 for file in files)
        return first, second


def page_token(run: Path) -> str:
    """Returns the token of the page that a run's coordinator serves, the same after a restart; makes it if there is
    none. It is in a file that only the run's owner can read."""
    file = run / TOKEN
    create_atomic(file, secrets.token_urlsafe(24).encode(), 0o600)
    return file.read_text().strip()


def _no_text(tokens: Any) -> str:
    """Stands for the tokenizer where no answer is read."""
    raise AssertionError("no answer is decoded here")


def _whole(word: str) -> int | None:
    return int(word) if word.isascii() and word.isdecimal() and len(word) <= 18 else None


def _event(cursor: str, change: dict[str, Any]) -> bytes:
    return f"id: {cursor}\ndata: {json.dumps(change, separators=(',', ':'))}\n\n".encode()


async def serve_page(app: PageApp, port: int, on_link: Callable[[int], None]) -> None:
    """Serves the page on loopback until a signal ends it; calls `on_link` with the port once it listens."""
    try:
        listener = socket.create_server(("127.0.0.1", port))
    except (OSError, OverflowError) as error:
        why = str(getattr(error, "strerror", None) or error).split(" (while")[0]
        raise UserError(f"--port {port}: cannot listen there: {why}; leave it out for any free port") from error
    on_link(listener.getsockname()[1])
    config = uvicorn.Config(
        app, log_config=None, access_log=False, lifespan="off", ws="none", timeout_graceful_shutdown=1
    )
    await uvicorn.Server(config).serve([listener])
