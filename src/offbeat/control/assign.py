"""Which open tasks a worker is given.

Duty: groups make progress. Evaluation comes first, because a version is waiting to be judged; then groups that were
started, so that a group is finished before the next is begun; then the lowest ordinal. A task that requires a version
is given only to a worker that has it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class OpenGroup:
    """A group with open tasks."""

    group: int
    ordinal: int
    is_eval: bool
    size: int
    num_open: int
    require_version: int | None

    @property
    def order(self) -> tuple[bool, bool, int, int]:
        return not self.is_eval, self.num_open == self.size, self.ordinal, self.group


def assign(groups: Iterable[OpenGroup], capacity: int, have_version: int | None) -> list[tuple[int, int]]:
    """How many open tasks of which groups fill a worker's capacity, in the order to hand them out."""
    given: list[tuple[int, int]] = []
    for group in sorted(groups, key=lambda g: g.order):
        if capacity <= 0:
            break
        if group.require_version is None or group.require_version == have_version:
            count = min(capacity, group.num_open)
            given.append((group.group, count))
            capacity -= count
    return given


def wanted_version(groups: Iterable[OpenGroup]) -> int | None:
    """The version that the first open task requires; None where there is none, or any version will do."""
    first = min(groups, key=lambda g: g.order, default=None)
    return None if first is None else first.require_version
