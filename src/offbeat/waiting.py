"""Waiting beside other tasks of one event loop: for a change, for a background task, for work that must finish."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

log = logging.getLogger(__name__)

T = TypeVar("T")


class Notifier:
    """A condition variable of one event loop: waiters check again after each `notify`.

    No wake-up is lost: `changed` is taken before the state is read, and a `notify` in between sets that very event.
    Waits end with the error of `failure` once that is set.
    """

    def __init__(self, failure: asyncio.Future[Any] | None = None) -> None:
        self._failure = failure
        self.changed = asyncio.Event()
        """Set by the next `notify`, which replaces it."""

    def notify(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()

    async def wait_for(self, predicate: Callable[[], object]) -> None:
        while not predicate():
            await self.wait(self.changed)

    async def first(self, check: Callable[[], Awaitable[T | None]], deadline_s: float = math.inf) -> T | None:
        """The first result of `check` that is not None; None at the deadline, a `time.monotonic()`."""
        while True:
            changed = self.changed
            if (found := await check()) is not None or not await self.wait(changed, deadline_s):
                return found

    async def wait(self, changed: asyncio.Event, deadline_s: float = math.inf) -> bool:
        """Waits for a `notify` since `changed` was taken; False at the deadline."""
        if self._failure is None and math.isinf(deadline_s):
            return await changed.wait()
        waiting: set[asyncio.Future[Any]] = {asyncio.ensure_future(changed.wait())}
        left_s = None if math.isinf(deadline_s) else max(deadline_s - time.monotonic(), 0.0)
        ends = waiting if self._failure is None else waiting | {self._failure}
        try:
            await asyncio.wait(ends, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waiting:
                task.cancel()
        if self._failure is not None and self._failure.done():
            self._failure.result()
        return changed.is_set()


class BackgroundTasks:
    """Tasks that run beside a server's calls. The first failure ends every wait of the notifiers that share it."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()
        self.failure: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()):
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        if not self.failure.done():
            self.failure.set_exception(error)

    async def close(self) -> None:
        """Cancels every task."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self.failure.done():
            self.failure.exception()  # marks it as retrieved: waiters have raised it, or an error of their own


async def run_to_end(work: Coroutine[Any, Any, None], within_s: float) -> None:
    """Awaits `work`, which must not be left half done: a cancelled caller still waits for it, at most `within_s`."""
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


async def in_thread(function: Callable[..., T], *arguments: Any) -> T:
    """Calls `function` in a thread. A cancelled caller waits for its end, so that two never write the same files."""
    running = asyncio.ensure_future(asyncio.to_thread(function, *arguments))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        while not running.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait([running])
        if not running.cancelled():
            running.exception()  # marks it as retrieved: the cancellation is what the caller sees
        raise
