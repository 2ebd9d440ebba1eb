"""A proxy that models a bad line between callers and their coordinator, on one machine and without privileges.

Calls pass one by one, so that whole calls can be delayed, sent twice, or recorded. The line can be cut: bytes under way
in both directions then wait and arrive late, as with TCP. It can be slow, by a delay for each call and a rate that all
connections share, and connections can break after a number of bytes. Bits of bodies can flip, answers can be lost, and
pages of other servers can come instead of answers. Random numbers are seeded.
"""

from __future__ import annotations

import asyncio
import random
import re
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field

from blake3 import blake3

from benchmarks.common.listener import Bucket, Listener

PIECE_BYTES = 4096
ENDS = (OSError, EOFError, asyncio.LimitOverrunError)
"""Errors that a connection raises if either side breaks it off; an incomplete read is an EOFError."""
SUBMISSION = re.compile(rb"PUT /v1/trajectories/(\d+)/(\d+) ")
PAGES = ("404 Not Found", "502 Bad Gateway", "200 OK", "403 Forbidden", "413 Payload Too Large", "302 Found")
"""Statuses that proxies, gateways and captive portals send in a coordinator's place."""
HTML = b"<html><body><h1>Please log in</h1></body></html>"


@dataclass
class Call:
    head: bytes
    body: bytes

    @property
    def whole(self) -> bytes:
        return self.head + self.body


@dataclass
class Line:
    """Faults of the line, which may be changed at any time."""

    delay_s: float = 0.0
    bytes_per_s: float | None = None
    break_after_bytes: int | None = None
    """Number of bytes to the caller after which each connection breaks."""
    twice: float = 0.0
    """Share of calls that are sent twice; the copy follows up to `late_s` seconds later."""
    late_s: float = 0.0
    damaged: float = 0.0
    """Share of calls, and of pieces of answers, in whose body a bit flips."""
    lost: float = 0.0
    """Share of calls whose answer does not reach the caller."""
    strange: float = 0.0
    """Share of calls that do not arrive and are answered with a page, with the statuses in `PAGES` in turn."""
    max_faults: int | None = None
    """Largest number of faults of these three kinds together; None: no limit."""


@dataclass
class Seen:
    """Calls that passed, and faults that were injected."""

    acknowledged: dict[tuple[int, int], bytes] = field(default_factory=dict)
    """Digests of submissions that the coordinator accepted, by task and fence, even if its answer was then lost."""
    statuses: Counter[int] = field(default_factory=Counter)
    copies: Counter[int] = field(default_factory=Counter)
    """Statuses of the answers to calls that were sent a second time."""
    submissions: list[Call] = field(default_factory=list)
    faults: Counter[str] = field(default_factory=Counter)
    """Number of damaged bodies, lost answers and pages sent instead of answers."""


class FaultProxy(Listener):
    limit_bytes = 2**26

    def __init__(self, port: int, line: Line | None = None, seed: int = 0):
        super().__init__(port)
        self.line, self.seen = line or Line(), Seen()
        self._rng, self._bucket = random.Random(seed), Bucket()
        self._healthy = asyncio.Event()
        self._healthy.set()

    def cut(self) -> None:
        self._healthy.clear()

    def heal(self) -> None:
        self._healthy.set()

    async def partition(self, seconds: float) -> float:
        """Cuts the line for `seconds`; returns how long the cut really was."""
        start_s = time.monotonic()
        self.cut()
        try:
            await asyncio.sleep(seconds)
        finally:
            self.heal()
        return time.monotonic() - start_s

    async def replay(self, call: Call) -> int:
        """Sends a recorded call once more; returns its status."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.target, limit=2**26)
        try:
            writer.write(call.whole)
            head = await reader.readuntil(b"\r\n\r\n")
            await reader.readexactly(_length(head))
            return _status(head)
        finally:
            writer.close()

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        back: asyncio.StreamWriter | None = None
        try:
            await self._healthy.wait()
            answers, back = await asyncio.open_connection("127.0.0.1", self.target, limit=2**26)
            left = self.line.break_after_bytes
            head = await reader.readuntil(b"\r\n\r\n")
            while True:
                call = Call(head, await reader.readexactly(_length(head)))
                await self._hold_up(len(call.whole))
                if self._happens("strange", self.line.strange):
                    writer.write(_page(PAGES[self.seen.faults["strange"] % len(PAGES)]))
                    head = await reader.readuntil(b"\r\n\r\n")
                    continue
                self._perhaps_again(call)
                back.write(call.head + self._perhaps_damaged(call.body))
                following = asyncio.ensure_future(reader.readuntil(b"\r\n\r\n"))
                answer = asyncio.ensure_future(answers.readuntil(b"\r\n\r\n"))
                try:
                    await asyncio.wait({following, answer}, return_when=asyncio.FIRST_COMPLETED)
                    if not answer.done():
                        return  # the caller has hung up
                    told = await answer
                    self._note(call, _status(told))
                    if self._happens("lost", self.line.lost):
                        return
                    left = await self._give(told, answers, writer, left)
                    head = await following
                finally:
                    for part in (following, answer):
                        part.cancel()
                    with suppress(*ENDS, asyncio.CancelledError):
                        await asyncio.gather(following, answer, return_exceptions=True)
        except ENDS:
            pass
        finally:
            for end in (writer, back):
                if end is not None:
                    end.transport.abort()

    async def _give(
        self, head: bytes, answers: asyncio.StreamReader, writer: asyncio.StreamWriter, left: int | None
    ) -> int | None:
        """Passes an answer on in pieces. `left` is the number of bytes until the connection breaks; returns what
        remains of it."""
        num_bytes, piece = _length(head), head
        while True:
            await self._hold_up(len(piece))
            writer.write(piece if left is None else piece[:left])
            await writer.drain()
            if left is not None:
                left -= len(piece)
                if left <= 0:
                    raise ConnectionResetError
            if num_bytes == 0:
                return left
            piece = await answers.read(min(PIECE_BYTES, num_bytes))
            if not piece:
                raise EOFError
            num_bytes -= len(piece)
            piece = self._perhaps_damaged(piece)

    async def _hold_up(self, num_bytes: int) -> None:
        await self._healthy.wait()
        await asyncio.sleep(self.line.delay_s)
        if self.line.bytes_per_s is not None:
            await self._bucket.take(num_bytes, self.line.bytes_per_s)
        await self._healthy.wait()

    def _note(self, call: Call, status: int) -> None:
        self.seen.statuses[status] += 1
        submitted = SUBMISSION.match(call.head)
        if submitted is not None and status in (200, 201):
            task, fence = map(int, submitted.groups())
            self.seen.acknowledged[task, fence] = blake3(call.body).digest()
            self.seen.submissions.append(call)

    def _happens(self, fault: str, share: float) -> bool:
        most = self.line.max_faults
        if self._rng.random() >= share or (most is not None and self.seen.faults.total() >= most):
            return False
        self.seen.faults[fault] += 1
        return True

    def _perhaps_damaged(self, body: bytes) -> bytes:
        if not body or not self._happens("damaged", self.line.damaged):
            return body
        place = self._rng.randrange(len(body))
        return body[:place] + bytes([body[place] ^ 1 << self._rng.randrange(8)]) + body[place + 1 :]

    def _perhaps_again(self, call: Call) -> None:
        if self._rng.random() < self.line.twice:
            self._spawn(self._again(call, self._rng.uniform(0.0, self.line.late_s)))

    async def _again(self, call: Call, later_s: float) -> None:
        await asyncio.sleep(later_s)
        with suppress(*ENDS):
            self.seen.copies[await self.replay(call)] += 1


def _page(status: str) -> bytes:
    head = f"HTTP/1.1 {status}\r\nContent-Type: text/html\r\nLocation: /login\r\nContent-Length: {len(HTML)}\r\n\r\n"
    return head.encode() + HTML


def _length(head: bytes) -> int:
    found = re.search(rb"(?im)^content-length: *(\d+)", head)
    assert found or not re.search(rb"(?im)^transfer-encoding: *chunked", head), "a body without a length"
    return int(found[1]) if found else 0


def _status(head: bytes) -> int:
    return int(head.split(None, 2)[1])
