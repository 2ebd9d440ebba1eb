"""Deadlines of leases: who holds which task under which fence, and until when.

Deadlines are on one monotonic clock, the coordinator's. The ledger records who holds each task; after a restart every
lease that it knows is granted anew, so that workers that continued meanwhile keep it.

Guarantees: a lease ends once, by `end`, by `expired` or by a grant under a larger fence. Until then its holder can
renew it, however late: the coordinator may itself have been late. A grant or a renewal under an older fence, or a
renewal by another worker, changes nothing. The leases of a vanished worker expire together, when the last of them is
over: the task to blame shows only beside all others that the worker lease. A worker that is heard of and no longer
names a lease keeps it for one more `ttl_s` at most."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class Lease:
    """A worker's right to one task; a later grant of the same task has a larger fence."""

    task: int
    fence: int
    worker: str


class Leases:
    def __init__(self, ttl_s: float, clock: Callable[[], float]):
        self.ttl_s, self._clock = ttl_s, clock
        self._deadlines: dict[int, tuple[Lease, float]] = {}
        self._due: dict[int, float] = {}
        """Time of the next check of a task: its deadline, or later if its worker was heard of since."""
        self._queue: list[tuple[float, int]] = []
        """Heap of checks by time; outdated entries of renewed and ended leases are skipped."""

    def __len__(self) -> int:
        return len(self._deadlines)

    def grant(self, leases: Iterable[Lease]) -> None:
        deadline_s = self._clock() + self.ttl_s
        for lease in leases:
            found = self._deadlines.get(lease.task)
            if found is None or found[0].fence <= lease.fence:
                self._set(lease, deadline_s)

    def renew(self, leases: Iterable[Lease]) -> list[Lease]:
        """Renews leases for `ttl_s`; returns those that are lost."""
        deadline_s = self._clock() + self.ttl_s
        lost = []
        for lease in leases:
            if self.is_held(lease):
                self._set(lease, deadline_s)
            else:
                lost.append(lease)
        return lost

    def renew_all(self) -> None:
        """Renews all leases, as after a time in which no worker could be heard."""
        self.grant(self.all())

    def all(self) -> list[Lease]:
        return [lease for lease, _ in self._deadlines.values()]

    def is_held(self, lease: Lease) -> bool:
        found = self._deadlines.get(lease.task)
        return found is not None and found[0] == lease

    def end(self, tasks: Iterable[int]) -> None:
        """Ends the leases of tasks that ended or were given back."""
        for task in tasks:
            self._deadlines.pop(task, None)
            self._due.pop(task, None)

    def expired(self) -> list[Lease]:
        """Ends the leases whose time is over, and returns them."""
        now_s = self._clock()
        overdue = []
        while (next_s := self.next_deadline_s()) is not None and next_s <= now_s:
            _, task = heapq.heappop(self._queue)
            del self._due[task]
            overdue.append(task)
        last_s = self._last_deadlines() if overdue else {}
        over = []
        for task in overdue:
            lease, deadline_s = self._deadlines[task]
            due_s = min(max(deadline_s, last_s[lease.worker]), deadline_s + self.ttl_s)
            if due_s <= now_s:
                over.append(lease)
            else:
                self._schedule(task, due_s)
        self.end(lease.task for lease in over)
        return over

    def next_deadline_s(self) -> float | None:
        """Time at which to call `expired` next, on this clock; None while nothing is leased."""
        while self._queue:
            due_s, task = self._queue[0]
            if self._due.get(task) == due_s:
                return due_s
            heapq.heappop(self._queue)
        return None

    def oldest(self) -> Lease | None:
        """Lease that ends first."""
        return self._deadlines[self._queue[0][1]][0] if self.next_deadline_s() is not None else None

    def _last_deadlines(self) -> dict[str, float]:
        """Last deadline of each worker."""
        last_s: dict[str, float] = {}
        for lease, deadline_s in self._deadlines.values():
            last_s[lease.worker] = max(deadline_s, last_s.get(lease.worker, deadline_s))
        return last_s

    def _set(self, lease: Lease, deadline_s: float) -> None:
        self._deadlines[lease.task] = (lease, deadline_s)
        self._schedule(lease.task, deadline_s)

    def _schedule(self, task: int, due_s: float) -> None:
        self._due[task] = due_s
        heapq.heappush(self._queue, (due_s, task))
        if len(self._queue) > 2 * len(self._due) + 64:  # renewals left many behind
            self._queue = [(due_s, task) for task, due_s in self._due.items()]
            heapq.heapify(self._queue)
