"""Six constants from published figures, by the least mean error of logarithms; deterministic."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from scipy.optimize import minimize

from benchmarks.hex.published import Point
from benchmarks.hex.replay import Replay, Six

START = Six(0.15, 0.06, 0.10, 0.04, 0.5, 200.0)
NUM_STARTS = 4
"""Splits by whole nodes make the error jump, so the search begins at several places."""


def fit(points: Sequence[Point]) -> Six:
    """What explains these figures best."""
    start = _numbers(START)
    starts = [start + np.random.default_rng(seed).normal(0, 0.4, len(start)) for seed in range(NUM_STARTS)]
    options = {"maxiter": 3000, "maxfev": 3000}
    found = [minimize(_error, one, args=(points,), method="Nelder-Mead", options=options) for one in starts]
    return _six(min(found, key=lambda result: result.fun).x)


def _error(numbers: np.ndarray, points: Sequence[Point]) -> float:
    six = _six(numbers)
    replays = {model: Replay(model, six) for model in {point.model for point in points}}
    errors = [abs(math.log(replays[point.model].predict(point.name) / point.value)) for point in points]
    return sum(errors) / len(errors)


def _numbers(six: Six) -> np.ndarray:
    """All are positive but the exponent."""
    positive = (six.h800_rollout, six.h20_rollout, six.h800_training, six.h20_training, six.link_passes)
    return np.array([*np.log(positive), six.width_exponent])


def _six(numbers: np.ndarray) -> Six:
    *positive, exponent = numbers
    h800_rollout, h20_rollout, h800_training, h20_training, link_passes = (float(np.exp(one)) for one in positive)
    return Six(h800_rollout, h20_rollout, h800_training, h20_training, float(exponent), link_passes)
