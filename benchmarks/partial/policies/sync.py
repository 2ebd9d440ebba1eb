"""`sync`: a step's groups begin together, and the step ends with the last of them. All tokens are fresh."""

from __future__ import annotations

from benchmarks.partial.rollouts import Rollouts


class Sync:
    def step(self, rollouts: Rollouts) -> None:
        groups = [rollouts.begin() for _ in range(rollouts.groups_per_step)]
        samples = [sample for group in groups for sample in group.samples]
        rollouts.engine.add(samples)
        while rollouts.engine.step():
            pass
        rollouts.deliver(samples)
        rollouts.update()
