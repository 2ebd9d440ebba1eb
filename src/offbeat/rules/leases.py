"""Leases: the open tasks that a worker is given, and how long it may hold each.

Deadlines are on one monotonic clock, the coordinator's. The ledger records who holds each task; after a restart every
lease that it knows is granted anew, so that workers that continued meanwhile keep it.

Guarantees: a lease ends once, by `end`, by `expired` or by a grant under a larger fence. Until then its holder can
renew it, however late: the coordinator may itself have been late. A grant or a renewal under an older fence, or a
renewal by another worker, changes nothing. The leases of a vanished worker expire together, when the last of them is
over: the task to blame shows only beside all others that the worker held. A worker that is heard of and no longer
names a lease keeps it for one more `ttl_s` at most.

Assignment: evaluation comes first, because a version waits to be judged; then groups that were started, so that a group
is finished before the next is begun; then the lowest ordinal. Among the groups before the first that is not begun,
those whose keys and values are held by other workers only come last: these workers can continue them without a new
prefill. A task that requires a version is given only to a worker that has it. Of the others, a group is begun only
while pacing allows it for the worker's version, and continued only with a version at least as new as its oldest. If
several workers ask, each gets its share of the open tasks, by the number of its slots; it may ask again.

A task whose workers vanished is suspect, the more so the more often. A worker gets few suspects at a time: an eighth of
its slots after the first loss, a 64th after the second, one at last. So a prompt that kills engines is soon the only
one to blame, which `culprit` finds: of n tasks it is blamed for every death but the first ceil(log8 n).
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


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


class OpenGroup(NamedTuple):
    """A group with open tasks. A tuple, because every lease makes dozens."""

    group: int
    ordinal: int
    is_eval: bool
    size: int
    num_open: int
    require_version: int | None
    num_losses: int = 0
    """Most losses of any of its open tasks: workers that vanished while they held it."""
    first_step: int | None = None
    """Step of the oldest version that a member was begun with; None: none is begun."""
    is_away: bool = False
    """Whether partials of it are kept, all from other workers, which may hold their keys and values; False for
    evaluation."""

    @property
    def order(self) -> tuple[bool, bool, int, int]:
        return not self.is_eval, self.num_open == self.size, self.ordinal, self.group

    @property
    def begins(self) -> bool:
        """Whether leasing one of its tasks begins it, which is subject to pacing."""
        return self.require_version is None and self.first_step is None


@dataclass(frozen=True, slots=True)
class Requester:
    """A worker that asks for tasks."""

    capacity: int
    """Tasks that it can begin now."""
    have_version: int | None
    step: int | None = None
    """Step of that version; None if it has none, or an abandoned one."""
    num_begin: int | None = None
    """Groups without a required version that it may begin; None: any number."""
    total_slots: int | None = None
    """Slots of all active workers, including its own; None: there is no other."""
    num_held: int = 0
    """Tasks that it holds already."""
    suspects: Mapping[int, int] = field(default_factory=dict)
    """Number of held tasks by losses, 1 or more."""
    num_open: int | None = None
    """Open tasks of all groups, if only the first groups are given; None: all are."""

    def share(self, num_open: int) -> int:
        """Its fair share of the open tasks, within its capacity."""
        num_slots = self.capacity + self.num_held
        if self.total_slots is None or self.total_slots <= num_slots:
            return self.capacity
        return min(self.capacity, -(-num_open * num_slots // self.total_slots))


def assign(groups: Iterable[OpenGroup], requester: Requester) -> list[tuple[int, int]]:
    """Groups, with the number of tasks of each, that a worker is given, in the order of leasing."""
    given: list[tuple[int, int]] = []
    groups = _in_order(groups)
    num_open = sum(group.num_open for group in groups) if requester.num_open is None else requester.num_open
    left, suspects, num_begun = requester.share(num_open), dict(requester.suspects), 0
    for group in groups:
        if left <= 0:
            break
        begins = group.begins
        if not _suits(group, requester) or (
            begins and requester.num_begin is not None and num_begun >= requester.num_begin
        ):
            continue
        count = min(left, group.num_open)
        if group.num_losses:
            count = min(count, _allowed(suspects, requester.num_held + requester.capacity, group.num_losses))
            suspects[group.num_losses] = suspects.get(group.num_losses, 0) + count
        if count:
            given.append((group.group, count))
            left -= count
            num_begun += begins
    return given


def _in_order(groups: Iterable[OpenGroup]) -> list[OpenGroup]:
    ordered = sorted(groups, key=lambda group: group.order)
    num_front = len(front(ordered))
    return [*sorted(ordered[:num_front], key=lambda group: group.is_away), *ordered[num_front:]]


def front(ordered: Sequence[OpenGroup]) -> list[OpenGroup]:
    """Groups before the first that is not begun."""
    return list(itertools.takewhile(lambda group: not group.begins, ordered))


def _suits(group: OpenGroup, requester: Requester) -> bool:
    if group.require_version is not None:
        return group.require_version == requester.have_version
    return requester.step is not None and (group.first_step is None or requester.step >= group.first_step)


def allowance(num_slots: int, num_losses: int) -> int:
    """Most tasks with `num_losses` or more that a worker may hold."""
    return max(1, num_slots >> (3 * num_losses))


def _allowed(suspects: Mapping[int, int], num_slots: int, num_losses: int) -> int:
    """Remaining quota for tasks with `num_losses`; a task with k losses also counts against the quotas of 1..k-1."""
    left = [
        allowance(num_slots, level) - sum(num for losses, num in suspects.items() if losses >= level)
        for level in range(1, num_losses + 1)
    ]
    return max(0, min(left))


def culprit(lost: Mapping[int, int]) -> int | None:
    """Task to blame for a vanished worker: the only one with most losses among those it held; None if there is none.
    `lost` maps tasks to their earlier losses."""
    most = max(lost.values(), default=0)
    suspects = [task for task, losses in lost.items() if losses == most]
    return suspects[0] if len(suspects) == 1 else None


def wanted_version(groups: Iterable[OpenGroup]) -> int | None:
    """Version that the first open task requires; None if there is no task, or it takes any version."""
    first = min(groups, key=lambda g: g.order, default=None)
    return None if first is None else first.require_version
