"""A line to one server on this machine, whose rate all receivers share.

It carries bytes without interpreting them. The bytes under way are limited, so that the server is slowed down to the
rate of the line. Calls to the server, of a few hundred bytes each, pass at once.
"""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress

from benchmarks.common.listener import Bucket, Listener

READ_BYTES = 32 * 1024
BUFFER_BYTES = 64 * 1024
CREDIT_S = 0.02


class Link(Listener):
    """A listening socket before one port.

    async with Link(port, bytes_per_s=1e6) as link:
        ... link.url ...
    """

    limit_bytes = BUFFER_BYTES

    def __init__(self, port: int, bytes_per_s: float):
        super().__init__(port)
        self.bytes_per_s = bytes_per_s
        self.num_bytes = 0
        """Bytes that came over the line from the server."""
        self._bucket = Bucket(CREDIT_S)

    async def _converse(self, calls: asyncio.StreamReader, caller: asyncio.StreamWriter) -> None:
        with suppress(OSError, asyncio.CancelledError):
            answers, server = await self._connect()
            back = asyncio.ensure_future(self._pass(answers, caller))
            try:
                await asyncio.wait(
                    {back, asyncio.ensure_future(_pass_at_once(calls, server))}, return_when=asyncio.FIRST_COMPLETED
                )
            finally:
                back.cancel()
                server.transport.abort()
        caller.transport.abort()

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        line = socket.socket()
        line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
        line.setblocking(False)
        await asyncio.get_running_loop().sock_connect(line, ("127.0.0.1", self.target))
        return await asyncio.open_connection(sock=line, limit=BUFFER_BYTES)

    async def _pass(self, answers: asyncio.StreamReader, caller: asyncio.StreamWriter) -> None:
        while data := await answers.read(READ_BYTES):
            await self._bucket.take(len(data), self.bytes_per_s)
            self.num_bytes += len(data)
            caller.write(data)
            await caller.drain()


async def _pass_at_once(calls: asyncio.StreamReader, server: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await calls.read(READ_BYTES):
            server.write(data)
            await server.drain()
