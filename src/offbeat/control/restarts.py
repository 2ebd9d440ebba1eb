"""Whether a process that ended is started again, and when.

Duty: keep a run going through crashes without hiding a fault that every restart meets again. Whoever was killed is
started again at once; one that ended by an error of its own waits a little longer each time, and is given up after
`MAX_FAILURES` in a row without having lived for `HEALTHY_S`.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum

HEALTHY_S = 30.0
"""A process that lived this long had found its feet."""
MAX_FAILURES = 5
MAX_KILLS = 50
"""Even kills are no accident any more when nothing lives for long between so many."""
FIRST_PAUSE_S, MAX_PAUSE_S = 0.5, 10.0
HOPELESS = (2, 3)
"""Exit statuses that say: someone has to mend something first."""


class Verdict(StrEnum):
    DONE = "done"
    """It ended as it should."""
    RESTART = "restart"
    GIVE_UP = "give up"


class Restarts:
    """One process and its successors."""

    def __init__(self, clock: Callable[[], float]):
        self._clock = clock
        self._started_s = clock()
        self._num_failures = self._num_kills = 0

    def started(self) -> None:
        self._started_s = self._clock()

    def ended(self, status: int) -> tuple[Verdict, float]:
        """What to do, and how long to wait before; a negative status names the signal that killed it."""
        if status == 0:
            return Verdict.DONE, 0.0
        if status in HOPELESS:
            return Verdict.GIVE_UP, 0.0
        if self._clock() - self._started_s >= HEALTHY_S:
            self._num_failures = self._num_kills = 0
        if status < 0:
            self._num_kills += 1
            return (Verdict.GIVE_UP if self._num_kills > MAX_KILLS else Verdict.RESTART), 0.0
        self._num_failures += 1
        if self._num_failures >= MAX_FAILURES:
            return Verdict.GIVE_UP, 0.0
        return Verdict.RESTART, min(FIRST_PAUSE_S * 2 ** (self._num_failures - 1), MAX_PAUSE_S)
