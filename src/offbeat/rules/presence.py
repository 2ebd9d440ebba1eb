"""Presence: which workers have called lately, and how many tasks they can hold together."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping


class Presence:
    """The workers that have called and not left, each with its slots (tasks it can hold), latest metrics and life.

    A life is the id of a worker's process: a worker that was killed and restarted has a new life, and has lost its
    tasks.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._heard: dict[str, float] = {}
        """Time of each worker's last call. Contains every worker of the other maps."""
        self._slots: dict[str, int] = {}
        """Number of tasks that each worker can hold: the most that it has asked for in one call."""
        self._lives: dict[str, str] = {}
        self.figures: dict[str, Mapping[str, float]] = {}
        """Latest figures that each worker reported: totals since its process started, by name."""

    def has_restarted(self, worker: str, life: str) -> bool:
        """Records a call of a worker's process `life`; returns whether an earlier call came from another process."""
        self.hear(worker)
        before = self._lives.get(worker, life)
        self._lives[worker] = life
        return before != life

    def hear(self, worker: str, capacity: int = 0) -> None:
        self._heard[worker] = self._clock()
        self._slots[worker] = max(capacity, self._slots.get(worker, 0))

    def set_aside(self, worker: str) -> None:
        """Sets a worker's number of slots to 0 until it asks for tasks again, because it gets no tasks for a while."""
        if worker in self._slots:
            self._slots[worker] = 0

    def left(self, worker: str) -> None:
        for known in (self._heard, self._slots, self._lives, self.figures):
            known.pop(worker, None)

    def silent(self, for_s: float) -> list[str]:
        """Returns the workers that have not left but made no call for the last `for_s` seconds."""
        since_s = self._clock() - for_s
        return sorted(worker for worker, heard_s in self._heard.items() if heard_s < since_s)

    def present(self, within_s: float) -> list[str]:
        """Returns the workers that made a call within the last `within_s` seconds and have not left."""
        since_s = self._clock() - within_s
        return sorted(worker for worker, heard_s in self._heard.items() if heard_s >= since_s)

    def others(self, worker: str, within_s: float) -> bool:
        """Whether another worker that has slots made a call within the last `within_s` seconds."""
        return any(self._slots[name] and name != worker for name in self.present(within_s))

    def total_slots(self, within_s: float) -> int:
        return sum(self._slots[worker] for worker in self.present(within_s))
