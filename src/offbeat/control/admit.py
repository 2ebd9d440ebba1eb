"""How many groups may be drawn now.

Duty: pacing of the `alternate` schedule. Work for a step is drawn once the version of that step is published, and only
as much as the step trains. A group that was dropped gives its place back; one that was re-issued already holds it.
"""

from __future__ import annotations

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


def admit(standing: Standing, pace: Pace) -> int:
    """The number of groups to draw now."""
    if standing.step is None:
        return 0
    if pace.num_steps is not None and standing.step >= pace.num_steps:
        return 0
    return max(0, pace.groups_per_step - standing.num_alive)
