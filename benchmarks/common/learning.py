"""Learning curves by held-out reward, and the samples needed to reach a threshold.

All weights are judged in the same way, outside any timed part: transformers generates answers to the same held-out
problems at temperature 1, with the same random numbers each time.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from offbeat.data.arithmetic import Arithmetic
from offbeat.errors import OffbeatError
from offbeat.model.loading import load_model, load_state, load_tokenizer
from offbeat.rewards.verifiers import number

NUM_PROBLEMS = 400
SAMPLES_PER_PROBLEM = 2
WAY = 0.8
"""Position of the threshold between the first held-out reward (0) and the reward that both systems reach (1)."""
SMOOTHED = 3
"""Number of neighbouring points of a curve that are averaged before its crossing of the threshold is determined."""


class HeldOut:
    """Judges weights of one model."""

    def __init__(
        self,
        model: str,
        tail: float,
        max_new_tokens: int,
        *,
        level: int = 2,
        num_problems: int = NUM_PROBLEMS,
        samples_per_problem: int = SAMPLES_PER_PROBLEM,
    ):
        self.model: Any = load_model(model, torch.float32, torch.device("cpu"))
        self.tokenizer = load_tokenizer(model)
        self.problems = Arithmetic(level=level, tail=tail).held_out(num_problems)
        self.max_new_tokens, self.samples_per_problem = max_new_tokens, samples_per_problem

    def reward(self, weights: Mapping[str, Tensor] | None = None) -> float:
        """Returns the mean held-out reward of the weights (None: of those loaded before)."""
        if weights is not None:
            load_state(self.model, weights)
        prompts = [str(problem.prompt) for problem in self.problems]
        padded = self.tokenizer(prompts, padding=True, padding_side="left", return_tensors="pt")
        torch.manual_seed(0)
        with torch.inference_mode():
            tokens = self.model.generate(
                **padded,
                max_new_tokens=self.max_new_tokens,
                num_return_sequences=self.samples_per_problem,
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                use_cache=True,
            )
        texts = self.tokenizer.batch_decode(tokens[:, padded["input_ids"].shape[1] :], skip_special_tokens=True)
        answers = [problem.answer for problem in self.problems for _ in range(self.samples_per_problem)]
        return float(np.mean([number(text, answer) for text, answer in zip(texts, answers, strict=True)]))


@dataclass(frozen=True)
class Curve:
    """Held-out reward by number of samples trained; the first point is before any training."""

    samples: Sequence[float]
    rewards: Sequence[float]

    @property
    def start(self) -> float:
        return self.rewards[0]

    @property
    def highest(self) -> float:
        """Highest smoothed reward, which the run has certainly reached."""
        return float(smoothed(self.rewards).max())

    def crossing(self, threshold: float) -> float:
        """Samples until the smoothed reward first reaches a threshold above its start, interpolated linearly."""
        smooth = smoothed(self.rewards)
        reached = np.flatnonzero(smooth >= threshold)
        if len(reached) == 0 or reached[0] == 0:
            raise OffbeatError(
                f"held-out rewards {rounded(self.rewards)} do not cross {threshold:.3f}: train for longer"
            )
        i = reached[0]
        return float(np.interp(threshold, smooth[i - 1 : i + 1], self.samples[i - 1 : i + 1]))


def smoothed(values: Sequence[float]) -> np.ndarray:
    """Returns a centred moving mean. It is narrower near both ends, so the first and the last point do not change."""
    half = SMOOTHED // 2
    reach = [min(half, i, len(values) - 1 - i) for i in range(len(values))]
    return np.array([np.mean(values[i - r : i + r + 1]) for i, r in enumerate(reach)])


def common_threshold(curves: Sequence[Curve]) -> float:
    """Returns a reward that every curve reaches: at the share `WAY` of the way from the mean first reward to the lowest
    of the curves' highest rewards."""
    start = float(np.mean([curve.start for curve in curves]))
    return start + WAY * (min(curve.highest for curve in curves) - start)


def rounded(values: Sequence[float], digits: int = 3) -> list[float]:
    return [round(float(value), digits) for value in values]


T_95 = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45}
"""Student's t for a two-sided 95 % interval, by the number of values."""


@dataclass(frozen=True)
class Size:
    """How much is trained and judged."""

    seeds: int
    steps: int
    save_every: int
    prompts: int


@dataclass(frozen=True)
class Learned:
    """A run's learning curve, and the age of its data."""

    curve: Curve
    max_staleness: int
    """Age in steps of the oldest token trained."""

    def needed(self, threshold: float) -> float:
        """Samples until the held-out reward reaches the threshold; all samples if it never does."""
        try:
            return self.curve.crossing(threshold)
        except OffbeatError:
            return float(self.curve.samples[-1])


def threshold_of(in_order: Sequence[Learned]) -> float:
    """Returns the threshold: at the share `WAY` of the way from the first reward to the highest reward of training
    without staleness."""
    start = statistics.fmean(learned.curve.start for learned in in_order)
    return start + WAY * (statistics.median(learned.curve.highest for learned in in_order) - start)


def interval(ratios: Sequence[float]) -> tuple[float, float] | None:
    """Returns a 95 % confidence interval of the geometric mean of ratios; None for a number of ratios not in `T_95`."""
    if len(ratios) not in T_95:
        return None
    logs = [math.log(ratio) for ratio in ratios]
    half = T_95[len(logs)] * statistics.stdev(logs) / math.sqrt(len(logs))
    centre = statistics.fmean(logs)
    return round(math.exp(centre - half), 3), round(math.exp(centre + half), 3)
