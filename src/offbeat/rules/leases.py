"""Leases: the open tasks that a worker is given, and how long it may hold each.

Guarantees: a lease ends once, by `end`, by `expired` or by a grant under a larger fence. Until then its holder can
renew it, however late, because the coordinator itself may have been late. A grant or renewal under an older fence, or a
renewal by another worker, changes nothing. The leases of a vanished worker expire together, at the last of their
deadlines, because `culprit` compares all tasks that the worker held. A lease that a worker no longer names in its
heartbeats ends at most `ttl_s` after its own deadline.

Assignment: evaluation groups come first; then groups with a task that is leased or has ended; then the lowest ordinal.
Among the groups that are already begun or require a version (`front`), a group whose partial answers all come from
other workers is last: those workers may still hold its KV cache and need no new prefill. A task that requires a version
is given only to a worker that serves this version. Any other group is begun only if pacing (`rules.groups.may_begin`)
allows it for the worker's version. Once begun, it is given only to workers whose version is at least as new as the
oldest version with which one of its tasks was begun.

A task whose worker vanished is suspect: it may have killed the worker. Tasks with one such loss may take at most an
eighth of a worker's slots, tasks with two losses a 64th, and so on, but always one slot. So a prompt that kills engines
is soon the only suspect that its worker holds: if workers have n slots, `culprit` blames it for every death except the
first ceil(log8 n).
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol


@dataclass(frozen=True, slots=True, order=True)
class Lease:
    """A worker's right to one task; a later grant of the same task has a larger fence."""

    task: int
    fence: int
    worker: str


class Leases:
    """The current leases and their deadlines: `ttl_s` seconds after the grant or the last renewal."""

    def __init__(self, ttl_s: float, clock: Callable[[], float]):
        self.ttl_s, self._clock = ttl_s, clock
        self._deadlines: dict[int, tuple[Lease, float]] = {}
        self._due: dict[int, float] = {}
        """Time at which to check each task's lease: its deadline, or later if its worker renewed other leases since."""
        self._queue: list[tuple[float, int]] = []
        """Heap of pairs of check time and task; outdated entries of renewed and ended leases are skipped."""

    def __len__(self) -> int:
        return len(self._deadlines)

    def grant(self, leases: Iterable[Lease]) -> None:
        deadline_s = self._clock() + self.ttl_s
        for lease in leases:
            found = self._deadlines.get(lease.task)
            if found is None or found[0].fence <= lease.fence:
                self._set(lease, deadline_s)

    def renew(self, leases: Iterable[Lease]) -> list[Lease]:
        """Renews leases for `ttl_s` seconds from now; returns those of `leases` that had already ended."""
        deadline_s = self._clock() + self.ttl_s
        lost = []
        for lease in leases:
            if self.is_held(lease):
                self._set(lease, deadline_s)
            else:
                lost.append(lease)
        return lost

    def renew_all(self) -> None:
        """Renews all leases, for example after a time in which the coordinator could not receive heartbeats."""
        self.grant(self.all())

    def all(self) -> list[Lease]:
        return [lease for lease, _ in self._deadlines.values()]

    def is_held(self, lease: Lease) -> bool:
        found = self._deadlines.get(lease.task)
        return found is not None and found[0] == lease

    def end(self, tasks: Iterable[int]) -> None:
        """Ends the leases of `tasks`, because the tasks have ended or were given back."""
        for task in tasks:
            self._deadlines.pop(task, None)
            self._due.pop(task, None)

    def expired(self) -> list[Lease]:
        """Ends and returns the leases whose time is over."""
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
        """Returns the time on `clock` at which to call `expired` next; None while nothing is leased."""
        while self._queue:
            due_s, task = self._queue[0]
            if self._due.get(task) == due_s:
                return due_s
            heapq.heappop(self._queue)
        return None

    def _last_deadlines(self) -> dict[str, float]:
        """Returns, for each worker, the last deadline of its leases."""
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
        if len(self._queue) > 2 * len(self._due) + 64:  # renewals left many outdated entries
            self._queue = [(due_s, task) for task, due_s in self._due.items()]
            heapq.heapify(self._queue)


class OpenGroup(NamedTuple):
    """A group with open tasks. A task is open, and can be leased, if it has not ended and no worker holds it. The class
    is a tuple because every lease request creates dozens of objects, and tuples are fast."""

    group: int
    ordinal: int
    is_eval: bool
    size: int
    num_open: int
    require_version: int | None
    num_losses: int = 0
    """Largest number of losses of any of its open tasks. A loss is a worker that vanished while it held the task."""
    first_step: int | None = None
    """Step of the oldest version with which a member was begun; None: no member was begun."""
    is_away: bool = False
    """Whether the group has partial answers, but none from the requesting worker: other workers may still hold their KV
    cache. Always False for evaluation."""

    @property
    def order(self) -> tuple[bool, bool, int, int]:
        return not self.is_eval, self.num_open == self.size, self.ordinal, self.group

    @property
    def begins(self) -> bool:
        """Whether leasing one of its tasks would begin the group; a worker may begin only `Requester.num_begin`
        groups."""
        return self.require_version is None and self.first_step is None


@dataclass(frozen=True, slots=True)
class Requester:
    """A worker that asks for tasks."""

    capacity: int
    """Number of tasks that the worker can begin now."""
    have_version: int | None
    step: int | None = None
    """Step of `have_version`; None if the worker has no version or an abandoned one."""
    num_begin: int | None = None
    """Number of groups without a required version that the worker may begin; None: any number."""
    total_slots: int | None = None
    """Slots of all active workers together; None: no other worker is active."""
    num_held: int = 0
    """Number of tasks that the worker already holds."""
    suspects: Mapping[int, int] = field(default_factory=dict)
    """Number of tasks that the worker holds, by their number of losses (see `OpenGroup.num_losses`); tasks without
    losses are left out."""
    num_open: int | None = None
    """Number of open tasks of all groups. None: `assign` counts the open tasks of the groups that it is given."""

    def share(self, num_open: int) -> int:
        """Returns the worker's share of `num_open` tasks, in proportion to its slots; at most its `capacity`."""
        num_slots = self.capacity + self.num_held
        if self.total_slots is None or self.total_slots <= num_slots:
            return self.capacity
        return min(self.capacity, -(-num_open * num_slots // self.total_slots))


def assign(groups: Iterable[OpenGroup], requester: Requester) -> list[tuple[int, int]]:
    """Returns pairs of a group id and the number of its tasks to lease to the worker, in the order of leasing."""
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


NUM_NEAR = 8
"""A lease call first considers this many open groups, plus one per task that it may lease. The other open groups, often
hundreds, seldom matter."""


class OpenGroups(Protocol):
    """The open groups, loaded only as far as `choose_groups` needs them."""

    def all(self) -> Sequence[OpenGroup]:
        """Returns all open groups in the order of `OpenGroup.order`."""
        ...

    def num_open(self) -> int:
        """Returns the number of open tasks of all groups."""
        ...

    def num_begin(self) -> int | None:
        """Returns how many groups the worker may begin (`Requester.num_begin`)."""
        ...


def choose_groups(
    near: Sequence[OpenGroup], requester: Requester, groups: OpenGroups, *, is_all: bool
) -> list[tuple[int, int]]:
    """Returns the same as `assign` for all open groups, but asks `groups` for what is costly only if the result depends
    on it. `near` are the first open groups in the order of `OpenGroup.order`, and `is_all` says whether there are
    no others. `num_open` and `num_begin` of `requester` are not used."""
    num_open = sum(group.num_open for group in near)
    if not is_all and requester.share(num_open) < requester.capacity:
        num_open = groups.num_open()
    requester = replace(requester, num_open=num_open)

    def is_filled(given: Sequence[tuple[int, int]]) -> bool:
        return sum(count for _, count in given) == requester.share(num_open)

    begun = front(near)
    is_whole = is_all or len(begun) < len(near)
    given = assign(begun if is_whole else [group for group in begun if not group.is_away], requester)
    if is_filled(given):
        return given
    requester = replace(requester, num_begin=groups.num_begin())
    if is_whole:
        given = assign(near, requester)
        if is_all or is_filled(given):
            return given
    return assign(groups.all(), requester)


class OpenTask(NamedTuple):
    """A task that has not ended and that no worker holds."""

    task: int
    last_version: int | None = None
    """Newest version in the task's partial; None: it has no partial."""
    worker: str | None = None
    """Worker that submitted the partial; None: there is no partial."""
    failed_by: str | None = None
    """Worker whose attempt at the task failed last; None: the last attempt did not fail."""


def choose_tasks(
    tasks: Iterable[OpenTask], count: int, worker: str, version: int | None, *, is_alone: bool, skips_failed: bool
) -> list[int]:
    """Returns up to `count` of a group's open tasks, given in the order of members, for a worker that serves `version`.
    Skips tasks whose partial has tokens of a newer version, and, with `skips_failed`, tasks whose last attempt this
    worker failed. Unless the worker `is_alone`, tasks whose partial came from another worker come last."""
    own: list[int] = []
    others: list[int] = []
    for task, last_version, partial_of, failed_by in tasks:
        if last_version is not None and (version is None or last_version > version):
            continue
        if skips_failed and failed_by == worker:
            continue
        (own if is_alone or partial_of in (None, worker) else others).append(task)
    return [*own, *others][:count]


def oldest_first_step(first_step: int | None, step: int | None) -> int | None:
    """Returns a group's `first_step` after one of its tasks was leased to a worker with a version of `step` (None: with
    no step)."""
    return first_step if step is None or (first_step is not None and first_step <= step) else step


def _in_order(groups: Iterable[OpenGroup]) -> list[OpenGroup]:
    ordered = sorted(groups, key=lambda group: group.order)
    num_front = len(front(ordered))
    return [*sorted(ordered[:num_front], key=lambda group: group.is_away), *ordered[num_front:]]


def front(ordered: Sequence[OpenGroup]) -> list[OpenGroup]:
    """Returns the groups of `ordered` that come before the first one that a lease would begin (`OpenGroup.begins`)."""
    return list(itertools.takewhile(lambda group: not group.begins, ordered))


def _suits(group: OpenGroup, requester: Requester) -> bool:
    if group.require_version is not None:
        return group.require_version == requester.have_version
    return requester.step is not None and (group.first_step is None or requester.step >= group.first_step)


def allowance(num_slots: int, num_losses: int) -> int:
    """Returns how many tasks with at least `num_losses` losses (workers that vanished with the task) a worker with
    `num_slots` slots may hold."""
    return max(1, num_slots >> (3 * num_losses))


def _allowed(suspects: Mapping[int, int], num_slots: int, num_losses: int) -> int:
    """Returns how many more tasks with `num_losses` losses a worker with `num_slots` slots may hold. `suspects` counts
    the tasks that it holds, by their number of losses. A task with n losses counts against the allowances for 1 to n
    losses."""
    left = [
        allowance(num_slots, level) - sum(num for losses, num in suspects.items() if losses >= level)
        for level in range(1, num_losses + 1)
    ]
    return max(0, min(left))


def culprit(lost: Mapping[int, int]) -> int | None:
    """Returns the task to blame for a worker that vanished: the worker's task that was lost most often before; None if
    several tasks share the largest number. `lost` maps each of the worker's tasks to its number of earlier losses."""
    most = max(lost.values(), default=0)
    suspects = [task for task, losses in lost.items() if losses == most]
    return suspects[0] if len(suspects) == 1 else None


def ends_task(num_failures: int, max_attempts: int) -> bool:
    """Whether a task with so many failed attempts ends as failed."""
    return num_failures >= max_attempts


def lost_and_kept(expired: Iterable[Lease], heard: Collection[str]) -> tuple[list[Lease], list[Lease]]:
    """Divides expired leases into those of workers that vanished and those of workers in `heard`, which called lately.
    Only the first count as losses."""
    lost: list[Lease] = []
    kept: list[Lease] = []
    for lease in expired:
        (kept if lease.worker in heard else lost).append(lease)
    return lost, kept


def wanted_version(groups: Iterable[OpenGroup]) -> int | None:
    """Returns the version that the first open group requires; None if no group is open, or the first requires none."""
    first = min(groups, key=lambda g: g.order, default=None)
    return None if first is None else first.require_version
