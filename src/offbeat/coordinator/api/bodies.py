"""Request bodies in, and answers out.

Guarantees: a body that is too large, as sent or once decompressed, is never in memory beyond the limit of its call; one
that comes too slowly, or does not match its digest, is refused; all bodies that are being received, decompressed or
answered stay within one budget. Large ones are hashed, decompressed and decoded on another thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from blake3 import blake3
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from offbeat.client import wire
from offbeat.coordinator.api.errors import Refusal, damaged
from offbeat.coordinator.api.limits import ServerSettings

T = TypeVar("T")
C = TypeVar("C", bound=wire.WireCall)

LARGE_BYTES = 256 * 1024
"""From this size on, work on a body would delay other callers and is done on another thread."""
SMALL_BYTES = 1024
"""Up to this size, compressing is not worth it."""
HELD = "offbeat.held_bytes"
"""Key of a request's scope for its share of the budget."""


class BodyReader:
    """Reads bodies within the settings' limits."""

    def __init__(self, settings: ServerSettings):
        self.settings = settings
        self.held_bytes = 0

    async def record(self, request: Request, kind: type[C]) -> C:
        """The body as a call of type `kind`, within its limit of bytes."""
        return await self.read(request, kind.max_bytes, partial(wire.decode, kind=kind))

    async def read(self, request: Request, limit_bytes: int, form: Callable[[bytes], T]) -> T:
        """The result of `form` on the whole, decompressed body.

        Refuses a body that is not msgpack, has more than `limit_bytes`, is too slow, damaged, or `Malformed`.
        """
        check_type(request, wire.MSGPACK)
        digest = needed_digest(request)
        encoding = request.headers.get("content-encoding", "identity")
        if encoding not in ("identity", wire.ZSTD):
            raise Refusal(415, f"Content-Encoding: {encoding[:40]!r}; allowed {wire.ZSTD} or none")
        data = await self._receive(request, min(limit_bytes, self.settings.max_body_bytes))
        await _check_digest(data, digest)
        limit_bytes = min(limit_bytes, self.settings.max_decompressed_bytes)
        try:
            size = len(data)
            if encoding == wire.ZSTD:
                size = self._hold_decompressed(request, data, limit_bytes)
                form = partial(_decompressed, limit_bytes=limit_bytes, form=form)
            return form(data) if size <= LARGE_BYTES else await asyncio.to_thread(form, data)
        except wire.Malformed as error:
            raise Refusal(400, str(error)) from error

    async def octets(self, request: Request, limit_bytes: int, digest: bytes | None = None) -> bytes:
        """A body of raw bytes, with this digest or the one in its header."""
        check_type(request, wire.OCTETS)
        digest = digest or needed_digest(request)
        data = await self._receive(request, limit_bytes)
        await _check_digest(data, digest)
        return data

    def release(self, request: Request) -> None:
        """Returns the budget of an answered request."""
        self.held_bytes -= request.scope.pop(HELD, 0)

    async def _receive(self, request: Request, limit_bytes: int) -> bytes:
        refuse_large(request, limit_bytes)
        parts: list[bytes] = []
        size, more = 0, True
        try:
            async with asyncio.timeout(self.settings.body_within_s):
                while more:
                    message = await request.receive()
                    if message["type"] == "http.disconnect":
                        raise ClientDisconnect
                    part, more = message.get("body", b""), message.get("more_body", False)
                    if size + len(part) > limit_bytes:
                        raise too_large(limit_bytes)
                    self._hold(request, len(part))
                    size += len(part)
                    parts.append(part)
        except TimeoutError:
            raise Refusal(408, f"the body took longer than {self.settings.body_within_s:g} s", close=True) from None
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _hold(self, request: Request, num_bytes: int) -> None:
        if self.held_bytes + num_bytes > self.settings.max_held_bytes:
            raise Refusal(503, "too many bodies at once", retry_after_s=1.0)
        self.held_bytes += num_bytes
        request.scope[HELD] = request.scope.get(HELD, 0) + num_bytes

    def _hold_decompressed(self, request: Request, data: bytes, limit_bytes: int) -> int:
        """Reserves budget for the decompressed body; returns its size."""
        size = wire.decompressed_size(data)
        if size > limit_bytes:
            raise _too_large_inside(limit_bytes)
        self._hold(request, size)
        return size


def needed_digest(request: Request) -> bytes:
    """The digest in the header of a request."""
    digest = wire.read_digest(request.headers, wire.CONTENT_DIGEST)
    if digest is None:
        raise Refusal(
            400,
            f"{wire.CONTENT_DIGEST}: missing; every body comes with its blake3 digest; use the same version of Offbeat",
            kind=wire.DAMAGED,
        )
    return digest


async def _check_digest(data: bytes, digest: bytes) -> None:
    """Refuses a damaged body before anything is concluded from it."""
    if await _on_bytes(data, _digest) != digest:
        raise damaged()


def _digest(data: bytes) -> bytes:
    return blake3(data).digest()


async def _on_bytes(data: bytes, work: Callable[[bytes], T]) -> T:
    """Runs `work` on bytes, on another thread if they are many."""
    return work(data) if len(data) <= LARGE_BYTES else await asyncio.to_thread(work, data)


def _decompressed(data: bytes, limit_bytes: int, form: Callable[[bytes], T]) -> T:
    found = wire.decompress(data, limit_bytes)
    if found is None:
        raise _too_large_inside(limit_bytes)
    return form(found)


def _too_large_inside(limit_bytes: int) -> Refusal:
    return Refusal(413, f"the body is more than {limit_bytes} bytes once decompressed")


def check_type(request: Request, allowed: str) -> None:
    found = request.headers.get("content-type", "")
    if found != allowed and found.partition(";")[0].strip().lower() != allowed:
        raise Refusal(415, f"Content-Type: {found[:40]!r}; allowed {allowed}")


def refuse_large(request: Request, limit_bytes: int) -> None:
    """Refuses a large body before its first byte, by its Content-Length."""
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > limit_bytes:
        raise too_large(limit_bytes)


def too_large(limit_bytes: int) -> Refusal:
    return Refusal(413, f"the body is more than {limit_bytes} bytes")


async def reply(request: Request, record: Any, status: int = 200) -> Response:
    """A record as an answer, compressed if the caller accepts that and it is worth it."""
    data = wire.encode(record)
    headers = {}
    if len(data) > SMALL_BYTES and wire.ZSTD in request.headers.get("accept-encoding", ""):
        data = await _on_bytes(data, wire.compress)
        headers["Content-Encoding"] = wire.ZSTD
    return Response(data, status, headers, wire.MSGPACK)


async def seal(response: Response) -> None:
    """Adds the digest of an answer, by which callers know that it is the coordinator's and undamaged."""
    digest = await _on_bytes(bytes(response.body), wire.content_digest)
    response.raw_headers.append((wire.CONTENT_DIGEST.lower().encode(), digest.encode()))
