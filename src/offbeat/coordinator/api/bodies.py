"""Reads request bodies and builds answers.

Guarantees: a body never takes more memory than its call allows, neither as sent nor decompressed. All bodies of
unanswered requests together stay within one memory budget. Large bodies are processed on another thread.
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
from offbeat.coordinator.api.errors import Refusal
from offbeat.coordinator.api.limits import ServerSettings
from offbeat.waiting import on_bytes

T = TypeVar("T")
C = TypeVar("C", bound=wire.WireCall)

SMALL_BYTES = 1024
"""Answers up to this size are not compressed."""
HELD = "offbeat.held_bytes"
"""Key in a request's ASGI scope for the number of bytes of the memory budget that the request uses."""


class BodyReader:
    """Reads bodies within the limits of `settings`."""

    def __init__(self, settings: ServerSettings):
        self.settings = settings
        self.held_bytes = 0

    async def record(self, request: Request, kind: type[C]) -> C:
        """Reads the body as a call of type `kind`, of at most `kind.max_bytes` bytes."""
        return await self.read(request, kind.max_bytes, partial(wire.decode, kind=kind))

    async def read(self, request: Request, limit_bytes: int, form: Callable[[bytes], T]) -> T:
        """Reads and decompresses the whole body, and returns the result of decoding it with the function `form`.

        Refuses a body that is not msgpack, is larger than `limit_bytes`, arrives too slowly or is damaged, or for which
        `form` raises `Malformed`.
        """
        check_type(request, wire.MSGPACK)
        digest = needed_digest(request)
        encoding = request.headers.get("content-encoding", "identity")
        if encoding not in ("identity", wire.ZSTD):
            raise Refusal(415, f"the Content-Encoding is {encoding[:40]!r}; it must be {wire.ZSTD} or missing")
        data = await self._receive(request, min(limit_bytes, self.settings.max_body_bytes))
        await _check_digest(data, digest)
        limit_bytes = min(limit_bytes, self.settings.max_decompressed_bytes)
        try:
            size = len(data)
            if encoding == wire.ZSTD:
                size = self._hold_decompressed(request, data, limit_bytes)
                form = partial(_decompressed, limit_bytes=limit_bytes, form=form)
            return await on_bytes(data, form, size)
        except wire.Malformed as error:
            raise Refusal(400, str(error)) from error

    async def octets(self, request: Request, limit_bytes: int, digest: bytes | None = None) -> bytes:
        """Reads a body of raw bytes and checks it against `digest`; None: the digest in the request's header."""
        check_type(request, wire.OCTETS)
        digest = digest or needed_digest(request)
        data = await self._receive(request, limit_bytes)
        await _check_digest(data, digest)
        return data

    def release(self, request: Request) -> None:
        """Frees the part of the memory budget that an answered request has used."""
        self.held_bytes -= request.scope.pop(HELD, 0)

    async def _receive(self, request: Request, limit_bytes: int) -> bytes:
        declared = request.headers.get("content-length", "")
        if declared.isdecimal() and int(declared) > limit_bytes:
            raise _too_large(limit_bytes)
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
                        raise _too_large(limit_bytes)
                    self._hold(request, len(part))
                    size += len(part)
                    parts.append(part)
        except TimeoutError:
            why = f"the body took longer than {self.settings.body_within_s:g} s to arrive"
            raise Refusal(408, why, close=True) from None
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _hold(self, request: Request, num_bytes: int) -> None:
        if self.held_bytes + num_bytes > self.settings.max_held_bytes:
            raise Refusal(
                503, "the coordinator holds too many request bodies at once; try again later", retry_after_s=1.0
            )
        self.held_bytes += num_bytes
        request.scope[HELD] = request.scope.get(HELD, 0) + num_bytes

    def _hold_decompressed(self, request: Request, data: bytes, limit_bytes: int) -> int:
        """Reserves memory budget for the decompressed body; returns its size in bytes."""
        size = wire.decompressed_size(data)
        if size > limit_bytes:
            raise _too_large(limit_bytes, " after decompression")
        self._hold(request, size)
        return size


def needed_digest(request: Request) -> bytes:
    """Returns the digest in the request's header; refuses a request without one."""
    digest = wire.read_digest(request.headers, wire.CONTENT_DIGEST)
    if digest is None:
        raise Refusal(
            400,
            f"the {wire.CONTENT_DIGEST} header is missing; use the same version of Offbeat as the coordinator",
            kind=wire.DAMAGED,
        )
    return digest


async def _check_digest(data: bytes, digest: bytes) -> None:
    """Refuses a damaged body, before it is decompressed or decoded; the client then sends it again."""
    if await on_bytes(data, lambda body: blake3(body).digest()) != digest:
        why = f"the body was damaged on the way: it does not match its {wire.CONTENT_DIGEST} header"
        raise Refusal(400, why, kind=wire.DAMAGED)


def _decompressed(data: bytes, limit_bytes: int, form: Callable[[bytes], T]) -> T:
    found = wire.decompress(data, limit_bytes)
    if found is None:
        raise _too_large(limit_bytes, " after decompression")
    return form(found)


def check_type(request: Request, allowed: str) -> None:
    found = request.headers.get("content-type", "")
    if found != allowed and found.partition(";")[0].strip().lower() != allowed:
        raise Refusal(415, f"the Content-Type is {found[:40]!r}; it must be {allowed}")


def _too_large(limit_bytes: int, when: str = "") -> Refusal:
    return Refusal(413, f"the body is larger than {limit_bytes} bytes{when}")


async def reply(request: Request, record: Any, status: int = 200) -> Response:
    """Returns `record` as a response, compressed if it exceeds `SMALL_BYTES` and the caller accepts compression."""
    data = wire.encode(record)
    headers = {}
    if len(data) > SMALL_BYTES and wire.ZSTD in request.headers.get("accept-encoding", ""):
        data = await on_bytes(data, wire.compress)
        headers["Content-Encoding"] = wire.ZSTD
    return Response(data, status, headers, wire.MSGPACK)


async def seal(response: Response) -> None:
    """Adds a header with the digest of the body. Callers compare the two to detect damaged answers. An answer without
    a digest is not the coordinator's but a proxy's."""
    digest = await on_bytes(bytes(response.body), wire.content_digest)
    response.raw_headers.append((wire.CONTENT_DIGEST.lower().encode(), digest.encode()))
