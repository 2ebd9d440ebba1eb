"""Fits six constants to published figures, by the mean squared error of logarithms; deterministic.

Errors are squared, because the minimum of absolute errors is flat: the held-out error then depended by a point on the
start of the search.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import astuple

import numpy as np
from scipy.optimize import OptimizeResult, minimize

from benchmarks.hex_replay.published import Point
from benchmarks.hex_replay.replay import Replay, Six

START = Six(0.2, 0.1, 0.10, 0.04, 1.0, 200.0)
NUM_STARTS = 4
"""Number of starting points of the search, which needs several, because splits by whole nodes make the error jump."""
SAME = 1e-4
"""Gain below which the search ends. A search may stall, so it is repeated from the best point until then."""


def fit(points: Sequence[Point]) -> Six:
    """Returns the constants that fit these figures best."""
    starts = [_numbers(START) + np.random.default_rng(seed).normal(0, 0.4, 6) for seed in range(NUM_STARTS)]
    found = min((_downhill(one, points) for one in starts), key=lambda result: result.fun)
    while (better := _downhill(found.x, points)).fun < found.fun * (1 - SAME):
        found = better
    return _six(found.x)


def _downhill(start: np.ndarray, points: Sequence[Point]) -> OptimizeResult:
    options = {"maxiter": 3000, "maxfev": 3000}
    return minimize(_error, start, args=(points,), method="Nelder-Mead", options=options)


def _error(numbers: np.ndarray, points: Sequence[Point]) -> float:
    six = _six(numbers)
    replays = {model: Replay(model, six) for model in {point.model for point in points}}
    errors = [math.log(replays[point.model].predict(point.name) / point.value) ** 2 for point in points]
    return sum(errors) / len(errors)


def _numbers(six: Six) -> np.ndarray:
    """All are positive."""
    return np.log(astuple(six))


def _six(numbers: np.ndarray) -> Six:
    return Six(*(float(one) for one in np.exp(numbers)))
