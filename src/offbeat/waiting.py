"""Helpers for asyncio: waiting for changes, background tasks, and work that must finish despite cancellation."""

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
    """A condition variable for one event loop: waiters check their condition again after each `notify`.

    A waiter must take the event `changed` before it reads the state. Then it misses no change, because the next
    `notify` sets this event, and it stays set. Once the future `failure` has an error, all waits raise that error.
    """

    def __init__(self, failure: asyncio.Future[Any] | None = None) -> None:
        self._failure = failure
        self.changed = asyncio.Event()
        """Event that the next `notify` sets and then replaces with a new event."""

    def notify(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()

    async def wait_for(self, predicate: Callable[[], object]) -> None:
        while not predicate():
            await self.wait(self.changed)

    async def first(self, check: Callable[[], Awaitable[T | None]], deadline_s: float = math.inf) -> T | None:
        """Calls `check` after each `notify` and returns its first result that is not None; None at the deadline, which
        is a time of `time.monotonic()`."""
        while True:
            changed = self.changed
            if (found := await check()) is not None or not await self.wait(changed, deadline_s):
                return found

    async def wait(self, changed: asyncio.Event, deadline_s: float = math.inf) -> bool:
        """Waits until a `notify` sets `changed`, which the caller took from `self.changed`. Returns False at the
        deadline, a time of `time.monotonic()`."""
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
    """Runs tasks in the background of a server. The first error of a task is set in the future `failure`, and every
    `Notifier` made with this future raises it in all waits."""

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
        """Cancels every task and waits until all have ended."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self.failure.done():
            self.failure.exception()  # marks the error as retrieved, because the waiters have raised an error


async def run_to_end(work: Coroutine[Any, Any, None], within_s: float) -> None:
    """Awaits `work`. If the caller is cancelled, `work` gets another `within_s` seconds to end, because it should not
    be left unfinished; then it is cancelled too."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        deadline_s = asyncio.get_running_loop().time() + within_s
        while not task.done() and (left_s := deadline_s - asyncio.get_running_loop().time()) > 0:
            with suppress(asyncio.CancelledError):
                await asyncio.wait({task}, timeout=left_s)
        if not task.done():
            log.warning("%s did not end within %.0f s and is cancelled", task.get_coro(), within_s)
            task.cancel()
        elif not task.cancelled() and (error := task.exception()):
            log.warning("%s failed while being stopped: %s", task.get_coro(), error)
        raise


async def unless(stop: asyncio.Event, work: Coroutine[Any, Any, object]) -> bool:
    """Awaits `work` and returns True. If `stop` is set before `work` has ended, cancels it and returns False."""
    task, stopped = asyncio.ensure_future(work), asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({task, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
        return task.done()
    finally:
        for one in (task, stopped):
            one.cancel()
        await asyncio.gather(task, stopped, return_exceptions=True)


async def in_thread(function: Callable[..., T], *arguments: Any) -> T:
    """Calls `function` in a thread and returns its result. A cancellation of the caller takes effect only when the
    thread has ended, so that two calls never write the same files at once."""
    running = asyncio.ensure_future(asyncio.to_thread(function, *arguments))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        while not running.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait([running])
        if not running.cancelled():
            running.exception()  # marks the error as retrieved: the caller gets the cancellation
        raise


LARGE_BYTES = 256 * 1024
"""Size above which bytes are processed on another thread, because they would delay heartbeats and other callers."""


async def on_bytes(data: bytes, work: Callable[[bytes], T], size: int | None = None) -> T:
    """Returns `work(data)`, computed on another thread if there are more than `LARGE_BYTES` bytes to process. `size` is
    the number of bytes to process, such as those after decompression; None: `len(data)`."""
    return work(data) if (size or len(data)) <= LARGE_BYTES else await asyncio.to_thread(work, data)
