"""Credit: each token's advantage, from a batch's rewards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from offbeat.errors import UserError
from offbeat.learn import gae
from offbeat.learn.advantages import Advantage
from offbeat.learn.samples import Sample


@dataclass(frozen=True)
class GaeSettings:
    gamma: float = 1.0
    lam: float = 0.95
    value_coef: float = 0.1
    value_clip: float = 0.2


@dataclass(frozen=True)
class Credit:
    """One array per sample, one number per response token."""

    advantages: tuple[np.ndarray, ...]
    returns: tuple[np.ndarray, ...] | None
    """What a value head should have said; None without one."""
    signal_share: float
    """Share of samples whose advantage is not 0."""


def credit(
    samples: Sequence[Sample],
    advantage: Advantage,
    settings: GaeSettings | None,
    values: Sequence[np.ndarray | None],
    *,
    recalls_siblings: bool = False,
) -> Credit:
    """The advantages of a batch: one for all tokens of an answer, or with a value head one for each. Siblings that are
    not in the batch are recalled by their rewards, where that is asked for."""
    if settings is None:
        found = _checked(advantage, samples, recalls_siblings)
        by_token = tuple(np.full(s.num_tokens, a, np.float32) for s, a in zip(samples, found, strict=True))
        return Credit(by_token, None, float(np.mean(found != 0)) if len(found) else 0.0)
    estimates = []
    for sample, guessed in zip(samples, values, strict=True):
        assert guessed is not None, "advantages from a value head need its values"
        earned = gae.rewards_by_token(sample.num_tokens, sample.rewards or [(-1, sample.reward)])
        estimates.append(gae.estimate(earned, guessed, sample.mask, settings.gamma, settings.lam))
    raw, returns = [a for a, _ in estimates], tuple(r for _, r in estimates)
    advantages = tuple(gae.whitened(raw, [sample.mask for sample in samples]))
    return Credit(advantages, returns, float(np.mean([a.any() for a in advantages])) if advantages else 0.0)


def _checked(advantage: Advantage, samples: Sequence[Sample], recalls_siblings: bool) -> np.ndarray:
    """Advantages as a function gave them, which may be the user's own. To the function a sibling that is recalled is an
    answer like others; what it says of it is not needed."""
    rewards = [sample.reward for sample in samples]
    prompts = [sample.prompt_id for sample in samples]
    if recalls_siblings:
        for prompt, earlier in {sample.prompt_id: sample.earlier for sample in samples}.items():
            rewards += earlier
            prompts += [prompt] * len(earlier)
    found = np.asarray(advantage(np.array(rewards, np.float64), np.array(prompts, np.int64)), np.float32)
    if found.shape != (len(rewards),):
        raise UserError(
            f"loss.advantage: gave shape {found.shape} for {len(rewards)} answers; one number each is wanted"
        )
    return found[: len(samples)]
