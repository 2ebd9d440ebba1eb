"""Gaps between two outcomes, relative to TRL's outcome."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.loss_parity.ours import Outcome

CANCELLED = 0.05
"""Share of the sum of absolute gradients below which the gap of a loss is taken relative to that sum. A loss adds terms
of both signs, which nearly cancel for GRPO with one update, while rounding errors are relative to the terms."""


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
    """Returns `difference` / `scale`: infinite if only `scale` is 0, and NaN (which misses every target) if one of them
    is NaN."""
    if scale == 0:
        return 0.0 if difference == 0 else float("inf")
    return difference / scale
