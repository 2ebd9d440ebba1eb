"""Known differences between the definitions of TRL and Offbeat, each with a formula from Offbeat's outcome to TRL's.

No setting of either system removes these differences, or they are defaults of TRL that Offbeat leaves out on purpose.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.loss_parity.cases import ALGORITHMS, KL_COEF, Answer, Case, Shape, draw
from benchmarks.loss_parity.ours import TRL_STD_FLOOR, Outcome
from offbeat.trainer.advantages import STD_FLOOR

GRPO, DAPO, CISPO = (next(a for a in ALGORITHMS if a.name == name) for name in ("GRPO", "DAPO", "CISPO"))
LOW_CAP = 0.28
NO_CAP = 1e9

Account = Callable[[Outcome, Sequence[Answer], Case], Outcome]
"""Computes TRL's expected outcome of an update from Offbeat's outcome, the update's answers and the case."""


@dataclass(frozen=True)
class Difference:
    name: str
    case: Case
    account: Account
    is_cut: bool = False
    """Whether TRL gets the whole batch and splits it into updates itself, instead of one batch for each update."""


def differences(shape: Shape) -> list[Difference]:
    return [
        Difference(
            "GRPO: added to the standard deviation, 1e-6 and 1e-4",
            Case(GRPO, "one update", False, "none", draw(shape, "one update", 1), {"advantage": "group"}),
            _std_floor,
        ),
        Difference(
            "KL: as it is, and times the ratio (TRL's default)",
            Case(DAPO, "far", True, "none", draw(shape, "far", 2), {}, {"use_bias_correction_kl": True}),
            _kl_by_ratio,
        ),
        Difference(
            "weight of a sequence: geometric mean, and product",
            Case(
                GRPO,
                "one update",
                False,
                "tis",
                draw(shape, "one update", 3),
                {"correction": "sequence_tis", "max_importance": NO_CAP},
                {
                    "vllm_importance_sampling_mode": "sequence_truncate",
                    "vllm_importance_sampling_clip_max": NO_CAP,
                },
            ),
            _product,
        ),
        Difference(
            "DAPO, two updates a batch: each one's tokens, and half the batch's",
            Case(DAPO, "far", False, "none", draw(shape, "far", 4)),
            _tokens_of_the_batch,
            is_cut=True,
        ),
        Difference(
            "CISPO: a cap of 5, and of 0.28",
            Case(CISPO, "one update", False, "none", draw(shape, "one update", 5), {}, {"epsilon_high": LOW_CAP}),
            lambda ours, answers, case: _scaled(ours, [LOW_CAP] * len(answers), LOW_CAP),
        ),
    ]


def _std_floor(ours: Outcome, answers: Sequence[Answer], case: Case) -> Outcome:
    """Scales every advantage by the ratio of the two divisors, standard deviation plus floor."""
    groups = np.array([answer.group for answer in answers])
    rewards = np.array([answer.reward for answer in answers])
    stds = np.array([rewards[groups == group].std(ddof=1) for group in groups])
    factors = (stds + STD_FLOOR) / (stds + TRL_STD_FLOOR)
    return replace(_scaled(ours, factors), advantages=ours.advantages * factors)


def _kl_by_ratio(ours: Outcome, answers: Sequence[Answer], case: Case) -> Outcome:
    """Replaces the KL term k3 by r k3, with the ratio r. Because r has a gradient too, the term's gradient 1 - e^x
    becomes r (k3 + 1 - e^x)."""
    num_trained = sum(int(answer.mask.sum()) for answer in answers)
    loss, gradients = ours.loss, []
    for gradient, answer in zip(ours.gradients, answers, strict=True):
        now, start, reference = (a.astype(np.float64) for a in (answer.logprobs, answer.start, answer.reference))
        x, ratio = reference - now, np.exp(now - start)
        k3, weight = np.exp(x) - x - 1, KL_COEF * answer.mask / num_trained
        loss += float((weight * (ratio - 1) * k3).sum())
        gradients.append(gradient + weight * (ratio * (k3 + 1 - np.exp(x)) - (1 - np.exp(x))))
    return replace(ours, loss=loss, gradients=gradients)


def _product(ours: Outcome, answers: Sequence[Answer], case: Case) -> Outcome:
    """Replaces the weight of a sequence, exp of the mean of its log-ratios, by exp of their sum."""
    factors = []
    for answer in answers:
        log_ratios = (answer.start.astype(np.float64) - answer.behaviour)[answer.mask]
        factors.append(float(np.exp(log_ratios.sum() - log_ratios.mean())) if len(log_ratios) else 1.0)
    return _scaled(ours, factors)


def _tokens_of_the_batch(ours: Outcome, answers: Sequence[Answer], case: Case) -> Outcome:
    own, whole = (sum(int(answer.mask.sum()) for answer in chosen) for chosen in (answers, case.answers))
    factor = own / (whole / len(case.updates))
    return _scaled(ours, [factor] * len(answers), factor)


def _scaled(ours: Outcome, factors: Sequence[float] | np.ndarray, of_loss: float | None = None) -> Outcome:
    """Multiplies every answer's gradient by its factor. Multiplies the loss by `of_loss`; if that is None, the loss is
    the sum of the gradients, as with a ratio of 1."""
    gradients = [gradient * factor for gradient, factor in zip(ours.gradients, factors, strict=True)]
    loss = sum(float(gradient.sum()) for gradient in gradients) if of_loss is None else ours.loss * of_loss
    return replace(ours, loss=loss, gradients=gradients)
