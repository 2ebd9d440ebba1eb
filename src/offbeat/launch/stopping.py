"""How a run is asked to end before its last step: by Ctrl-C, by SIGTERM, or by its time limit.

The first request lets the step under way finish and ends with a checkpoint. A second signal ends the run at once: it
can be resumed all the same, from the checkpoint before.
"""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def interruptible() -> Iterator[None]:
    """Lets Ctrl-C end at once what never awaits, such as importing torch; asyncio alone would see to it afterwards."""
    if threading.current_thread() is not threading.main_thread():
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
    if asked:  # some package's import has caught it, as it catches everything
        raise KeyboardInterrupt


class Stopping:
    """`requested` is set by the first request, `why` says whose it was; `tell` hears of it."""

    def __init__(self, tell: Callable[[str], None]):
        self.requested = asyncio.Event()
        self.why: str | None = None
        self._tell = tell

    def listen(self) -> None:
        """Takes signals from now on, until the event loop is closed."""
        if threading.current_thread() is threading.main_thread():  # no other may; there, signals are the caller's
            for number in SIGNALS:
                asyncio.get_running_loop().add_signal_handler(number, self._on_signal, number)

    def request(self, why: str) -> None:
        if not self.requested.is_set():
            self.why = why
            self.requested.set()
            self._tell(why)

    async def after(self, hours: float | None) -> None:
        if hours is not None:
            await asyncio.sleep(hours * 3600)
            self.request(f"run.max_hours = {hours:g}")

    def _on_signal(self, number: signal.Signals) -> None:
        if self.requested.is_set():
            raise KeyboardInterrupt
        self.request(number.name)
