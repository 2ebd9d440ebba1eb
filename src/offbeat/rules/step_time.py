"""Times of engines' decode steps, learnt from measured intervals.

A decode step takes base_s + per_row_s × rows (running answers) + per_token_s × tokens of context. Each prefilled token
takes prefill_s. `StepTimeFit` learns these four coefficients by recursive least squares with forgetting. `FleetFit`
treats several engines as one: workers pull tasks when they have room, so rows spread about evenly over the engines,
which all decode at the same time.

Guarantees: no coefficient is negative. A stall of the machine changes the coefficients little; a lasting change of its
speed changes them within about twenty observations. Engines that have left or have no model yet do not count.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median

import numpy as np

MIN_OBSERVATIONS = 6
"""Observations before the first fit: four for the four coefficients, and two more to see whether the model fits."""
FORGET = 0.98
"""Factor on the weight of earlier observations at each new one, so that about fifty observations count."""
FORGET_FAST = 0.85
BAD = 0.15
"""Prediction error above which the machine has probably changed, and old observations are forgotten faster."""
NUM_RECENT = 15
"""Number of latest predictions whose median error is taken, so that up to seven stalls do not matter."""
MIN_SECONDS = 1e-6
BLOCK, NUM_BLOCKS = 12, 3
"""Number of intervals whose predictions are judged together as a block, and number of blocks kept."""
ROWS = np.array([[1.0, 0.0, 0.0, 0.0], [0.0, 1.0, 0.0, 1.0]])
"""Matrix that reduces the four coefficients to two: seconds per decode step, and seconds per row or prefilled token."""
MAX_SCALED_ERROR = 0.25
"""Largest allowed standard error of the least certain coefficient, relative to the time; above this, two coefficients
cannot be told apart."""
MIN_NOISE = 0.01
"""Smallest relative noise assumed: clocks and schedulers are not better, however well a few observations agree."""
OUTLIER = 3.0
"""Observations whose error exceeds this multiple of the typical error get less weight, in proportion."""
MIN_OUTLIER = 0.1
PRIOR = 0.1
"""Weight, in observations, with which prefill_s is drawn towards per_row_s, because a prefilled token needs as much
arithmetic as a row. This matters only if almost nothing was prefilled."""


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of an engine's work: `base_s` per decode step, `per_row_s` per row (running answer) in the decode step,
    `per_token_s` per token of context that its rows read, and `prefill_s` per prefilled token."""

    base_s: float
    per_row_s: float
    per_token_s: float
    prefill_s: float

    def seconds(
        self, num_steps: float, num_rows: float, num_context_tokens: float, num_prefilled_tokens: float = 0
    ) -> float:
        """Returns the seconds of `num_steps` decode steps and of prefilling `num_prefilled_tokens`; rows and context
        tokens are sums over the decode steps."""
        decode_s = self.base_s * num_steps + self.per_row_s * num_rows + self.per_token_s * num_context_tokens
        return decode_s + self.prefill_s * num_prefilled_tokens


@dataclass(frozen=True, slots=True)
class Timing:
    """Work of an engine in an interval, and the seconds that it took; `num_steps` counts decode steps."""

    num_steps: int
    num_rows: int
    """Number of rows (running answers), summed over the decode steps."""
    num_context_tokens: int
    """Tokens of context actually read, summed over the decode steps; in each of them, an engine that pads reads number
    of rows × longest context."""
    num_prefilled_tokens: int
    seconds: float


class StepTimeFit:
    """Learns the step times of one engine from the measured intervals given to `observe`."""

    def __init__(self) -> None:
        self.num_observations = 0
        self._gram, self._moment = np.zeros((4, 4)), np.zeros(4)
        """Weighted sums for least squares. Each observation is divided by its seconds, to minimise relative errors."""
        self._num_counted = 0.0
        self._errors: deque[float] = deque(maxlen=NUM_BLOCKS * BLOCK)
        """Log of predicted over actual seconds for each interval, predicted before the interval was observed."""
        self._first: list[np.ndarray] = []
        """Observations kept for the first fit, which reduces the weight of outliers among them."""
        self._figures: np.ndarray | None = None

    @property
    def error(self) -> float:
        """Relative error of recent predictions: the median, over blocks of `BLOCK` intervals, of the absolute value of
        a block's median error. Errors of opposite sign cancel within a block, because only sums over many intervals
        must be predicted well."""
        if len(self._errors) < BLOCK:
            return self._noise
        whole = np.array(self._errors)[len(self._errors) % BLOCK :].reshape(-1, BLOCK)
        return float(np.median(np.abs(np.median(whole, axis=1))))

    @property
    def _noise(self) -> float:
        """Median relative error of the latest predictions of single intervals; infinite before the first one."""
        return median(map(abs, list(self._errors)[-NUM_RECENT:])) if self._errors else math.inf

    @property
    def model(self) -> StepTime | None:
        """Coefficients fitted so far; None while the observations do not determine them. If noise hides the cost of a
        context token, this cost is set to 0, and the cost of a prefilled token to that of a row."""
        if self._figures is None:
            return None
        if self._is_determined(self._gram[:3, :3]):  # without prefills the prior decides prefill_s
            return StepTime(*(float(figure) for figure in self._figures))
        gram, moment = ROWS @ self._gram @ ROWS.T, ROWS @ self._moment
        if not self._is_determined(gram):
            return None
        base_s, per_row_s = (float(figure) for figure in _least_squares(gram, moment))
        return StepTime(base_s, per_row_s, 0.0, per_row_s)

    def observe(self, timing: Timing) -> None:
        if timing.seconds < MIN_SECONDS or timing.num_steps + timing.num_prefilled_tokens == 0:
            return  # the engine was idle, or the interval is too short to measure
        work = (timing.num_steps, timing.num_rows, timing.num_context_tokens, timing.num_prefilled_tokens)
        row = np.array(work, float) / timing.seconds
        self.num_observations += 1
        if self._figures is None:
            self._first.append(row)
            if len(self._first) == MIN_OBSERVATIONS:
                self._fit_first()
            return
        error = _error(row, self._figures)
        self._add(row, _weight(abs(error), self._noise), FORGET if self.error <= BAD else FORGET_FAST)
        self._errors.append(error)
        self._figures = self._solve()

    def _fit_first(self) -> None:
        """Makes the first fit. Repeats it, each time with less weight on the outliers of the previous repetition."""
        weights = [1.0] * len(self._first)
        for _ in range(5):
            self._gram[:], self._moment[:], self._num_counted = 0, 0, 0.0
            for row, weight in zip(self._first, weights, strict=True):
                self._add(row, weight)
            self._figures = figures = self._solve()
            errors = [abs(_error(row, figures)) for row in self._first]
            weights = [_weight(error, median(errors)) for error in errors]
        self._first.clear()

    def _add(self, row: np.ndarray, weight: float, forget: float = FORGET) -> None:
        self._gram = forget * self._gram + weight * np.outer(row, row)
        self._moment = forget * self._moment + weight * row
        self._num_counted = forget * self._num_counted + 1

    def _solve(self) -> np.ndarray:
        """Returns the non-negative coefficients with the least squared relative error."""
        scale = np.sqrt(np.diag(self._gram).clip(min=0))
        row_scale = scale[1] or 1.0
        like_a_row = np.array([0.0, 1.0, 0.0, -1.0])
        gram = self._gram + PRIOR**2 * row_scale**2 / self._num_counted * np.outer(like_a_row, like_a_row)
        unit = np.where(scale > 0, scale, row_scale)
        gram, moment = gram / np.outer(unit, unit), self._moment / unit
        gram += 1e-12 * np.eye(4)  # equal columns share a coefficient instead of blowing up
        return _least_squares(gram, moment) / unit

    def _is_determined(self, gram: np.ndarray) -> bool:
        """Returns whether the observations can tell all coefficients apart: none has too large a standard error. `gram`
        is the weighted sum of the observations' outer products."""
        scale = np.sqrt(np.diag(gram))
        if not scale.all():
            return False
        correlation = gram / np.outer(scale, scale)
        noise = max(self._noise, MIN_NOISE)
        return float(np.linalg.eigvalsh(correlation)[0]) * self._num_counted >= (noise / MAX_SCALED_ERROR) ** 2


def _error(row: np.ndarray, figures: np.ndarray) -> float:
    """Returns log(predicted / actual seconds) for `row`, an interval's work per second, and coefficients `figures`."""
    return math.log(max(float(row @ figures), 1e-9))


def _weight(error: float, typical: float) -> float:
    limit = max(OUTLIER * typical, MIN_OUTLIER)
    return min(1.0, limit / error) if error > 0 else 1.0


def _least_squares(gram: np.ndarray, moment: np.ndarray) -> np.ndarray:
    """Returns the non-negative least-squares coefficients of the normal equations `gram` @ coefficients = `moment`. If
    the plain solution has a negative coefficient, tries every choice of coefficients that are zero."""
    best, least = np.zeros(len(moment)), 0.0
    for size in range(len(moment), 0, -1):
        for chosen in itertools.combinations(range(len(moment)), size):
            part = list(chosen)
            figures = np.linalg.solve(gram[np.ix_(part, part)], moment[part])
            loss = -float(moment[part] @ figures)
            if (figures >= 0).all() and loss < least:
                best, least = np.zeros(len(moment)), loss
                best[part] = figures
        if size == len(moment) and least < 0:
            break  # the unrestricted solution has no negative coefficient
    return best


class FleetFit:
    """Learns the step times of several engines, one fit per worker; `model` and `error` treat all engines as one."""

    def __init__(self) -> None:
        self._fits: dict[str, StepTimeFit] = {}

    def observe(self, worker: str, timings: Sequence[Timing]) -> None:
        fit = self._fits.setdefault(worker, StepTimeFit())
        for timing in timings:
            fit.observe(timing)

    def left(self, worker: str) -> None:
        self._fits.pop(worker, None)

    @property
    def model(self) -> StepTime | None:
        """Model of all engines treated as one; None while no engine has a model."""
        models = [fit.model for fit in self._fits.values()]
        known = [model for model in models if model is not None]
        if not known:
            return None
        return StepTime(
            fmean(model.base_s for model in known),
            _at_once([model.per_row_s for model in known]),
            _at_once([model.per_token_s for model in known]),
            _at_once([model.prefill_s for model in known]),
        )

    @property
    def error(self) -> float:
        """Median of the engines' prediction errors; infinite while no engine has a model."""
        errors = [fit.error for fit in self._fits.values() if fit.model is not None]
        return median(errors) if errors else math.inf


def _at_once(costs: Sequence[float]) -> float:
    """Returns the seconds per row or token of all engines working in parallel, from the seconds of each engine
    (`costs`); 0 if one of these is 0."""
    return 1 / sum(1 / cost for cost in costs) if all(cost > 0 for cost in costs) else 0.0
