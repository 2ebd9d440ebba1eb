"""`copris` and `pipeline`: as many samples at a time as the pool has places, refilled one by one.

Groups are delivered whole, in the order in which they were done; those beyond a step's number wait for the next.
`copris` aborts everything at an update and resumes it first, prefilled anew (arXiv 2511.05589). `pipeline` never
aborts: what runs goes on under the new weights with the keys and values that it has (arXiv 2509.19128).
"""

from __future__ import annotations

from collections import deque

from benchmarks.partial.rollouts import Rollouts
from benchmarks.partial.samples import Group, Sample


class Pool:
    """`factor` times a step's samples run at a time."""

    def __init__(self, factor: float, keeps_kv: bool):
        self.factor, self.keeps_kv = factor, keeps_kv
        self.waiting: deque[Sample] = deque()
        """Aborted ones first, then members of the group begun last."""
        self.ready: deque[Group] = deque()

    def step(self, rollouts: Rollouts) -> None:
        self._fill(rollouts)
        while len(self.ready) < rollouts.groups_per_step:
            ended = rollouts.engine.step()
            done = dict.fromkeys(sample.group for sample in ended if sample.group.is_done)
            self.ready.extend(done)
            if len(self.ready) < rollouts.groups_per_step:
                self._fill(rollouts)
        if not self.keeps_kv:
            self.waiting.extendleft(reversed(rollouts.engine.abort()))
        groups = [self.ready.popleft() for _ in range(rollouts.groups_per_step)]
        rollouts.deliver(sample for group in groups for sample in group.samples)
        rollouts.row.factor = self.factor
        rollouts.update()

    def _fill(self, rollouts: Rollouts) -> None:
        places = round(self.factor * rollouts.samples_per_step) - rollouts.engine.num_running
        while len(self.waiting) < places:
            self.waiting.extend(rollouts.begin().samples)
        rollouts.engine.add([self.waiting.popleft() for _ in range(places)])
