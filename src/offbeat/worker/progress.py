"""Says on the console what a worker does: its first version, its rate, why it is idle, and what it has made.

Prints at most one line of figures, and one line about being idle, every `EVERY_S` seconds. The worker is only watched:
its work does not depend on these lines.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable

from offbeat.worker.worker import Worker, WorkerMetrics

LOOK_EVERY_S = 0.5
EVERY_S = 30.0
"""Seconds between two lines of figures."""
IDLE_AFTER_S = 5.0
"""Seconds without a task until a worker is called idle; short waits between two steps are normal."""
UNTOLD_S = 15.0
"""Seconds without a task until a worker is called idle if the coordinator has not yet said why there is no task; more
than `IDLE_AFTER_S`, because one call for tasks takes up to 5 seconds."""
REMIND_EVERY_S = 300.0
"""Seconds after which an idle worker says again that it is idle."""


class WorkerProgress:
    """Watches the workers that one process runs, one after the other if its engine has to be replaced."""

    def __init__(
        self,
        name: str,
        metrics: WorkerMetrics,
        say: Callable[[str], None],
        is_cut_off: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.monotonic,
    ):
        """`say` prints a line. While `is_cut_off()` is true, the coordinator does not answer, so the worker is not
        called idle."""
        self.name, self._metrics, self._say = name, metrics, say
        self._is_cut_off, self._clock = is_cut_off, clock
        self._start_s = self._figures_s = self._busy_s = clock()
        self._num_answers = self._num_tokens = 0
        """Numbers of answers and tokens of all workers that were watched, including the current one."""
        self._last = (0, 0)
        self._version: int | None = None
        self._idle: str | None = None
        self._idle_said_s = -math.inf

    async def watch(self, worker: Worker) -> None:
        """Watches a worker; runs until cancelled."""
        answers, tokens = self._num_answers, self._num_tokens
        try:
            while True:
                self._num_answers = answers + worker.num_answers
                self._num_tokens = tokens + worker.num_tokens
                self._look(worker)
                await asyncio.sleep(LOOK_EVERY_S)
        finally:
            self._num_answers, self._num_tokens = answers + worker.num_answers, tokens + worker.num_tokens

    def totals(self) -> str:
        """Returns what the worker has made so far, such as `120 answers (3,456 tokens) in 5 min`."""
        seconds = self._clock() - self._start_s
        span = f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
        return f"{self._num_answers:,} answers ({self._num_tokens:,} tokens) in {span}"

    def _look(self, worker: Worker) -> None:
        now_s = self._clock()
        if self._version is None and worker.engine.version is not None:
            self._line(f"serves {self._fetched(worker.engine.version)}")
            self._version = worker.engine.version
        if worker.running or worker.has_unsent:
            if self._idle is not None:
                self._line(f"at work again after {now_s - self._busy_s:.0f} s")
            self._busy_s, self._idle = now_s, None
        elif now_s - self._busy_s >= (IDLE_AFTER_S if worker.why_idle else UNTOLD_S) and not self._is_cut_off():
            why = worker.why_idle or "the coordinator has given it no task yet"
            silent_s = now_s - self._idle_said_s
            if silent_s >= REMIND_EVERY_S or (why != self._idle and silent_s >= EVERY_S):
                self._line(f"idle for {now_s - self._busy_s:.0f} s: {why}")
                self._idle, self._idle_said_s = why, now_s
        if now_s - self._figures_s >= EVERY_S:
            self._figures(worker, now_s - self._figures_s)
            self._figures_s = now_s

    def _figures(self, worker: Worker, seconds: float) -> None:
        (answers, tokens), self._last = self._last, (self._num_answers, self._num_tokens)
        made, generated = self._num_answers - answers, self._num_tokens - tokens
        if made or worker.running:
            at = "" if worker.engine.version is None else f"; {self._fetched(worker.engine.version)}"
            self._line(
                f"{generated / seconds:,.0f} tokens/s, {made:,} answers in {seconds:.0f} s, "
                f"{len(worker.running)} under way{at}"
            )

    def _fetched(self, version: int) -> str:
        """Describes a version, with the size and time of the latest download, if there was one."""
        latest = self._metrics.latest
        if latest is None:
            return f"version {version}"
        num_bytes = sum(latest.num_bytes.values())
        size = f"{num_bytes / 1e6:,.1f} MB" if num_bytes >= 1e6 else f"{num_bytes / 1e3:.0f} kB"
        return f"version {version} ({size} in {latest.fetch_s:.1f} s)"

    def _line(self, text: str) -> None:
        self._say(f"worker {self.name}: {text}")
