"""Who is there: workers that asked for something not long ago, how many tasks each can hold, what each told of itself,
and which of its lives it is in: one that was killed and started again is the same worker in another life, and has
forgotten everything. Whoever left is forgotten; so is, once its owner says so, whoever fell silent."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping


class Presence:
    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._heard: dict[str, float] = {}
        """When each asked for something last; whoever is in another map is in this one."""
        self._slots: dict[str, int] = {}
        """How many tasks each can hold: the most that it ever asked for."""
        self._lives: dict[str, str] = {}
        self.figures: dict[str, Mapping[str, float]] = {}
        """What each told of itself last: sums over its life."""

    def begins_anew(self, worker: str, life: str) -> bool:
        """Whether a worker that we knew in another life speaks from this one for the first time."""
        self.hear(worker)
        before = self._lives.get(worker, life)
        self._lives[worker] = life
        return before != life

    def hear(self, worker: str, capacity: int = 0) -> None:
        self._heard[worker] = self._clock()
        self._slots[worker] = max(capacity, self._slots.get(worker, 0))

    def told(self, worker: str, figures: Mapping[str, float]) -> None:
        """A worker told its figures."""
        self.hear(worker)
        self.figures[worker] = figures

    def set_aside(self, worker: str) -> None:
        """Nobody counts on its slots until it is given tasks again; its life is remembered, or it could begin no new
        one."""
        if worker in self._slots:
            self._slots[worker] = 0

    def left(self, worker: str) -> None:
        for known in (self._heard, self._slots, self._lives, self.figures):
            known.pop(worker, None)

    def silent(self, for_s: float) -> list[str]:
        """Those that have not left and were not heard of for so long."""
        since_s = self._clock() - for_s
        return sorted(worker for worker, heard_s in self._heard.items() if heard_s < since_s)

    def present(self, within_s: float) -> list[str]:
        """Those that were heard of in this time and have not left."""
        since_s = self._clock() - within_s
        return sorted(worker for worker, heard_s in self._heard.items() if heard_s >= since_s)

    def others(self, worker: str, within_s: float) -> bool:
        """Whether another worker with slots was heard of in this time."""
        return any(self._slots[name] and name != worker for name in self.present(within_s))

    def total_slots(self, within_s: float) -> int:
        since_s = self._clock() - within_s
        return sum(self._slots[worker] for worker, heard_s in self._heard.items() if heard_s >= since_s)
