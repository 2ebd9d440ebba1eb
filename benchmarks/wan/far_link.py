"""Models a slow, long and lossy line to a distant server, on one machine and without privileges.

All connections of a line share its rate in each direction. Every byte travels for half a round trip, and opening a
connection takes a whole one. No bytes are really lost: a lost segment stops its connection in that direction for the
time of a retransmission, as in TCP. With 1 % loss, 0.2 s and 20 Mbit/s, a single connection reaches about 4.5 Mbit/s.
Random numbers are seeded. The bytes under way are limited, so that the sender is slowed down to the rate of the line.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass

from benchmarks.common.listener import Bucket, Listener

SEGMENT_BYTES = 1460
READ_BYTES = 8 * SEGMENT_BYTES
BUFFER_BYTES = 64 * 1024
CREDIT_S = 0.02
UNDER_WAY_S = 0.25
"""Largest amount of data under way in one direction, in seconds at the line's rate. It must exceed the delay, or the
delay would limit the rate."""


@dataclass(frozen=True)
class Distance:
    """Rate, delay and loss of a line."""

    bytes_per_s: float
    round_trip_s: float
    loss: float = 0.0
    """Probability that a segment is lost."""
    retransmission_s: float = 0.2

    @property
    def max_reads_under_way(self) -> int:
        return max(1, int(UNDER_WAY_S * self.bytes_per_s / READ_BYTES))


class Direction:
    """One direction of a line, whose rate all connections share."""

    def __init__(self, distance: Distance, rng: random.Random):
        self.distance, self._rng = distance, rng
        self._bucket = Bucket(CREDIT_S)
        self.num_bytes = self.num_lost = 0
        """Bytes that arrived, and segments that were lost on the way."""

    async def carry(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        """Carries one connection's bytes until the end of the stream, and passes the end on."""
        under_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(self.distance.max_reads_under_way)
        async with asyncio.TaskGroup() as both:
            both.create_task(self._send(source, under_way))
            both.create_task(self._arrive(under_way, sink))

    async def _send(self, source: asyncio.StreamReader, under_way: asyncio.Queue[tuple[float, bytes]]) -> None:
        clock = asyncio.get_running_loop().time
        while data := await source.read(READ_BYTES):
            await self._bucket.take(len(data), self.distance.bytes_per_s)
            num_segments = -(-len(data) // SEGMENT_BYTES)
            if num_lost := sum(self._rng.random() < self.distance.loss for _ in range(num_segments)):
                self.num_lost += num_lost
                await asyncio.sleep(num_lost * self.distance.retransmission_s)
            await under_way.put((clock() + self.distance.round_trip_s / 2, data))
        await under_way.put((clock() + self.distance.round_trip_s / 2, b""))

    async def _arrive(self, under_way: asyncio.Queue[tuple[float, bytes]], sink: asyncio.StreamWriter) -> None:
        clock = asyncio.get_running_loop().time
        while True:
            due_s, data = await under_way.get()
            await asyncio.sleep(due_s - clock())
            if not data:
                sink.write_eof()
                return
            sink.write(data)
            await sink.drain()
            self.num_bytes += len(data)


class FarLink(Listener):
    """A listening socket in front of one port of this machine, with a modelled line in between.

    async with FarLink(port, Distance(bytes_per_s=2.5e6, round_trip_s=0.1, loss=0.01)) as link:
        ... link.url ...
    """

    limit_bytes = BUFFER_BYTES

    def __init__(self, port: int, distance: Distance, seed: int = 0):
        super().__init__(port)
        self.distance = distance
        self.up, self.down = (Direction(distance, random.Random(2 * seed + way)) for way in range(2))
        """Directions towards the server and back from it."""

    async def _converse(self, calls: asyncio.StreamReader, caller: asyncio.StreamWriter) -> None:
        server: asyncio.StreamWriter | None = None
        try:
            await asyncio.sleep(self.distance.round_trip_s)
            answers, server = await asyncio.open_connection("127.0.0.1", self.target, limit=BUFFER_BYTES)
            async with asyncio.TaskGroup() as both:
                both.create_task(self.up.carry(calls, server))
                both.create_task(self.down.carry(answers, caller))
        except* OSError:  # either side hung up
            pass
        finally:
            for end in (caller, server):
                if end is not None:
                    end.close()
