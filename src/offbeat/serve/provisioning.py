"""How many groups are under way, over those that a step trains: the one place that a coordinator takes it from.

A number is in force as it was told. Otherwise it is chosen when a version is published and kept until the next: where
work overlaps with training by how long the trainer stood still (`control.depth`), and in rounds by what the event model
predicts (`offbeat.serve.foresight`).
"""

from __future__ import annotations

from collections.abc import Sequence

from offbeat.control.depth import Depth
from offbeat.control.step_time import Timing
from offbeat.ledger.records import Surviving
from offbeat.trajectory import Task, Trajectory


class Provisioning:
    """A factor that was told. Those that choose one are told of what happens, and asked for the factor in force."""

    wants_survivors = False
    """Whether `began` makes use of them."""

    def __init__(self, factor: float):
        self._factor = factor

    def factor(self) -> float:
        return self._factor

    def handed_out(self, tasks: Sequence[Task]) -> None:
        """Workers were given tasks."""

    def submitted(self, trajectory: Trajectory) -> None:
        """One came back, whole or unfinished, and was stored."""

    def timed(self, worker: str, timings: Sequence[Timing]) -> None:
        """A worker's engine took steps."""

    def left(self, worker: str) -> None:
        """A worker is gone."""

    def claimed(self) -> None:
        """The batch of the step under way is complete."""

    def began(self, step: int, num_slots: int, survivors: Sequence[Surviving]) -> None:
        """The version of a step was published: from now on that step's work is under way."""

    def trained(self, still_s: float, step_s: float) -> None:
        """A step took `step_s`, of which the trainer waited `still_s` for its batch."""

    def figures(self) -> dict[str, float]:
        """For the step's row."""
        return {"over_provision": self._factor}


class Overlapped(Provisioning):
    """As far ahead of the trainer as it needs."""

    def __init__(self, bound: int):
        self._depth = Depth(bound)
        super().__init__(1.0 + self._depth.steps)

    def began(self, step: int, num_slots: int, survivors: Sequence[Surviving]) -> None:
        self._factor = 1.0 + self._depth.steps

    def trained(self, still_s: float, step_s: float) -> None:
        self._depth.trained(still_s, step_s)
