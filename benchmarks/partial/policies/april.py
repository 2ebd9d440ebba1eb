"""`april`: over-provisioned groups, aborted when enough of them are done, as published (arXiv 2509.18521).

A step launches `factor` times the groups that it wants, oldest buffered first, each as one unit. Units that end in one
wake-up are taken in order until the step has enough; further ones of the same wake-up are thrown away. Then everything
is aborted and goes to the tail of the buffer whole, and is prefilled again from its first token when it is launched
next. Members that ended earlier return at once and cost nothing. There is no bound on age and no top-up.
"""

from __future__ import annotations

from collections import deque

from benchmarks.partial.rollouts import Rollouts
from benchmarks.partial.samples import Group


class April:
    """`drops_surplus` is what was published; without it, surplus groups go to the buffer too."""

    def __init__(self, factor: float, drops_surplus: bool = True):
        self.factor, self.drops_surplus = factor, drops_surplus
        self.buffer: deque[Group] = deque()

    def step(self, rollouts: Rollouts) -> None:
        out = self._launch(rollouts)
        accepted: list[Group] = []
        while True:
            for group in [group for group in out if group.is_done]:
                out.remove(group)
                if len(accepted) < rollouts.groups_per_step:
                    accepted.append(group)
                elif self.drops_surplus:
                    rollouts.waste(group.samples, "surplus")
                else:
                    self.buffer.append(group)
            if len(accepted) == rollouts.groups_per_step:
                break
            assert rollouts.engine.step(), "nothing runs, and the step has too few groups"
        rollouts.engine.abort()
        self.buffer.extend(out)
        rollouts.deliver(sample for group in accepted for sample in group.samples)
        rollouts.row.factor = self.factor
        rollouts.update()

    def _launch(self, rollouts: Rollouts) -> list[Group]:
        wanted = round(self.factor * rollouts.groups_per_step)
        out = [self.buffer.popleft() if self.buffer else rollouts.begin() for _ in range(wanted)]
        rollouts.engine.add([sample for group in out for sample in group.samples if not sample.is_done])
        return out
