"""Where the over-provision factor of a round comes from: a constant, or the rule of real runs, `OverProvision`."""

from __future__ import annotations

from typing import Protocol

from benchmarks.partial.rollouts import Rollouts
from offbeat.rules.over_provision import OverProvision


class Factor(Protocol):
    @property
    def value(self) -> float: ...

    def ended(self, rollouts: Rollouts) -> None:
        """Called when a round is over, during the update."""


class Fixed:
    def __init__(self, value: float):
        self.value = value

    def ended(self, rollouts: Rollouts) -> None: ...


class Automatic:
    """Gives `OverProvision` the tokens and seconds of every round, as a coordinator does."""

    def __init__(self, max_staleness: int):
        self._choice = OverProvision(max_staleness)
        self._began = (0, 0.0)
        """Tokens generated and seconds passed before this round."""

    @property
    def value(self) -> float:
        return self._choice.factor

    def ended(self, rollouts: Rollouts) -> None:
        num_before, before_s = self._began
        engine = rollouts.engine
        self._began = engine.counts.num_rows, engine.now_s + rollouts.update_s
        if (seconds := self._began[1] - before_s) > 0:
            self._choice.outcome(self._began[0] - num_before, seconds)
