"""How fast a system learns, in samples: the held-out reward of its weights along the way, and when it is high enough.

All weights are judged alike and outside any timed part: by transformers itself, at temperature 1, on the same held-out
problems, with the same random numbers each time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from offbeat.errors import OffbeatError
from offbeat.model.loading import load_model, load_state, load_tokenizer
from offbeat.reward.verifiers import number
from offbeat.tasks.arithmetic import Arithmetic

NUM_PROBLEMS = 400
SAMPLES_PER_PROBLEM = 2
WAY = 0.8
"""The threshold lies this share of the way from the first held-out reward to what both systems reach."""
SMOOTHED = 3
"""Points of a curve that are averaged before its crossing is looked for."""


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
        """The mean held-out reward of the weights; without any, of the model as it was loaded."""
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
    """Held-out reward by samples trained, the first point before any training."""

    samples: Sequence[float]
    rewards: Sequence[float]

    @property
    def start(self) -> float:
        return self.rewards[0]

    @property
    def highest(self) -> float:
        """Of the smoothed rewards: what it has certainly reached."""
        return float(smoothed(self.rewards).max())

    def crossing(self, threshold: float) -> float:
        """Samples until the smoothed reward first reaches a threshold above its start, on lines between points."""
        smooth = smoothed(self.rewards)
        reached = np.flatnonzero(smooth >= threshold)
        if len(reached) == 0 or reached[0] == 0:
            raise OffbeatError(
                f"held-out rewards {rounded(self.rewards)} do not cross {threshold:.3f}: train for longer"
            )
        i = reached[0]
        return float(np.interp(threshold, smooth[i - 1 : i + 1], self.samples[i - 1 : i + 1]))


def smoothed(values: Sequence[float]) -> np.ndarray:
    """A centred moving mean; at both ends over the points that there are, so the first point stays what it is."""
    half = SMOOTHED // 2
    reach = [min(half, i, len(values) - 1 - i) for i in range(len(values))]
    return np.array([np.mean(values[i - r : i + r + 1]) for i, r in enumerate(reach)])


def common_threshold(curves: Sequence[Curve]) -> float:
    """A reward that every curve reaches: `WAY` of the way from where they start to the lowest of their heights."""
    start = float(np.mean([curve.start for curve in curves]))
    return start + WAY * (min(curve.highest for curve in curves) - start)


def rounded(values: Sequence[float], digits: int = 3) -> list[float]:
    return [round(float(value), digits) for value in values]
