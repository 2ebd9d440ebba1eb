"""How many groups may be drawn now.

Duty: pacing. Work for a step is drawn once the version of that step is published: as many groups as the step trains,
times the over-provision factor r. With r = 1 all of them are wanted; with more, the step trains those that are finished
first and the others are carried on. When S + 1 steps' groups are alive at most, and steps take the longest begun first,
none is trained more than S steps after it was begun, so r is S + 1 at most. `may_begin` holds the same for workers
whose version lags behind. No more is drawn than the run will train. A group that was dropped gives its place back; one
that was re-issued already holds it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Standing:
    """Where a run stands."""

    step: int | None
    """Of the latest version that is not abandoned: the step trained from next; None before the first version."""
    num_alive: int
    """Groups open, ready or claimed that this step may train."""


@dataclass(frozen=True, slots=True)
class Pace:
    """What a run wants."""

    groups_per_step: int
    num_steps: int | None = None
    """Steps of the whole run; None: no end."""
    over_provision: float = 1.0
    """Groups under way over groups that a step trains: from 1 to the bound + 1."""


def admit(standing: Standing, pace: Pace) -> int:
    """The number of groups to draw now."""
    if standing.step is None:
        return 0
    steps = pace.over_provision
    if pace.num_steps is not None:
        steps = min(steps, pace.num_steps - standing.step)
    wanted = math.ceil(round(steps * pace.groups_per_step, 6))  # 1.1 * 110 is a hair more than 121
    return max(0, wanted - standing.num_alive)


def may_begin(step: int, begun: Mapping[int, int], next_step: int, groups_per_step: int, bound: int) -> int:
    """How many groups may be begun now with a version of `step`, so that it and all others are trained in time.

    `begun` counts the groups that no batch has claimed yet by the step of the oldest version that they were begun with;
    `next_step` is the first without a batch. Steps take the oldest first: those begun with versions up to any step must
    fit into the batches up to `bound` steps later.
    """
    rooms = []
    for last in sorted({step, *(other for other in begun if other > step)}):
        num_batches = last + bound - next_step + 1
        rooms.append(num_batches * groups_per_step - sum(num for first, num in begun.items() if first <= last))
    return max(0, min(rooms))
