"""The cases given to both systems: answers with random numbers, and algorithms in each system's own settings.

Every number fits float32, in which Offbeat trains, so that TRL gets exactly the same numbers in float64.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import numpy as np

MAX_NEW_TOKENS = 40
"""Length by which Dr.GRPO divides; larger than any answer and than the padded width."""
KL_COEF = 0.1
NORMALISED_AS_TRL = "benchmarks.loss_parity.ours:normalised_as_trl"
"""GRPO's advantage, but with 1e-4 added to the standard deviation, as in TRL; Offbeat adds 1e-6."""


@dataclass(frozen=True)
class Shape:
    num_groups: int
    group_size: int
    max_tokens: int


SHAPES = (Shape(4, 4, 12), Shape(2, 8, 32), Shape(6, 2, 5))
"""Shapes of the batches. The number of groups is even, because they are divided between two updates, and all groups
have the same size, which TRL needs."""
SMALL = Shape(2, 3, 4)
"""Shape of the batches whose figures are recorded in a file."""


@dataclass(frozen=True)
class Answer:
    """One sample; arrays have one number per response token."""

    group: int
    logprobs: np.ndarray
    start: np.ndarray
    """Log-probs at the step's start; equal to `logprobs` if a step has one update."""
    behaviour: np.ndarray
    reference: np.ndarray
    mask: np.ndarray
    reward: float


@dataclass(frozen=True)
class Algorithm:
    """One loss in the settings of each system."""

    name: str
    ours: Mapping[str, Any]
    """Keys of Offbeat's section `[loss]`."""
    trl: Mapping[str, Any]
    """Fields of TRL's GRPOConfig."""
    variant: str = ""
    """Difference from the usual form of the algorithm."""

    @property
    def label(self) -> str:
        return f"{self.name}, {self.variant}" if self.variant else self.name


ALGORITHMS = (
    Algorithm(
        "GRPO",
        {"name": "grpo", "advantage": NORMALISED_AS_TRL},
        {"loss_type": "grpo", "epsilon": 0.2, "scale_rewards": "group"},
    ),
    Algorithm(
        "GRPO",
        {"name": "grpo", "advantage": NORMALISED_AS_TRL, "dual_clip": 1.5},
        {"loss_type": "grpo", "epsilon": 0.2, "scale_rewards": "group", "delta": 1.5},
        variant="two-sided clip",
    ),
    Algorithm(
        "Dr.GRPO",
        {"name": "dr_grpo", "aggregate_tokens": MAX_NEW_TOKENS},
        {
            "loss_type": "dr_grpo",
            "epsilon": 0.2,
            "scale_rewards": "none",
            "max_completion_length": MAX_NEW_TOKENS,
        },
    ),
    Algorithm(
        "DAPO",
        {"name": "dapo", "advantage": NORMALISED_AS_TRL},
        {"loss_type": "dapo", "epsilon": 0.2, "epsilon_high": 0.28, "scale_rewards": "group"},
    ),
    Algorithm(
        "GSPO",
        {"name": "gspo", "advantage": NORMALISED_AS_TRL},
        {
            "loss_type": "grpo",
            "importance_sampling_level": "sequence",
            "epsilon": 3e-4,
            "epsilon_high": 4e-4,
            "scale_rewards": "group",
        },
    ),
    Algorithm(
        "GSPO",
        {"name": "gspo", "advantage": NORMALISED_AS_TRL, "clip_low": 0.2, "clip_high": 0.2},
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 0.2, "scale_rewards": "group"},
        variant="clip 0.2",
    ),
    Algorithm(
        "CISPO",
        {"name": "cispo", "advantage": NORMALISED_AS_TRL, "ratio_max": 5.0},
        {"loss_type": "cispo", "epsilon_high": 5.0, "scale_rewards": "group"},
    ),
)

DRIFTS = {"one update": None, "near": 0.003, "far": 1.0}
"""Standard deviation of the current log-probs from those at the step's start. `near` is about as wide as GSPO's usual
clip range, and `far` exceeds every other bound. With one update both are the same, and neither system computes them
twice."""
CORRECTIONS: Mapping[str, tuple[Mapping[str, Any], Mapping[str, Any]]] = {
    "none": ({}, {}),  # what a run that generates, then trains, has by itself
    "tis": (
        {"correction": "tis", "max_importance": 2.0},
        {
            "vllm_importance_sampling_mode": "token_truncate",
            "vllm_importance_sampling_clip_min": None,
            "vllm_importance_sampling_clip_max": 2.0,
        },
    ),
    "icepop": (
        {"correction": "icepop", "min_importance": 0.5, "max_importance": 5.0},
        {
            "vllm_importance_sampling_mode": "token_mask",
            "vllm_importance_sampling_clip_min": 0.5,
            "vllm_importance_sampling_clip_max": 5.0,
        },
    ),
}


@dataclass(frozen=True)
class Case:
    """A comparison of both systems on the same answers, with one update or two."""

    algorithm: Algorithm
    drift: str
    kl: bool
    correction: str
    answers: Sequence[Answer]
    further_ours: Mapping[str, Any] = field(default_factory=dict)
    further_trl: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.algorithm.label}, {self.drift}, {'k3' if self.kl else 'no'} KL, correction {self.correction}"

    @property
    def updates(self) -> list[list[int]]:
        """Indices of the answers of each update: all answers, or those of the first and the second half of groups."""
        if DRIFTS[self.drift] is None:
            return [list(range(len(self.answers)))]
        half = (max(answer.group for answer in self.answers) + 1) // 2
        late = [answer.group >= half for answer in self.answers]
        return [[i for i, is_late in enumerate(late) if is_late == wanted] for wanted in (False, True)]

    @property
    def ours(self) -> dict[str, Any]:
        kl = {"kl_coef": KL_COEF, "kl": "k3"} if self.kl else {}
        return {**self.algorithm.ours, **kl, **CORRECTIONS[self.correction][0], **self.further_ours}

    @property
    def trl(self) -> dict[str, Any]:
        # By default TRL multiplies its KL term by the ratio. TRL computes a ratio only for a second pass over a batch.
        kl = {"beta": KL_COEF, "use_bias_correction_kl": False} if self.kl else {"beta": 0.0}
        iterations = {"num_iterations": 1 if DRIFTS[self.drift] is None else 2}
        return {**self.algorithm.trl, **kl, **iterations, **CORRECTIONS[self.correction][1], **self.further_trl}

    @property
    def is_corrected(self) -> bool:
        return self.correction != "none"

    def part(self, chosen: Sequence[int]) -> list[Answer]:
        return [self.answers[i] for i in chosen]


ALL_TERMS = tuple(product((False, True), CORRECTIONS))
FEW_TERMS = ((False, "none"), (True, "tis"))
"""Pairs of KL and correction: the loss alone, and both terms at once."""


def cases(shapes: Sequence[Shape], num_seeds: int, terms: Sequence[tuple[bool, str]] = ALL_TERMS) -> Iterator[Case]:
    """Yields a case for every algorithm, drift and pair of terms, each with its own answers."""
    combinations = product(shapes, range(num_seeds), ALGORITHMS, DRIFTS, terms)
    for seed, (shape, _, algorithm, drift, (kl, correction)) in enumerate(combinations):
        yield Case(algorithm, drift, kl, correction, draw(shape, drift, seed))


def draw(shape: Shape, drift: str, seed: int) -> list[Answer]:
    """Draws answers. Some groups have rewards of 0 and 1, some graded rewards, and some equal rewards. Some tokens are
    masked, and one answer is masked altogether."""
    rng = np.random.default_rng(seed)
    answers = []
    for group in range(shape.num_groups):
        rewards = _rewards(rng, shape.group_size, kind=group % 3 if shape.num_groups > 2 else group)
        for member in range(shape.group_size):
            num_tokens = int(rng.integers(1, shape.max_tokens + 1))
            logprobs = -rng.exponential(1.0, num_tokens)
            start = logprobs + (DRIFTS[drift] or 0.0) * rng.standard_normal(num_tokens)
            behaviour = start + 0.7 * rng.standard_normal(num_tokens)
            reference = logprobs + 0.5 * rng.standard_normal(num_tokens)
            mask = rng.random(num_tokens) < 0.85
            if group == 0 and member == shape.group_size - 1:
                mask[:] = False
            drawn = {"logprobs": logprobs, "start": start, "behaviour": behaviour, "reference": reference}
            fitting: dict[str, Any] = {key: np.minimum(v, 0.0).astype(np.float32) for key, v in drawn.items()}
            answers.append(Answer(group=group, mask=mask, reward=float(rewards[member]), **fitting))
    return answers


def _rewards(rng: np.random.Generator, size: int, kind: int) -> np.ndarray:
    if kind == 0:
        return rng.permutation(np.arange(size) % 2).astype(np.float32)
    return rng.random(size).astype(np.float32) if kind == 1 else np.full(size, 0.5, np.float32)
