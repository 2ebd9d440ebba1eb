"""Decides whether and when to restart a process that ended.

A killed process is restarted at once. A process that ended with an error is restarted after a pause that grows each
time. The process is given up after `MAX_FAILURES` errors if it never lived `HEALTHY_S` seconds between them: a fault
that recurs at every restart must not stay hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum

HEALTHY_S = 30.0
"""A process that lived this many seconds counts as healthy, and its earlier failures and kills are forgotten."""
MAX_FAILURES = 5
MAX_KILLS = 50
"""A process killed more often than this is given up if it never lived `HEALTHY_S` seconds between two kills."""
FIRST_PAUSE_S, MAX_PAUSE_S = 0.5, 10.0
HOPELESS = (2, 3)
"""Exit statuses of errors that a restart cannot fix."""


class RestartVerdict(StrEnum):
    DONE = "done"
    """The process ended without an error."""
    RESTART = "restart"
    GIVE_UP = "give up"


class Restarts:
    """Counts the failures and kills of one process and of the processes that replaced it."""

    def __init__(self, clock: Callable[[], float]):
        self._clock = clock
        self._started_s = clock()
        self._num_failures = self._num_kills = 0

    def started(self) -> None:
        self._started_s = self._clock()

    def ended(self, status: int) -> tuple[RestartVerdict, float]:
        """Returns whether to restart the process that has just ended, and after how many seconds. `status` is its exit
        status, or the negative number of the signal that killed it."""
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
