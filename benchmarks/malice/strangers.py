"""Adversaries without a token, which reach only the coordinator's public endpoints."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping
from functools import cache

import zstandard

from benchmarks.malice.adversary import Stranger, request
from offbeat.client import wire

MIB = 1024 * 1024
BOMB_BYTES = 512 * MIB
CLAIMED_BYTES = 200 * MIB
NUM_HELD, HOLD_S = 64, 5.0
NUM_SLOW, SLOW_PARTS = 16, 8
PATHS = ("/v1/join", "/v1/lease", "/v1/claim", "/v1/weights/1", "/v1/pieces/00", "/healthz", "/metrics")
JOIN = "/v1/join"


MADE_UP = "a" * 40


def to_join(body: bytes = b"", headers: Mapping[str, str | None] | None = None, token: str = MADE_UP) -> bytes:
    """Returns a request to join with an arbitrary body."""
    return request("POST", JOIN, body, {"Authorization": f"Bearer {token}", **(headers or {})})


def joining(name: str = "stranger") -> bytes:
    """Returns the body of a request to join, as an honest worker would write it."""
    return wire.encode(wire.Join(name=name, secret_hash=bytes(32)))


@cache
def zstd_bomb() -> bytes:
    """Returns a few bytes that decompress to `BOMB_BYTES` zeros without stating their size."""
    packer = zstandard.ZstdCompressor(level=1, write_content_size=False).compressobj()
    zeros = bytes(4 * MIB)
    return b"".join(packer.compress(zeros) for _ in range(BOMB_BYTES // len(zeros))) + packer.flush()


@cache
def false_size() -> bytes:
    """Returns a frame of a few bytes that claims to decompress to `CLAIMED_BYTES`."""
    frame = bytearray(zstandard.ZstdCompressor().compress(bytes(100_000)))
    frame[5:9] = CLAIMED_BYTES.to_bytes(4, "little")  # after the magic number and the descriptor
    return bytes(frame)


class ZstdBomb(Stranger):
    """Joins with a body of 16 kilobytes that decompresses to half a gigabyte: the coordinator's memory."""

    async def strike(self) -> None:
        await self.say(to_join(zstd_bomb(), {"Content-Encoding": wire.ZSTD}))


class FalseSize(Stranger):
    """Joins with a compressed body that claims 200 MB and holds nothing like it: memory set aside in advance."""

    async def strike(self) -> None:
        await self.say(to_join(false_size(), {"Content-Encoding": wire.ZSTD}))


class GiantHead(Stranger):
    """Sends a megabyte of headers: what is kept before anybody is known."""

    async def strike(self) -> None:
        await self.say(to_join(b"", {"X-Padding": "a" * MIB}))


class SlowHeads(Stranger):
    """Sends its headers a byte at a time on many connections (slowloris): connections that end nowhere."""

    pause_s = 2.0

    async def strike(self) -> None:
        parts = [bytes([byte]) for byte in to_join()[:SLOW_PARTS]]
        await asyncio.gather(*(self.say(*parts, pause_s=1.0, within_s=1.0) for _ in range(NUM_SLOW)))


class SlowBodies(Stranger):
    """Announces bodies of 60,000 bytes and sends them a byte at a time on many connections: calls that never end."""

    pause_s = 2.0

    async def strike(self) -> None:
        head = to_join(b"", {"Content-Length": "60000"})
        parts = [head, *([b"\x80"] * SLOW_PARTS)]
        await asyncio.gather(*(self.say(*parts, pause_s=1.0, within_s=1.0) for _ in range(NUM_SLOW)))


class IdleCrowd(Stranger):
    """Opens 64 connections at once and says nothing: room for those who have something to say."""

    async def strike(self) -> None:
        await asyncio.gather(*(self.say(b"", pause_s=HOLD_S, within_s=0.5) for _ in range(NUM_HELD)))


class WrongMethods(Stranger):
    """Calls every path with methods that it does not have: errors that nobody foresaw."""

    async def strike(self) -> None:
        method = self.scene.rng.choice(("DELETE", "PATCH", "TRACE", "OPTIONS", "HEAD", "BREW", "PUT"))
        await self.say(request(method, self.scene.rng.choice(PATHS), b"\x80"))


class Garbage(Stranger):
    """Joins with random bytes in place of msgpack: the decoder."""

    async def strike(self) -> None:
        await self.say(to_join(self.scene.rng.randbytes(self.scene.rng.randrange(1, 4096))))


class DeepNesting(Stranger):
    """Joins with lists in lists, 50,000 deep: the decoder's stack."""

    async def strike(self) -> None:
        nested = b"\x91" * 50_000 + b"\xc0"
        body = b"\x83\xa4name\xa1b\xabsecret_hash\xc4\x20" + bytes(32) + b"\xaccapabilities\x81\xa1c" + nested
        await self.say(to_join(body))


class GuessedToken(Stranger):
    """Joins with tokens that it made up: the ledger is asked about each."""

    pause_s = 0.2

    async def strike(self) -> None:
        await self.say(to_join(joining(), token=secrets.token_urlsafe(32)))


class GuessedSecret(Stranger):
    """Asks for work with secrets that it made up: the ledger is asked about each, and what is known may grow."""

    pause_s = 0.1

    async def strike(self) -> None:
        body = wire.encode(wire.LeaseCall(capacity=1, have_version=None, wait_s=0.0))
        await self.say(request("POST", "/v1/lease", body, {"Authorization": f"Bearer {secrets.token_urlsafe(32)}"}))


class UsedToken(Stranger):
    """Joins with a token that an honest worker used before: that worker's identity."""

    async def strike(self) -> None:
        await self.say(to_join(joining(self.scene.honest[0]), token=self.scene.used_token))


class Truncated(Stranger):
    """Announces a body, sends half of it and hangs up: calls that are half done."""

    async def strike(self) -> None:
        body = joining()
        whole = to_join(body)
        await self.say(whole[: -len(body) // 2], within_s=0.2)


class Smuggler(Stranger):
    """Sends two lengths, or a length and chunks, so that two readers see two requests: what is checked at the door."""

    async def strike(self) -> None:
        heads: tuple[dict[str, str | None], ...] = (
            {"Transfer-Encoding": "chunked"},
            {"Content-Length": "5\r\nContent-Length: 50"},
            {"Content-Length": "-1"},
            {"Content-Length": "9" * 5000},
            {"Transfer-Encoding": "chunked, identity", "Content-Length": None},
        )
        await self.say(to_join(b"0\r\n\r\nGET /metrics HTTP/1.1\r\n\r\n", self.scene.rng.choice(heads)))


class EndlessChunks(Stranger):
    """Sends a body in chunks, without a length and past every limit: memory, a little at a time."""

    async def strike(self) -> None:
        head = to_join(b"", {"Content-Length": None, "Transfer-Encoding": "chunked"})
        chunk = b"4000\r\n" + bytes(0x4000) + b"\r\n"
        await self.say(head, *([chunk] * 256), within_s=2.0)


class LongNames(Stranger):
    """Joins with a name that fills what a join may hold: what is kept of strangers, and logged."""

    async def strike(self) -> None:
        await self.say(to_join(joining("\x1b[31m\n" * 42), token="a" * 256))


class Prowler(Stranger):
    """Asks for files outside the weights, by dots, escapes, zeros and endless paths: the coordinator's disk."""

    async def strike(self) -> None:
        paths = (
            "/v1/weights/../../../../etc/passwd",
            "/v1/weights/1/..%2f..%2f..%2fledger.sqlite",
            "/v1/pieces/%2e%2e%2f%2e%2e%2fledger.sqlite",
            "/v1/weights/1/model.safetensors%00.png",
            "/v1/manifests/" + "9" * 5000,
            "http://127.0.0.1:1/v1/run",
            "/" + "a" * 60_000,
        )
        await self.say(request("GET", self.scene.rng.choice(paths)))


class Spectator(Stranger):
    """Asks for the metrics ten times a second: the thread that writes the ledger has to count for it."""

    pause_s = 0.1

    async def strike(self) -> None:
        await self.say(request("GET", self.scene.rng.choice(("/metrics", "/healthz"))))


STRANGERS: tuple[type[Stranger], ...] = (
    ZstdBomb,
    FalseSize,
    GiantHead,
    SlowHeads,
    SlowBodies,
    IdleCrowd,
    WrongMethods,
    Garbage,
    DeepNesting,
    GuessedToken,
    GuessedSecret,
    UsedToken,
    Truncated,
    Smuggler,
    EndlessChunks,
    LongNames,
    Prowler,
    Spectator,
)
