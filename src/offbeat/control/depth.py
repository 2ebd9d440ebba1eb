"""How many steps ahead of the trainer workers should be.

Duty: train on tokens as fresh as the machines allow. Work that is done long before it is trained only grows old, so the
depth is the smallest at which the trainer does not stand still for want of a batch. It rises by one when the trainer
stood still for a noticeable part of a step, up to the bound, and falls by one after a while of calm. A depth that has
proved too small is tried again ever more seldom.
"""

from __future__ import annotations

MAX_STILL = 0.05
"""The share of a step for which a trainer may stand still."""
FIRST_PATIENCE, MAX_PATIENCE = 4, 128
"""Calm steps before less is tried."""


class Depth:
    """Between 1 and the bound. Report every step; `steps` is what to use for the next."""

    def __init__(self, bound: int):
        self.bound, self.steps = bound, min(1, bound)
        self._patience, self._num_calm, self._is_trial = FIRST_PATIENCE, 0, False

    def trained(self, still_s: float, step_s: float) -> None:
        """A step took `step_s`, of which the trainer waited `still_s` for its batch."""
        if still_s > MAX_STILL * step_s:
            if self._is_trial:
                self._patience = min(2 * self._patience, MAX_PATIENCE)
            self.steps = min(self.steps + 1, self.bound)
            self._num_calm, self._is_trial = 0, False
            return
        self._num_calm += 1
        if self._num_calm >= self._patience and self.steps > 1:
            self.steps -= 1
            self._num_calm, self._is_trial = 0, True
