"""Which workers are given nothing for a while, because they fail most of what they are given, or for another reason.

Duty: set such a worker aside before its failures use up the attempts of tasks that others could do. It is judged by
different tasks alone, so that a task that nobody can do sets nobody aside. A worker that leaves, or begins a new life,
begins with a clean record. No I/O; the clock is injected.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

WINDOW = 16
"""Attempts looked back on."""
MAX_FAILED = 7
"""Different tasks that a worker may fail among these: half of them is no accident."""
ASIDE_S = 300.0
"""How long a worker is given nothing. Then it may try again: what ails a machine may pass, and if it does not, the next
attempts cost its tasks nothing either."""


@dataclass
class _Record:
    latest: deque[int | None] = field(default_factory=lambda: deque(maxlen=WINDOW))
    """Tasks that failed, and None for each that did not."""
    back_s: float = 0.0
    """When it may be given tasks again."""
    why: str = ""
    """It was set aside last."""

    @property
    def num_failed(self) -> int:
        return len({task for task in self.latest if task is not None})


class Fitness:
    """The latest attempts of each worker."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._records: dict[str, _Record] = {}

    def succeeded(self, worker: str) -> None:
        if worker in self._records:  # whoever never failed needs no record
            self._records[worker].latest.append(None)

    def failed(self, worker: str, task: int, reason: str) -> str | None:
        """Takes down a failure; returns why the worker is to be set aside now, if it is."""
        record = self._records.setdefault(worker, _Record())
        record.latest.append(task)
        if record.num_failed <= MAX_FAILED:
            return None
        why = f"{record.num_failed} of the latest {len(record.latest)} tasks of {worker} failed: {reason}"
        self.set_aside(worker, why)
        return why

    def set_aside(self, worker: str, why: str) -> None:
        """Gives a worker nothing from now on, for `ASIDE_S`; then it begins with a clean record."""
        record = self._records.setdefault(worker, _Record())
        record.why = why
        record.latest.clear()
        record.back_s = self._clock() + ASIDE_S

    def has_failed(self, worker: str) -> bool:
        """Whether it failed anything, or was set aside, since it came."""
        return worker in self._records

    def aside_s(self, worker: str) -> float:
        """How long a worker is still to be given nothing; 0: it works."""
        record = self._records.get(worker)
        return 0.0 if record is None else max(0.0, record.back_s - self._clock())

    def aside(self) -> dict[str, str]:
        """Who is set aside now, and why."""
        return {worker: record.why for worker, record in self._records.items() if self.aside_s(worker)}

    def forget(self, worker: str) -> None:
        """It left, or begins anew."""
        self._records.pop(worker, None)
