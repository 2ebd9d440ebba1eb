"""Limits on connections that send nothing, or next to nothing.

uvicorn waits for the head of a request (request line and headers) without a limit. Here the head is limited in time and
size. A client that is answered before it has sent its whole body gets a limited time to send the rest, so that it can
read the answer. When all connections are taken, a new one replaces the oldest unauthenticated one. So members of the
run can always connect, however many connections strangers open.
"""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.requests import Request
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from offbeat.coordinator.api.limits import ServerSettings

CONNECTION = "offbeat.connection"
"""Key under which a request's scope holds its connection."""
TOO_SLOW = b'{"error":"the request line and headers took too long to arrive"}'
TOO_LONG = b'{"error":"the request line and headers are too long"}'


class OneWrite:
    """Wraps a transport so that the head of an HTTP answer is sent together with the first part of the body. If no body
    follows at once, the head is sent alone."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop):
        self._transport, self._loop, self._head = transport, loop, b""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        if self._head:
            data, self._head = self._head + data, b""
        elif data.startswith(b"HTTP/1.1 ") and data.endswith(b"\r\n\r\n"):
            self._head = data
            self._loop.call_soon(self.flush)
            return
        self._transport.write(data)

    def flush(self) -> None:
        if self._head:
            head, self._head = self._head, b""
            self._transport.write(head)

    def close(self) -> None:
        self.flush()
        self._transport.close()


class GuardedProtocol(HttpToolsProtocol):
    """uvicorn's HTTP protocol with the limits of this module; `guarded` makes a subclass with a server's settings."""

    limits: ServerSettings
    unproven: dict[GuardedProtocol, None]
    """Unauthenticated connections of one server, the oldest first."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._timer: asyncio.TimerHandle | None = None
        self._in_request = False
        """Whether the head of a request has arrived, but not yet its whole body."""
        self._num_head_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        if len(self.connections) >= self.limits.max_connections - 1:  # uvicorn would refuse the last connection
            self._make_room()
        super().connection_made(OneWrite(transport, self.loop))  # type: ignore[arg-type]  # a transport in all but type
        self.unproven[self] = None
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self.prove()
        super().connection_lost(exc)

    def prove(self) -> None:
        """Takes this connection off the list of unauthenticated connections, because it is authenticated or closed."""
        self.unproven.pop(self, None)

    def _make_room(self) -> None:
        oldest = next(iter(self.unproven), None)
        if oldest is not None:
            oldest.prove()
            self.connections.discard(oldest)
            oldest.transport.abort()

    def data_received(self, data: bytes) -> None:
        if not self._in_request:
            self._await_head()
            self._num_head_bytes += len(data)
        super().data_received(data)
        if not self._in_request and self._num_head_bytes > self.limits.max_head_bytes:
            self._hang_up(b"431 Request Header Fields Too Large", TOO_LONG)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope[CONNECTION] = self  # type: ignore[literal-required]
        self._await_head()

    def on_headers_complete(self) -> None:
        self._stop_timer()
        may_be_long = self._num_head_bytes > self.limits.max_head_bytes  # or the count includes part of a body
        self._in_request, self._num_head_bytes = True, 0
        if may_be_long and self._head_bytes() > self.limits.max_head_bytes:
            self._hang_up(b"431 Request Header Fields Too Large", TOO_LONG)
            raise ValueError("the request line and headers are too long")  # stops the parser
        super().on_headers_complete()

    def _head_bytes(self) -> int:
        return len(self.url) + sum(len(name) + len(value) for name, value in self.headers)

    def send_400_response(self, msg: str) -> None:
        if not self.transport.is_closing():  # otherwise an error has already been sent
            super().send_400_response(msg)

    def on_message_complete(self) -> None:
        self._stop_timer()
        self._in_request, self._num_head_bytes = False, 0
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._in_request and not self.transport.is_closing():  # answered before the whole body arrived
            self._stop_timer()
            self._timer = self.loop.call_later(self.limits.body_within_s, self.transport.close)

    def _await_head(self) -> None:
        if self._timer is None:
            self._timer = self.loop.call_later(
                self.limits.head_within_s, self._hang_up, b"408 Request Timeout", TOO_SLOW
            )

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _hang_up(self, status: bytes, body: bytes) -> None:
        self._stop_timer()
        if self.transport.is_closing():
            return
        if self.cycle is None or self.cycle.response_complete:  # no other answer is being sent
            head = b"HTTP/1.1 %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
            self.transport.write(head % (status, len(body)) + body)
        self.transport.close()


def guarded(settings: ServerSettings) -> type[GuardedProtocol]:
    return type("GuardedProtocol", (GuardedProtocol,), {"limits": settings, "unproven": {}})


def prove(request: Request) -> None:
    """Marks the connection of `request` as authenticated, so that new connections never replace it."""
    request.scope[CONNECTION].prove()
