"""How far two outcomes are apart, relative to TRL's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.loss_parity.ours import Outcome

CANCELLED = 0.05
"""A loss adds terms of both signs; with GRPO's advantages and one update it is 0 but for rounding. One that is less
than this share of its gradient's absolute sum is compared with that sum: rounding is relative to the terms."""


@dataclass(frozen=True)
class Gap:
    loss: float
    gradient: float
    advantages: float

    @property
    def worst(self) -> float:
        return max(self.loss, self.gradient, self.advantages)


def gap(ours: Outcome, theirs: Outcome) -> Gap:
    mine, other = (np.concatenate(outcome.gradients) for outcome in (ours, theirs))
    size = float(np.abs(other).sum())
    scale = size if abs(theirs.loss) < CANCELLED * size else abs(theirs.loss)
    return Gap(
        loss=_relative(abs(ours.loss - theirs.loss), scale),
        gradient=_relative(float(np.abs(mine - other).max()), float(np.abs(other).max())),
        advantages=_relative(
            float(np.abs(ours.advantages - theirs.advantages).max()), float(np.abs(theirs.advantages).max())
        ),
    )


def worst(gaps: Sequence[Gap]) -> Gap:
    return Gap(*(max(getattr(gap, figure) for gap in gaps) for figure in ("loss", "gradient", "advantages")))


def _relative(difference: float, scale: float) -> float:
    """Infinite where only one of two things is 0, and NaN, which no target bounds, where one is not a number."""
    if scale == 0:
        return 0.0 if difference == 0 else float("inf")
    return difference / scale
