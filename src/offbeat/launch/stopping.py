"""Requests to stop a run before its last step: Ctrl-C, SIGTERM, the run's time limit, or a program's `StopButton`.

After the first request, the current step finishes and the run ends with a checkpoint. A second signal ends the run at
once; it can be resumed from its last checkpoint. Only the main thread receives signals.
"""

from __future__ import annotations

import asyncio
import contextvars
import os
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent import futures
from contextlib import contextmanager, nullcontext, suppress
from contextvars import ContextVar
from types import FrameType
from typing import Any, Generic, TypeVar

T = TypeVar("T")
Handler = Callable[[signal.Signals], object]

SIGNALS = (signal.SIGINT, signal.SIGTERM)
REASONS = "OFFBEAT_REASONS"
"""Environment variable with the number of a pipe's descriptor. A parent process writes to this pipe to stop a run for a
reason that is not a signal, such as a program's own request."""
WAKE_EVERY_S = 1.0
"""Longest time for which the main thread blocks. If a signal comes just before the thread blocks, Python calls the
signal's handler only when the thread wakes."""


def run(main: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine to its end like `asyncio.run`, but also if an event loop is already running, as in a notebook.

    In that case the coroutine gets a thread of its own; the caller waits for it and passes signals on to it.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        with asyncio.Runner() as runner:
            return runner.run(main)
    return _ThreadRun(main).run()


@contextmanager
def interruptible() -> Iterator[None]:
    """Within the block, Ctrl-C interrupts even code that never awaits, such as an import. asyncio's own handler would
    let this code end first."""
    if not _is_main_thread():
        yield
        return
    asked = False

    def interrupt(*_: object) -> None:
        nonlocal asked
        asked = True
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if asked:  # an imported package has swallowed the exception
        raise KeyboardInterrupt


class StopButton:
    """Lets any thread ask a run to stop, even before the run listens for requests; only the first request counts."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._why: str | None = None
        self._ask: Callable[[str], object] | None = None

    def press(self, why: str) -> None:
        with self._lock:
            if self._why is None:
                self._why = why
                if self._ask is not None:
                    self._ask(why)

    @contextmanager
    def connected(self, ask: Callable[[str], object]) -> Iterator[None]:
        """Within the block, calls `ask` with the reason of the first request to stop. If this request came before the
        block, calls `ask` at once."""
        with self._lock:
            self._ask = ask
            if self._why is not None:
                ask(self._why)
        try:
            yield
        finally:
            with self._lock:
                self._ask = None


class Stopping:
    """Holds whether a run was asked to stop, and why. The first request sets the event `requested`, sets `why` to its
    reason, and calls `on_request(why)`."""

    def __init__(self, on_request: Callable[[str], None] | None = None):
        self.requested = asyncio.Event()
        self.why: str | None = None
        self._on_request = on_request

    @contextmanager
    def listening(self, button: StopButton | None = None) -> Iterator[None]:
        """Within the block, signals and `button` request a stop. A thread other than the main thread gets only the
        signals that `run` passes on to it."""
        loop, thread_run = asyncio.get_running_loop(), _thread_run.get()

        def ask(why: str) -> None:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self.request, why)

        with nullcontext() if button is None else button.connected(ask), self._signals(loop, thread_run):
            yield

    @contextmanager
    def asked_by_parent(self) -> Iterator[None]:
        """Within the block, a reason that the parent process writes to the pipe `REASONS` requests a stop."""
        number = os.environ.pop(REASONS, None)
        if number is None:
            yield
            return
        loop, descriptor = asyncio.get_running_loop(), int(number)

        def read() -> None:
            loop.remove_reader(descriptor)  # once the parent has ended, the pipe would be readable for ever
            if why := os.read(descriptor, 1000).decode():
                self.request(why)

        os.set_inheritable(descriptor, False)  # not inherited by children of this process
        loop.add_reader(descriptor, read)
        try:
            yield
        finally:
            loop.remove_reader(descriptor)

    @contextmanager
    def _signals(self, loop: asyncio.AbstractEventLoop, thread_run: _ThreadRun[Any] | None) -> Iterator[None]:
        if thread_run is not None:
            with thread_run.passing_on(self._on_signal):
                yield
        elif _is_main_thread():
            with _handling(lambda number: loop.call_soon_threadsafe(self._on_signal, number)):
                yield
        else:
            yield

    def request(self, why: str) -> None:
        if not self.requested.is_set():
            self.why = why
            self.requested.set()
            if self._on_request is not None:
                self._on_request(why)

    async def after(self, hours: float | None) -> None:
        if hours is not None:
            await asyncio.sleep(hours * 3600)
            self.request(f"run.max_hours = {hours:g}")

    def _on_signal(self, number: signal.Signals) -> None:
        if self.requested.is_set():
            raise KeyboardInterrupt
        self.request(number.name)


class _ThreadRun(Generic[T]):
    """Runs a coroutine in a thread of its own, for a caller whose thread already runs an event loop."""

    def __init__(self, main: Coroutine[Any, Any, T]):
        self._main = main
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[T] | None = None
        self._pass_on: Handler | None = None
        self._is_interrupted = False
        self._ended: futures.Future[T] = futures.Future()

    def run(self) -> T:
        context = contextvars.copy_context()
        thread = threading.Thread(target=context.run, args=(self._in_thread,), name="offbeat-run")
        with _handling(self._signalled) if _is_main_thread() else nullcontext():
            thread.start()
            self._wait()
        return self._ended.result()

    @contextmanager
    def passing_on(self, handler: Handler) -> Iterator[None]:
        """Within the block, signals call `handler` in the coroutine's event loop. Outside the block, signals cancel the
        coroutine."""
        self._pass_on = handler
        try:
            yield
        finally:
            self._pass_on = None

    def _wait(self) -> None:
        """Waits, without a limit, until the coroutine ends; cancels it if this thread gets an exception."""
        try:
            while not self._ended.done():
                try:
                    futures.wait([self._ended], WAKE_EVERY_S)
                except KeyboardInterrupt:
                    self._signalled(signal.SIGINT)
        except BaseException:
            self._call(self._cancel)
            futures.wait([self._ended])
            raise

    def _in_thread(self) -> None:
        _thread_run.set(self)
        try:
            with asyncio.Runner() as runner:
                self._loop = runner.get_loop()
                result = runner.run(self._noticed())
        except asyncio.CancelledError as error:
            self._ended.set_exception(KeyboardInterrupt() if self._is_interrupted else error)
        except BaseException as error:  # noqa: BLE001 - raised by the waiting thread
            self._ended.set_exception(error)
        else:
            self._ended.set_result(result)

    async def _noticed(self) -> T:
        self._task = asyncio.current_task()
        if self._is_interrupted:
            self._main.close()
            raise asyncio.CancelledError
        return await self._main

    def _signalled(self, number: signal.Signals) -> None:
        self._call(self._take, number)

    def _call(self, function: Callable[..., None], *arguments: Any) -> None:
        """Calls a function in the coroutine's event loop; before that loop starts, cancels the coroutine instead."""
        if self._loop is None:
            self._is_interrupted = True
            return
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(function, *arguments)

    def _take(self, number: signal.Signals) -> None:
        if self._pass_on is not None:
            self._pass_on(number)
        else:
            self._cancel()

    def _cancel(self) -> None:
        self._is_interrupted = True
        if self._task is not None:
            self._task.cancel()


_thread_run: ContextVar[_ThreadRun[Any] | None] = ContextVar("thread_run", default=None)
"""The `_ThreadRun` that runs the current code and passes signals on to it; None: the code is not in such a thread."""


@contextmanager
def _handling(handler: Handler) -> Iterator[None]:
    """Calls `handler` for `SIGNALS` within the block; restores the previous handlers. For the main thread only."""

    def handle(number: int, _: FrameType | None) -> None:
        handler(signal.Signals(number))

    before = {number: signal.getsignal(number) for number in SIGNALS}
    ours = [number for number in SIGNALS if before[number] is not None]  # None: set by C code, cannot be restored
    try:
        for number in ours:
            signal.signal(number, handle)
        yield
    finally:
        for number in ours:
            signal.signal(number, before[number])


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
