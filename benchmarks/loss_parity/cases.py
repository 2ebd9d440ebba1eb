"""What both systems are asked for: answers with drawn numbers, and algorithms as each system's own settings name them.

Every drawn number fits float32, in which Offbeat trains, so that TRL sees the very same ones in float64.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import numpy as np

MAX_NEW_TOKENS = 40
"""What Dr.GRPO divides by: more than any answer's length, and than the padded width."""
KL_COEF = 0.1
NORMALISED_AS_TRL = "benchmarks.loss_parity.ours:normalised_as_trl"
"""GRPO's advantage with TRL's 1e-4 beside the standard deviation, where Offbeat has 1e-6."""


@dataclass(frozen=True)
class Shape:
    num_groups: int
    group_size: int
    max_tokens: int


SHAPES = (Shape(4, 4, 12), Shape(2, 8, 32), Shape(6, 2, 5))
"""Groups are even in number, to be dealt to two updates, and equal in size, which TRL needs."""
SMALL = Shape(2, 3, 4)
"""For figures that are written down."""


@dataclass(frozen=True)
class Answer:
    """One sample; arrays have one number per response token."""

    group: int
    logprobs: np.ndarray
    start: np.ndarray
    """Log-probs at the step's start; those of now where a step has one update."""
    behaviour: np.ndarray
    reference: np.ndarray
    mask: np.ndarray
    reward: float


@dataclass(frozen=True)
class Algorithm:
    """One loss, as either system's settings say it."""

    name: str
    ours: Mapping[str, Any]
    """Of `[loss]`."""
    trl: Mapping[str, Any]
    """Of GRPOConfig."""
    variant: str = ""
    """What sets it apart from the same algorithm's usual form."""

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
"""How far the log-probs of now are from those at the step's start: GSPO's customary clip is about as narrow as `near`,
and `far` reaches every other bound. With one update they are the same, and neither system computes them twice."""
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
    """A comparison: the same answers through both systems, one update or two."""

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
        """The answers of each update: all of them, or those of the first and of the second half of the groups."""
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
        # Its KL term is weighed by the ratio unless told otherwise; a second pass over a batch is what needs a ratio.
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
"""KL and correction: nothing but the loss, and both terms at once."""


def cases(shapes: Sequence[Shape], num_seeds: int, terms: Sequence[tuple[bool, str]] = ALL_TERMS) -> Iterator[Case]:
    """Every algorithm with every drift and these terms, each on answers of its own."""
    combinations = product(shapes, range(num_seeds), ALGORITHMS, DRIFTS, terms)
    for seed, (shape, _, algorithm, drift, (kl, correction)) in enumerate(combinations):
        yield Case(algorithm, drift, kl, correction, draw(shape, drift, seed))


def draw(shape: Shape, drift: str, seed: int) -> list[Answer]:
    """Groups of right and wrong answers, groups of graded ones, and one without a difference; tokens that are not
    trained on here and there, and one answer of nothing else."""
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
