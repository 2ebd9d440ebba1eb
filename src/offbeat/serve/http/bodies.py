"""Request bodies on their way in, and answers on their way out.

Guarantees: a body that is too large, as sent or once decompressed, is never in memory beyond the limit; one that comes
too slowly, or does not match its digest, goes no further; all bodies together stay within one budget.
"""

from __future__ import annotations

import asyncio
from typing import Any, TypeVar

from blake3 import blake3
from fastapi import Request, Response
from starlette.requests import ClientDisconnect

from offbeat.serve.http import coding, wire
from offbeat.serve.http.limits import MIB, ServerSettings
from offbeat.serve.http.refusals import Refusal

T = TypeVar("T")

LARGE_BYTES = MIB
"""From here on, (de)compressing would hold up other callers and is done on another thread."""
SMALL_BYTES = 1024
"""Up to here, compressing is not worth it."""


class Bodies:
    """Reads bodies within the settings' limits."""

    def __init__(self, settings: ServerSettings):
        self.settings = settings
        self.held_bytes = 0

    async def record(self, request: Request, kind: type[T], limit_bytes: int | None = None) -> T:
        """A small call's body as a record."""
        return decoded(await self.read(request, limit_bytes=limit_bytes), kind)

    async def read(self, request: Request, *, limit_bytes: int | None = None, needs_digest: bool = False) -> bytes:
        """The body, decompressed; refuses what is not msgpack, too large, too slow or damaged."""
        check_type(request, wire.MSGPACK)
        limit = self.settings.max_body_bytes if limit_bytes is None else limit_bytes
        refuse_large(request, limit)
        data = await self._receive(request, limit)
        digest = coding.read_digest(request.headers, coding.CONTENT_DIGEST)
        if needs_digest and digest is None:
            raise Refusal(400, f"{coding.CONTENT_DIGEST}: missing; the blake3 digest of the body is needed")
        if digest is not None and blake3(data).digest() != digest:
            raise Refusal(400, f"{coding.CONTENT_DIGEST}: the body is not what was sent")
        encoding = request.headers.get("content-encoding", "identity")
        if encoding == "identity":
            return data
        if encoding != coding.ZSTD:
            raise Refusal(415, f"Content-Encoding: {encoding[:40]!r}; allowed {coding.ZSTD} or none")
        return await self._decompress(data)

    async def octets(self, request: Request, limit_bytes: int) -> bytes:
        """A body that is nothing but bytes, all of it in memory."""
        check_type(request, wire.OCTETS)
        refuse_large(request, limit_bytes)
        return await self._receive(request, limit_bytes)

    async def _receive(self, request: Request, limit_bytes: int) -> bytes:
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
                    self._hold(len(part))
                    size += len(part)
                    parts.append(part)
        except TimeoutError:
            raise Refusal(408, f"the body took longer than {self.settings.body_within_s:g} s", close=True) from None
        finally:
            self.held_bytes -= size
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _hold(self, num_bytes: int) -> None:
        if self.held_bytes + num_bytes > self.settings.max_held_bytes:
            raise Refusal(503, "too many bodies at once", retry_after_s=1.0)
        self.held_bytes += num_bytes

    async def _decompress(self, data: bytes) -> bytes:
        limit = self.settings.max_decompressed_bytes
        try:
            size = coding.decompressed_size(data)
            if size is not None and size <= LARGE_BYTES:
                found = coding.decompress(data, limit)
            else:
                found = await asyncio.to_thread(coding.decompress, data, limit)
        except coding.Malformed as error:
            raise Refusal(400, str(error)) from error
        if found is None:
            raise Refusal(413, f"the body is more than {limit} bytes once decompressed")
        return found


def decoded(data: bytes, kind: type[T]) -> T:
    try:
        return wire.decode(data, kind)
    except coding.Malformed as error:
        raise Refusal(400, str(error)) from error


def check_type(request: Request, allowed: str) -> None:
    found = request.headers.get("content-type", "")
    if found != allowed and found.partition(";")[0].strip().lower() != allowed:
        raise Refusal(415, f"Content-Type: {found[:40]!r}; allowed {allowed}")


def refuse_large(request: Request, limit_bytes: int) -> None:
    """Says no before the first byte where the caller tells how many will come."""
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > limit_bytes:
        raise too_large(limit_bytes)


def too_large(limit_bytes: int) -> Refusal:
    return Refusal(413, f"the body is more than {limit_bytes} bytes")


async def reply(request: Request, record: Any, status: int = 200) -> Response:
    """A record as an answer, compressed if that is wanted and worth it."""
    data = wire.encode(record)
    headers = {}
    if len(data) > SMALL_BYTES and coding.ZSTD in request.headers.get("accept-encoding", ""):
        data = coding.compress(data) if len(data) <= LARGE_BYTES else await asyncio.to_thread(coding.compress, data)
        headers["Content-Encoding"] = coding.ZSTD
    return Response(data, status, headers, wire.MSGPACK)
