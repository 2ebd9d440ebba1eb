"""By how much predictions are wrong, and where.

Duty: let the error that a model always makes cancel. A model that is wrong by the same share everywhere still ranks
rightly; one that flatters large factors does not. Errors are taken to be the sum of one that all factors have in common
and one that changes smoothly with the factor, and both are told from what rounds gave by Gaussian process regression: a
round says much of its own factor, something of its neighbours, and what all share. Errors are of sums over rounds: one
that costs nothing, because its batch was there already, follows one that paid for both.

Guarantees: without rounds nothing is corrected, and a single one corrects next to nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

FORGET = 0.98
WIDTH = 0.4
"""Of a neighbourhood, in the log of the factor."""
COMMON, OWN, NOISE = 0.2, 0.15, 0.3
"""Standard deviations of the log of a rate over its prediction: of all factors together, of one, and of one round."""
NUM_RECENT = 10


class Corrections:
    """Of the logs of predicted rates, one a factor; see the module."""

    def __init__(self, factors: Sequence[float]):
        logs = np.log(factors)
        self._prior = COMMON**2 + OWN**2 * np.exp(-0.5 * ((logs[:, None] - logs) / WIDTH) ** 2)
        self._num_rounds = np.zeros(len(logs))
        self._tokens, self._expected = np.zeros(len(logs)), np.zeros(len(logs))
        self._recent: deque[tuple[float, float]] = deque(maxlen=NUM_RECENT)

    @property
    def error(self) -> float:
        """How far predictions were off over recent rounds together, relatively; 0 before there are any."""
        tokens, expected = (sum(column) for column in zip((0.0, 0.0), *self._recent, strict=True))
        return abs(tokens / expected - 1) if expected else 0.0

    @property
    def by_factor(self) -> np.ndarray:
        """What to add to the log of each factor's predicted rate."""
        seen = np.flatnonzero(self._num_rounds)
        errors = np.log(self._tokens[seen] / self._expected[seen])
        spread = self._prior[np.ix_(seen, seen)] + np.diag(NOISE**2 / self._num_rounds[seen])
        return self._prior[:, seen] @ np.linalg.solve(spread, errors)

    def note(self, index: int, tokens: float, seconds: float, predicted: float, predicted_s: float) -> None:
        """A round gave so many tokens in so many seconds, where `predicted` a second and `predicted_s` were expected.

        It counts for no more than the part of an expected round that it took: cheap ones come in rows.
        """
        self._recent.append((tokens, predicted * seconds))
        part = min(seconds / predicted_s, 1.0)
        for sums, value in ((self._num_rounds, part), (self._tokens, tokens), (self._expected, predicted * seconds)):
            sums *= FORGET
            sums[index] += value
