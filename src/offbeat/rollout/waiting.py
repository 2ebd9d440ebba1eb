"""Two ways to wait that a worker needs: for a condition, and for work that must not be cut short."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

log = logging.getLogger(__name__)


class Changes:
    """Wakes those who wait for a condition whenever something that it may depend on has changed."""

    def __init__(self) -> None:
        self._changed = asyncio.Event()

    def tell(self) -> None:
        self._changed.set()

    async def until(self, condition: Callable[[], object]) -> None:
        while not condition():
            self._changed.clear()  # those who wait already were woken by then, whatever becomes of the flag
            await self._changed.wait()


async def to_its_end(work: Coroutine[Any, Any, None], within_s: float) -> None:
    """Awaits what must not be left half done: whoever is cancelled meanwhile, however often, ends once it is over or
    `within_s` later."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        deadline_s = asyncio.get_running_loop().time() + within_s
        while not task.done() and (left_s := deadline_s - asyncio.get_running_loop().time()) > 0:
            with suppress(asyncio.CancelledError):
                await asyncio.wait({task}, timeout=left_s)
        if not task.done():
            log.warning("gave up waiting for %s after %.0f s", task.get_coro(), within_s)
            task.cancel()
        elif not task.cancelled() and (error := task.exception()):
            log.warning("failed while being stopped: %s", error)
        raise
