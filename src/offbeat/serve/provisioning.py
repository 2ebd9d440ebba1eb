"""How many groups are under way, over those that a step trains: the one place that a coordinator takes it from.

A number is in force as it was told. Otherwise it is chosen when a version is published and kept until the next. Where
work overlaps with training it follows how long the trainer stood still (`control.depth`); in rounds it is `IN_ROUNDS`.
"""

from __future__ import annotations

from typing import Literal

from offbeat.control.depth import Depth

IN_ROUNDS = 1.5
"""Enough that the longest answers of a step seldom hold it up, and few enough that most tokens are fresh."""


class Provisioning:
    """Told of what happens in a run; asked for the factor in force."""

    def __init__(self, over_provision: float | Literal["auto"], bound: int, *, overlap: bool):
        self._told, self._bound = over_provision, bound
        self._depth = Depth(bound) if overlap else None
        self._factor = self._chosen()

    def factor(self) -> float:
        return self._factor

    def began(self) -> None:
        """A version was published: from now on its step's work is under way."""
        self._factor = self._chosen()

    def trained(self, still_s: float, step_s: float) -> None:
        """A step took `step_s`, of which the trainer waited `still_s` for its batch."""
        if self._depth is not None:
            self._depth.trained(still_s, step_s)

    def _chosen(self) -> float:
        if self._told != "auto":
            return self._told
        return 1.0 + self._depth.steps if self._depth is not None else min(IN_ROUNDS, self._bound + 1.0)
