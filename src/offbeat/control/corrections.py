"""By how much predictions are wrong, and where.

Duty: let the error that a model always makes cancel. A model that is wrong by the same share everywhere still ranks
rightly; one that flatters large factors does not. So what counts is how far the errors near one factor lie from those
of all rounds, and only as far as many rounds say so.

Guarantees: nothing is corrected before rounds at different factors were seen; rounds at one factor alone never move it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

FORGET = 0.95
WIDTH = 0.25
"""Of a neighbourhood, in the log of the factor."""
DOUBT = 10.0
"""Rounds that say nothing is wrong here: a round by itself is off by a tenth or two."""
NUM_RECENT = 8


class Corrections:
    """Of the log of predicted rates, one a factor; see the module."""

    def __init__(self, factors: Sequence[float]):
        logs = np.log(factors)
        self._near = np.exp(-0.5 * ((logs[:, None] - logs) / WIDTH) ** 2)
        self._weights, self._sums = np.zeros(len(logs)), np.zeros(len(logs))
        self._recent: deque[float] = deque(maxlen=NUM_RECENT)

    @property
    def error(self) -> float:
        """Of recent rounds together; 0 before there are any."""
        return float(abs(np.expm1(np.mean(self._recent)))) if self._recent else 0.0

    @property
    def by_factor(self) -> np.ndarray:
        """What to add to the log of each factor's predicted rate; only differences mean anything."""
        if not self._weights.any():
            return np.zeros(len(self._weights))
        overall = self._sums.sum() / self._weights.sum()
        apart = self._near @ (self._sums - overall * self._weights)
        return apart / (self._near @ self._weights + DOUBT)

    def note(self, index: int, rate: float, predicted: float) -> None:
        """A round at this factor gave `rate` where `predicted` was expected."""
        error = float(np.log(rate / predicted))
        self._recent.append(error)
        self._weights *= FORGET
        self._sums *= FORGET
        self._weights[index] += 1
        self._sums[index] += error
