"""A listening socket in front of a port of this machine, and a shared rate: the base of all modelled lines."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import Any, Self


class Listener:
    """Listens within `async with`, whose end closes all connections; subclasses define `_converse`."""

    limit_bytes = 2**16

    def __init__(self, port: int):
        self.target = port
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0, limit=self.limit_bytes)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _accept(self, calls: asyncio.StreamReader, caller: asyncio.StreamWriter) -> None:
        self._spawn(self._converse(calls, caller))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _converse(self, calls: asyncio.StreamReader, caller: asyncio.StreamWriter) -> None:
        raise NotImplementedError


class Bucket:
    """Limits the rate of bytes, which pass in the order in which they are offered.

    After a pause, the bytes of `credit_s` seconds pass at once, to make up for an event loop that wakes a little late.
    Over any longer time the rate is kept exactly.
    """

    def __init__(self, credit_s: float = 0.0):
        self._credit_s = credit_s
        self._free_s = 0.0
        """Time at which all bytes so far would have passed a line without credit."""

    async def take(self, num_bytes: int, bytes_per_s: float) -> None:
        """Returns when `num_bytes` have passed."""
        now_s = time.monotonic()
        self._free_s = max(self._free_s, now_s - self._credit_s) + num_bytes / bytes_per_s
        await asyncio.sleep(self._free_s - now_s)
