"""How the parts of a coordinator wait for one another.

A `Bell` wakes everyone who waits for something to change; they look again themselves. Parts that run beside the calls
are started here: one that fails ends every wait with its error, instead of leaving someone to wait in vain.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Coroutine
from typing import Any


class News:
    """One kind of change. Take `changed` before looking, then `wait` on it at a bell: nothing that happens in between
    is missed. Where hundreds wait, each is woken only by what concerns it."""

    def __init__(self) -> None:
        self.changed = asyncio.Event()

    def ring(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()


class Bell(News):
    """Whatever changes, and whoever fails."""

    def __init__(self) -> None:
        super().__init__()
        self._parts: set[asyncio.Task[None]] = set()
        self._broken: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    async def wait(self, changed: asyncio.Event, deadline_s: float) -> bool:
        """Waits until something changed since `changed` was taken; False at the deadline. Raises what broke us."""
        waiting: asyncio.Future[Any] = asyncio.ensure_future(changed.wait())
        left_s = None if math.isinf(deadline_s) else max(deadline_s - time.monotonic(), 0.0)
        try:
            await asyncio.wait({waiting, self._broken}, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiting.cancel()
        if self._broken.done():
            self._broken.result()
        return changed.is_set()

    def spawn(self, part: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(part)
        self._parts.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._parts.discard(task)
        if not task.cancelled() and (error := task.exception()):
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """Ends every wait, now and later, with this error; the first one counts."""
        if not self._broken.done():
            self._broken.set_exception(error)

    async def close(self) -> None:
        """Ends every part."""
        for task in self._parts:
            task.cancel()
        await asyncio.gather(*self._parts, return_exceptions=True)
        if self._broken.done():
            self._broken.exception()  # looked at: whoever waited has heard of it, or has an error of its own
