"""Depth: by how many steps of work the workers are ahead of the trainer, if generation overlaps with training."""

from __future__ import annotations

MAX_STILL = 0.05
"""Share of a step's time for which the trainer may be idle; if it is idle for longer, `Depth.steps` rises by one."""
FIRST_PATIENCE, MAX_PATIENCE = 4, 128
"""First and largest value of the patience: the number of steps with a busy trainer after which `Depth.steps` falls by
one. The patience doubles whenever a fall turns out to be too early."""


class Depth:
    """Chooses the depth: by how many steps of work the workers should be ahead of the trainer. It is at most
    `max_staleness`, and as small as keeps the trainer busy, so that tokens are as fresh as possible.

    The depth rises by one when the trainer was idle for more than `MAX_STILL` of a step's time. It falls by one after
    several steps in which the trainer was busy. If it then has to rise again, the next fall takes twice as many steps,
    up to `MAX_PATIENCE`. Call `trained` after every step; `steps` is then the depth for the next step.
    """

    def __init__(self, max_staleness: int):
        self.max_staleness, self.steps = max_staleness, min(1, max_staleness)
        self._patience, self._num_calm, self._is_trial = FIRST_PATIENCE, 0, False

    def trained(self, still_s: float, step_s: float) -> None:
        """Records a step that took `step_s` seconds, including `still_s` seconds in which the trainer waited for its
        batch."""
        if still_s > MAX_STILL * step_s:
            if self._is_trial:
                self._patience = min(2 * self._patience, MAX_PATIENCE)
            self.steps = min(self.steps + 1, self.max_staleness)
            self._num_calm, self._is_trial = 0, False
            return
        self._num_calm += 1
        if self._num_calm >= self._patience and self.steps > 1:
            self.steps -= 1
            self._num_calm, self._is_trial = 0, True
