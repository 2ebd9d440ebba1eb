"""A far line carries every byte in order, takes its time, and ends where either side ends."""

from __future__ import annotations

import asyncio
import random
import time

import pytest

from benchmarks.wan.far_link import Distance, FarLink

ROUND_TRIP_S = 0.05
BAD = Distance(bytes_per_s=10e6, round_trip_s=ROUND_TRIP_S, loss=0.02, retransmission_s=0.01)


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()
    writer.close()


async def through(distance: Distance, data: bytes, num_connections: int = 1) -> tuple[list[bytes], float, FarLink]:
    """What comes back of the same bytes on each connection, and after how long."""
    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    async with server, FarLink(server.sockets[0].getsockname()[1], distance, seed=1) as link:
        port = int(link.url.rsplit(":", 1)[1])

        async def one() -> bytes:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(data)
            writer.write_eof()
            try:
                return await reader.read(-1)
            finally:
                writer.close()

        start_s = time.monotonic()
        answers = await asyncio.wait_for(asyncio.gather(*(one() for _ in range(num_connections))), 60)
        return answers, time.monotonic() - start_s, link


@pytest.mark.parametrize("num_bytes", [0, 1, 1460, 1461, 700_000])
def test_every_byte_arrives_in_order_whatever_is_lost(num_bytes: int):
    data = random.Random(2).randbytes(num_bytes)
    answers, _, link = asyncio.run(through(BAD, data, num_connections=3))
    assert answers == [data] * 3
    assert link.up.num_bytes == link.down.num_bytes == 3 * num_bytes
    assert (link.up.num_lost > 0) == (num_bytes > 10_000)


def test_a_connection_takes_a_round_trip_to_open_and_one_to_answer():
    _, seconds, _ = asyncio.run(through(BAD, b"x"))
    assert seconds >= 2 * ROUND_TRIP_S


def test_all_connections_share_the_rate():
    slow = Distance(bytes_per_s=1e6, round_trip_s=0.0)
    _, seconds, _ = asyncio.run(through(slow, bytes(100_000), num_connections=3))
    assert seconds >= 0.25  # 0.3 s, less what may pass at once after a pause


def test_a_lost_segment_stops_its_connection_for_a_while():
    lossy = Distance(bytes_per_s=1e9, round_trip_s=0.0, loss=0.05, retransmission_s=0.01)
    _, seconds, link = asyncio.run(through(lossy, bytes(300_000)))
    assert link.up.num_lost > 3
    assert seconds >= link.up.num_lost * lossy.retransmission_s


def test_a_server_that_is_not_there_is_a_connection_that_ends():
    async def ask() -> bytes:
        async with FarLink(1, BAD) as link:
            reader, writer = await asyncio.open_connection("127.0.0.1", int(link.url.rsplit(":", 1)[1]))
            try:
                return await reader.read(-1)
            finally:
                writer.close()

    assert asyncio.run(asyncio.wait_for(ask(), 30)) == b""
