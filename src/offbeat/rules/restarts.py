"""Restarts of a process that ended: whether, and when.

A killed process is restarted at once. One that ended by its own error waits longer each time, and is given up after
`MAX_FAILURES` in a row without `HEALTHY_S` of life, so that a fault that every restart meets again is not hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum

HEALTHY_S = 30.0
"""A process that lived this long counts as healthy."""
MAX_FAILURES = 5
MAX_KILLS = 50
"""Kills in a row, without a healthy life between them, that are no accident any more."""
FIRST_PAUSE_S, MAX_PAUSE_S = 0.5, 10.0
HOPELESS = (2, 3)
"""Exit statuses of errors that a restart cannot remedy."""


class RestartVerdict(StrEnum):
    DONE = "done"
    """Ended as it should."""
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

    def ended(self, status: int) -> tuple[RestartVerdict, float]:
        """Verdict, and seconds to wait before acting on it; a negative status names the killing signal."""
        if status == 0:
            return RestartVerdict.DONE, 0.0
        if status in HOPELESS:
            return RestartVerdict.GIVE_UP, 0.0
        if self._clock() - self._started_s >= HEALTHY_S:
            self._num_failures = self._num_kills = 0
        if status < 0:
            self._num_kills += 1
            return (RestartVerdict.GIVE_UP if self._num_kills > MAX_KILLS else RestartVerdict.RESTART), 0.0
        self._num_failures += 1
        if self._num_failures >= MAX_FAILURES:
            return RestartVerdict.GIVE_UP, 0.0
        return RestartVerdict.RESTART, min(FIRST_PAUSE_S * 2 ** (self._num_failures - 1), MAX_PAUSE_S)
