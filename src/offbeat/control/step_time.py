"""How long an engine's steps take, learnt from how long they took.

Duty: one decode step of B rows that read `context` tokens of keys and values in all takes base_s + per_row_s·B +
per_token_s·context, and each prefilled token prefill_s. `StepTimeFit` learns the four figures by recursive least
squares with forgetting from sums over intervals of any length, and says how far off its predictions were lately.

Guarantees: no figure is negative; a stall of the machine moves them little, a lasting change moves them within some
twenty observations; there is no model before the observations determine one.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from dataclasses import dataclass
from statistics import median

import numpy as np

MIN_OBSERVATIONS = 6
"""Four unknowns, and something left over to see whether they explain anything."""
FORGET = 0.98
"""Of the weight of an observation with each later one: fifty count."""
FORGET_FAST = 0.85
BAD = 0.15
"""While predictions are off by this much, what is old is forgotten faster: the machine is not what it was."""
NUM_RECENT = 15
"""Predictions whose median error is reported: up to seven stalls in a row do not show."""
MIN_SECONDS = 1e-6
BLOCK, NUM_BLOCKS = 12, 3
"""Intervals whose predictions are judged together, and how many such blocks are remembered."""
ROWS = np.array([[1.0, 0.0, 0.0, 0.0], [0.0, 1.0, 0.0, 1.0]])
"""From four figures to two: a step's own, and that of each row, prefilled tokens among them."""
MAX_SCALED_ERROR = 0.25
"""Of the figure that is known least, in parts of all the time: beyond it two figures cannot be told apart yet."""
MIN_NOISE = 0.01
"""Clocks and schedulers are no better than this, however well few observations happen to agree."""
OUTLIER = 3.0
"""Errors larger than this many typical ones count for less, in proportion."""
MIN_OUTLIER = 0.1
PRIOR = 0.1
"""How strongly prefill_s is drawn to per_row_s, in observations: a prefilled token does a row's arithmetic. It decides
only where next to nothing was prefilled."""


@dataclass(frozen=True, slots=True)
class StepTime:
    """What steps take; see the module."""

    base_s: float
    per_row_s: float
    per_token_s: float
    prefill_s: float

    def seconds(
        self, num_steps: float, num_rows: float, num_context_tokens: float, num_prefilled_tokens: float = 0
    ) -> float:
        """What so many steps take together; rows and context are sums over the steps."""
        decode_s = self.base_s * num_steps + self.per_row_s * num_rows + self.per_token_s * num_context_tokens
        return decode_s + self.prefill_s * num_prefilled_tokens

    def rate(self, rows: float, mean_context: float) -> float:
        """Tokens a second with so many rows always running."""
        step_s = self.seconds(1, rows, rows * mean_context)
        return rows / step_s if step_s > 0 else math.inf

    def knee(self, share: float, mean_context: float) -> float:
        """Rows that reach this share of the rate that no number of rows exceeds."""
        row_s = self.per_row_s + self.per_token_s * mean_context
        return share / (1 - share) * self.base_s / row_s if row_s > 0 else math.inf

    def spread(self, num_engines: int) -> StepTime:
        """Of so many engines that share all rows evenly, seen as one."""
        return StepTime(
            self.base_s,
            self.per_row_s / num_engines,
            self.per_token_s / num_engines,
            self.prefill_s / num_engines,
        )


@dataclass(frozen=True, slots=True)
class Timing:
    """What an engine did in an interval, and how long it was busy with it."""

    num_steps: int
    num_rows: int
    """Summed over the steps."""
    num_context_tokens: int
    """Really read, summed over the steps: rows times the longest context where the engine pads."""
    num_prefilled_tokens: int
    seconds: float


class StepTimeFit:
    """One engine's step time; see the module. Report every interval; `model` is what they say together."""

    def __init__(self) -> None:
        self.num_observations = 0
        self._gram, self._moment = np.zeros((4, 4)), np.zeros(4)
        """Of observations divided by their seconds, so that relative errors are what is made small."""
        self._num_counted = 0.0
        self._errors: deque[float] = deque(maxlen=NUM_BLOCKS * BLOCK)
        """Of predictions made before their intervals were seen: the log of predicted over actual seconds."""
        self._first: list[np.ndarray] = []
        """The observations before the first fit, which are weighed again once it says which of them are odd."""
        self._figures: np.ndarray | None = None

    @property
    def error(self) -> float:
        """How far recent predictions were off, relatively: the median over blocks of intervals of what those of a block
        have in common. Whether a round is predicted well matters, not whether a tenth of a second is."""
        if len(self._errors) < BLOCK:
            return self._noise
        whole = np.array(self._errors)[len(self._errors) % BLOCK :].reshape(-1, BLOCK)
        return float(np.median(np.abs(np.median(whole, axis=1))))

    @property
    def _noise(self) -> float:
        """The median error of single intervals."""
        return median(map(abs, list(self._errors)[-NUM_RECENT:])) if self._errors else math.inf

    @property
    def model(self) -> StepTime | None:
        """None until the observations tell the figures apart: all of them or, where noise hides what context costs,
        what a row costs from what a step does."""
        if self._figures is None:
            return None
        if self._is_determined(self._gram[:3, :3]):  # what was never prefilled is told by the prior
            return StepTime(*(float(figure) for figure in self._figures))
        gram, moment = ROWS @ self._gram @ ROWS.T, ROWS @ self._moment
        if not self._is_determined(gram):
            return None
        base_s, per_row_s = (float(figure) for figure in _least_squares(gram, moment))
        return StepTime(base_s, per_row_s, 0.0, per_row_s)

    def observe(self, timing: Timing) -> None:
        if timing.seconds < MIN_SECONDS or timing.num_steps + timing.num_prefilled_tokens == 0:
            return  # neither an idle interval nor a tick of the clock says anything about steps
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
        """Weighs the first observations by how well those of middling error agree, a few times over."""
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
        """The figures, none below zero, that make the squared relative errors least."""
        scale = np.sqrt(np.diag(self._gram).clip(min=0))
        row_scale = scale[1] or 1.0
        like_a_row = np.array([0.0, 1.0, 0.0, -1.0])
        gram = self._gram + PRIOR**2 * row_scale**2 / self._num_counted * np.outer(like_a_row, like_a_row)
        unit = np.where(scale > 0, scale, row_scale)
        gram, moment = gram / np.outer(unit, unit), self._moment / unit
        gram += 1e-12 * np.eye(4)  # two columns that are one share its figure instead of blowing it up
        return _least_squares(gram, moment) / unit

    def _is_determined(self, gram: np.ndarray) -> bool:
        """Whether the standard error of the figure that is known least is small enough."""
        scale = np.sqrt(np.diag(gram))
        if not scale.all():
            return False
        correlation = gram / np.outer(scale, scale)
        noise = max(self._noise, MIN_NOISE)
        return float(np.linalg.eigvalsh(correlation)[0]) * self._num_counted >= (noise / MAX_SCALED_ERROR) ** 2


def _error(row: np.ndarray, figures: np.ndarray) -> float:
    """How far a prediction was off: the log of predicted over actual seconds."""
    return math.log(max(float(row @ figures), 1e-9))


def _weight(error: float, typical: float) -> float:
    limit = max(OUTLIER * typical, MIN_OUTLIER)
    return min(1.0, limit / error) if error > 0 else 1.0


def _least_squares(gram: np.ndarray, moment: np.ndarray) -> np.ndarray:
    """Least squares without negative figures: the best of all choices of figures that are zero."""
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
            break  # nothing was negative to begin with
    return best
