"""One run: a policy on a law, from a seed, on an engine."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.partial.accounts import Figures, figures_of
from benchmarks.partial.engines import Engine
from benchmarks.partial.policies.policy import Policy
from benchmarks.partial.rollouts import Rollouts

GROUPS_PER_STEP, GROUP_SIZE = 4, 8
UPDATE_S = 0.05


@dataclass(frozen=True)
class Size:
    """Length of a run, and the part that counts; the first third does not, because the schedule fills up."""

    num_steps: int

    @property
    def num_dropped(self) -> int:
        return self.num_steps // 3


def play(policy: Policy, engine: Engine, size: Size, prefill_s: float) -> Figures:
    rollouts = Rollouts(engine, GROUPS_PER_STEP, UPDATE_S)
    for _ in range(size.num_steps):
        policy.step(rollouts)
    return figures_of(rollouts.rows, size.num_dropped, prefill_s)
