"""Assignment: which open tasks a worker is given.

Evaluation comes first, because a version waits to be judged; then groups that were started, so that a group is finished
before the next is begun; then the lowest ordinal. Among the groups before the first that is not begun, those whose keys
and values are held by other workers only come last: these workers can continue them without a new prefill. A task that
requires a version is given only to a worker that has it. Of the others, a group is begun only while pacing allows it
for the worker's version, and continued only with a version at least as new as its oldest. If several workers ask, each
gets its share of the open tasks, by the number of its slots; it may ask again.

A task whose workers vanished is suspect, the more so the more often. A worker gets few suspects at a time: an eighth of
its slots after the first loss, a 64th after the second, one at last. So a prompt that kills engines is soon the only
one to blame, which `culprit` finds: of n tasks it is blamed for every death but the first ceil(log8 n)."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


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
