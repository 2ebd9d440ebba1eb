"""Which open tasks a worker is given.

Duty: groups make progress, and no task takes worker after worker along. Evaluation comes first, because a version is
waiting to be judged; then groups that were started, so that a group is finished before the next is begun; then the
lowest ordinal. Of those before the first that nobody has begun, the ones whose keys and values lie with another worker
come last: there they can be carried on without computing these anew. A task that requires a version is given only to a
worker that has it. Of the others, a group is begun only while pacing allows it for the worker's version, and carried on
only with a version at least as new as its oldest. Where several workers ask, each is given its share of what is open,
by the number of its slots; it may ask again.

A task that workers vanished with is suspect, and the more so the more often. Whoever gets suspects gets few of them at
a time: an eighth of its slots after the first loss, a 64th after the second, one at last. So a prompt that kills
engines is soon alone with the blame, which `culprit` finds, and its neighbours go free: of n tasks it is blamed for
every death but the first ceil(log8 n).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


class OpenGroup(NamedTuple):
    """A group with open tasks. A tuple, because every call for tasks makes dozens."""

    group: int
    ordinal: int
    is_eval: bool
    size: int
    num_open: int
    require_version: int | None
    num_losses: int = 0
    """Workers that vanished with one of its open tasks: the most that any of them has seen."""
    first_step: int | None = None
    """Of the oldest version that a member was begun with; None: none is begun."""
    is_away: bool = False
    """Whether members were handed back, and by other workers alone: their keys and values lie there, if anywhere. Never
    said of evaluation, which waits for nobody."""

    @property
    def order(self) -> tuple[bool, bool, int, int]:
        return not self.is_eval, self.num_open == self.size, self.ordinal, self.group

    @property
    def begins(self) -> bool:
        """Whether to give one of its tasks is to begin it, for which pacing is asked."""
        return self.require_version is None and self.first_step is None


@dataclass(frozen=True, slots=True)
class Asker:
    """The worker that asks for tasks."""

    capacity: int
    """Tasks that it can begin now."""
    have_version: int | None
    step: int | None = None
    """Of that version; None where there is none, or it is abandoned."""
    num_begin: int | None = None
    """Groups without a required version that it may begin; None: as many as there are."""
    total_slots: int | None = None
    """Slots of all workers that ask these days, its own among them; None: it is alone."""
    num_held: int = 0
    """Tasks that it has already."""
    suspects: Mapping[int, int] = field(default_factory=dict)
    """How many of those saw so many losses; without those that saw none."""
    num_open: int | None = None
    """Open tasks in all, where only the first groups are at hand; None: those of the groups that are."""

    def share(self, num_open: int) -> int:
        """How many of the open tasks are its fair part, as far as it has room."""
        num_slots = self.capacity + self.num_held
        if self.total_slots is None or self.total_slots <= num_slots:
            return self.capacity
        return min(self.capacity, -(-num_open * num_slots // self.total_slots))


def assign(groups: Iterable[OpenGroup], asker: Asker) -> list[tuple[int, int]]:
    """How many open tasks of which groups fill a worker's capacity, in the order to hand them out."""
    given: list[tuple[int, int]] = []
    groups = _in_order(groups)
    num_open = sum(group.num_open for group in groups) if asker.num_open is None else asker.num_open
    left, suspects, num_begun = asker.share(num_open), dict(asker.suspects), 0
    for group in groups:
        if left <= 0:
            break
        begins = group.begins
        if not _suits(group, asker) or (begins and asker.num_begin is not None and num_begun >= asker.num_begin):
            continue
        count = min(left, group.num_open)
        if group.num_losses:
            count = min(count, _allowed(suspects, asker.num_held + asker.capacity, group.num_losses))
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
    """Of groups by their order, those before the first that nobody has begun."""
    return list(itertools.takewhile(lambda group: not group.begins, ordered))


def _suits(group: OpenGroup, asker: Asker) -> bool:
    if group.require_version is not None:
        return group.require_version == asker.have_version
    return asker.step is not None and (group.first_step is None or asker.step >= group.first_step)


def allowance(num_slots: int, num_losses: int) -> int:
    """How many tasks with so many losses or more a worker may hold."""
    return max(1, num_slots >> (3 * num_losses))


def _allowed(suspects: Mapping[int, int], num_slots: int, num_losses: int) -> int:
    """How many more tasks with so many losses fit beside the suspects held: they count as every lesser suspect, too."""
    left = [
        allowance(num_slots, level) - sum(num for losses, num in suspects.items() if losses >= level)
        for level in range(1, num_losses + 1)
    ]
    return max(0, min(left))


def culprit(lost: Mapping[int, int]) -> int | None:
    """Of the tasks that vanished with one worker, by their losses before, the one that is alone most suspect."""
    most = max(lost.values(), default=0)
    suspects = [task for task, losses in lost.items() if losses == most]
    return suspects[0] if len(suspects) == 1 else None


def wanted_version(groups: Iterable[OpenGroup]) -> int | None:
    """The version that the first open task requires; None where there is none, or any version will do."""
    first = min(groups, key=lambda g: g.order, default=None)
    return None if first is None else first.require_version
