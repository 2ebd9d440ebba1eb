"""When leases end: who holds which task under which fence, and until when.

Deadlines live on one clock that only goes forward, the coordinator's: a wall clock may jump, and no other machine's
clock is asked. The ledger remembers who holds what; after a restart every lease that it knows is granted anew, so that
workers that went on generating meanwhile can come back for it.

Guarantees: a lease ends once, by `end`, by `expired` or by a grant under a larger fence. Until then its holder can
renew it, however late: who is late to take it out may have been late to hear of the worker, too. A grant or a renewal
under an older fence, or a renewal by another worker, changes nothing. The leases of a worker that has vanished expire
together, when the last of them is over: which task is to blame shows only beside all others that the worker held. A
worker that is heard of and does not name a lease any more keeps it for one more such time at most.
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
        self._due: dict[int, float] = {}
        """When to look at a lease next: at its deadline, or later where its worker was heard of since."""
        self._queue: list[tuple[float, int]] = []
        """When to look and at which task, soonest first; renewed and ended ones are skipped when their turn comes."""

    def __len__(self) -> int:
        return len(self._deadlines)

    def grant(self, leases: Iterable[Held]) -> None:
        deadline_s = self._clock() + self.ttl_s
        for held in leases:
            found = self._deadlines.get(held.task)
            if found is None or found[0].fence <= held.fence:
                self._set(held, deadline_s)

    def renew(self, leases: Iterable[Held]) -> list[Held]:
        """Gives leases their whole time again; returns those that are lost."""
        deadline_s = self._clock() + self.ttl_s
        lost = []
        for held in leases:
            if self.is_held(held):
                self._set(held, deadline_s)
            else:
                lost.append(held)
        return lost

    def renew_all(self) -> None:
        """For when nobody could be heard."""
        self.grant(self.all())

    def all(self) -> list[Held]:
        return [held for held, _ in self._deadlines.values()]

    def is_held(self, held: Held) -> bool:
        found = self._deadlines.get(held.task)
        return found is not None and found[0] == held

    def end(self, tasks: Iterable[int]) -> None:
        """Forgets leases whose tasks ended, or were given back."""
        for task in tasks:
            self._deadlines.pop(task, None)
            self._due.pop(task, None)

    def expired(self) -> list[Held]:
        """Takes out the leases whose time is over."""
        now_s = self._clock()
        overdue = []
        while (next_s := self.next_deadline_s()) is not None and next_s <= now_s:
            _, task = heapq.heappop(self._queue)
            del self._due[task]
            overdue.append(task)
        last_s = self._last_deadlines() if overdue else {}
        over = []
        for task in overdue:
            held, deadline_s = self._deadlines[task]
            due_s = min(max(deadline_s, last_s[held.worker]), deadline_s + self.ttl_s)
            if due_s <= now_s:
                over.append(held)
            else:
                self._look_at(task, due_s)
        self.end(held.task for held in over)
        return over

    def next_deadline_s(self) -> float | None:
        """When `expired` should be asked next, on this clock; None while nothing is leased."""
        while self._queue:
            due_s, task = self._queue[0]
            if self._due.get(task) == due_s:
                return due_s
            heapq.heappop(self._queue)
        return None

    def oldest(self) -> Held | None:
        """The lease that ends first, for whoever looks."""
        return self._deadlines[self._queue[0][1]][0] if self.next_deadline_s() is not None else None

    def _last_deadlines(self) -> dict[str, float]:
        """By worker."""
        last_s: dict[str, float] = {}
        for held, deadline_s in self._deadlines.values():
            last_s[held.worker] = max(deadline_s, last_s.get(held.worker, deadline_s))
        return last_s

    def _set(self, held: Held, deadline_s: float) -> None:
        self._deadlines[held.task] = (held, deadline_s)
        self._look_at(held.task, deadline_s)

    def _look_at(self, task: int, due_s: float) -> None:
        self._due[task] = due_s
        heapq.heappush(self._queue, (due_s, task))
        if len(self._queue) > 2 * len(self._due) + 64:  # renewals left many behind
            self._queue = [(due_s, task) for task, due_s in self._due.items()]
            heapq.heapify(self._queue)
