"""A listening socket of this machine before another port of it: what every modelled line has in common."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, Self


class Listener:
    """Listens from `async with` to its end, which ends every conversation; `_accept` is the line's own."""

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
