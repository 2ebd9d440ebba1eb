"""The interface of a policy, which makes one step of a run at a time."""

from __future__ import annotations

from typing import Protocol

from benchmarks.partial.rollouts import Rollouts


class Policy(Protocol):
    def step(self, rollouts: Rollouts) -> None:
        """Delivers a step's samples, then updates the weights."""
