"""When leases end: who holds which task under which fence, and until when.

Deadlines live on one clock that only goes forward, the coordinator's: a wall clock may jump, and no other machine's
clock is asked. The ledger remembers who holds what; after a restart every lease that it knows is granted anew, so that
workers that went on generating meanwhile can come back for it.

Guarantees: a lease ends once, by `end`, by `expired` or by a grant under a larger fence; a renewal under an older fence
or by another worker is told that it is lost and changes nothing.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class Held:
    """One worker's right to carry on one task; a later grant of the same task has a larger fence."""

    task: int
    fence: int
    worker: str


class Leases:
    """See the module."""

    def __init__(self, ttl_s: float, clock: Callable[[], float]):
        self.ttl_s, self._clock = ttl_s, clock
        self._deadlines: dict[int, tuple[Held, float]] = {}
        self._queue: list[tuple[float, int]] = []
        """Deadlines and tasks, soonest first; renewed and ended ones are skipped when their turn comes."""

    def __len__(self) -> int:
        return len(self._deadlines)

    def grant(self, leases: Iterable[Held]) -> None:
        for held in leases:
            self._set(held, self._clock() + self.ttl_s)

    def renew(self, leases: Iterable[Held]) -> list[Held]:
        """Gives leases their whole time again; returns those that are lost."""
        lost = []
        for held in leases:
            if self.is_held(held):
                self._set(held, self._clock() + self.ttl_s)
            else:
                lost.append(held)
        return lost

    def is_held(self, held: Held) -> bool:
        found = self._deadlines.get(held.task)
        return found is not None and found[0] == held and found[1] > self._clock()

    def end(self, tasks: Iterable[int]) -> None:
        """Forgets leases whose tasks ended, or were given back."""
        for task in tasks:
            self._deadlines.pop(task, None)

    def expired(self) -> list[Held]:
        """Takes out the leases whose time is over."""
        now_s, over = self._clock(), []
        while self._queue and self._queue[0][0] <= now_s:
            deadline_s, task = heapq.heappop(self._queue)
            found = self._deadlines.get(task)
            if found is not None and found[1] == deadline_s:
                over.append(self._deadlines.pop(task)[0])
        return over

    def next_deadline_s(self) -> float | None:
        """When `expired` should be asked next, on this clock; None while nothing is leased."""
        while self._queue:
            deadline_s, task = self._queue[0]
            found = self._deadlines.get(task)
            if found is not None and found[1] == deadline_s:
                return deadline_s
            heapq.heappop(self._queue)
        return None

    def oldest(self) -> Held | None:
        """The lease that ends first, for whoever looks."""
        return self._deadlines[self._queue[0][1]][0] if self.next_deadline_s() is not None else None

    def _set(self, held: Held, deadline_s: float) -> None:
        self._deadlines[held.task] = (held, deadline_s)
        heapq.heappush(self._queue, (deadline_s, held.task))
        if len(self._queue) > 2 * len(self._deadlines) + 64:  # renewals left many behind
            self._queue = [(deadline_s, task) for task, (_, deadline_s) in self._deadlines.items()]
            heapq.heapify(self._queue)
