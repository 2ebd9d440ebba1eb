"""Advantages of a batch: group baselines, or generalised advantage estimation with a value head.

A group here is all answers of a batch to one prompt. It is identified by the prompt's id, never by position, so groups
may have different sizes and answers any order. With a baseline, an answer that is compared with no other, or only with
equal rewards, has advantage exactly 0: rounding noise must not become a signal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from offbeat.errors import UserError
from offbeat.rules.groups import EQUAL_WITHIN
from offbeat.trainer.packing import Sample

STD_FLOOR = 1e-6
"""Added to a standard deviation before dividing by it, as in the published GRPO implementations."""
Advantage = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""Function from rewards and group ids, one of each per answer, to one advantage per answer."""


@dataclass(frozen=True)
class GaeSettings:
    gamma: float = 1.0
    lam: float = 0.95
    value_coef: float = 0.1
    value_clip: float = 0.2


@dataclass(frozen=True)
class Credit:
    """Advantages of a batch: one array for each sample, with one number per response token."""

    advantages: tuple[np.ndarray, ...]
    returns: tuple[np.ndarray, ...] | None
    """Targets of the value head, one array for each sample; None without a value head."""
    signal_share: float
    """Share of samples with an advantage other than 0 at any token."""


def credit(
    samples: Sequence[Sample],
    advantage: Advantage,
    settings: GaeSettings | None,
    values: Sequence[np.ndarray | None],
    *,
    recalls_siblings: bool = False,
) -> Credit:
    """Computes a batch's advantages. With `settings`, GAE computes one per token from the value head's `values`.
    Otherwise `advantage` computes one per answer. With `recalls_siblings`, `advantage` also gets the rewards of answers
    to the same prompts that are not in the batch (`Sample.earlier`)."""
    if settings is None:
        found = _checked(advantage, samples, recalls_siblings)
        by_token = tuple(np.full(s.num_tokens, a, np.float32) for s, a in zip(samples, found, strict=True))
        return Credit(by_token, None, float(np.mean(found != 0)) if len(found) else 0.0)
    estimates = []
    for sample, guessed in zip(samples, values, strict=True):
        assert guessed is not None, "this is a bug: a sample has no values from the value head"
        earned = rewards_by_token(sample.num_tokens, sample.rewards or [(-1, sample.reward)])
        estimates.append(estimate(earned, guessed, sample.mask, settings.gamma, settings.lam))
    raw, returns = [a for a, _ in estimates], tuple(r for _, r in estimates)
    advantages = tuple(whitened(raw, [sample.mask for sample in samples]))
    return Credit(advantages, returns, float(np.mean([a.any() for a in advantages])) if advantages else 0.0)


def _checked(advantage: Advantage, samples: Sequence[Sample], recalls_siblings: bool) -> np.ndarray:
    """Calls `advantage`, which may be a user's function, and checks its result. Returns one advantage per sample; see
    `credit` for `recalls_siblings`."""
    rewards = [sample.reward for sample in samples]
    prompts = [sample.prompt_id for sample in samples]
    if recalls_siblings:
        for prompt, earlier in {sample.prompt_id: sample.earlier for sample in samples}.items():
            rewards += earlier
            prompts += [prompt] * len(earlier)
    found = np.asarray(advantage(np.array(rewards, np.float64), np.array(prompts, np.int64)), np.float32)
    if found.shape != (len(rewards),):
        raise UserError(
            f"loss.advantage returned shape {found.shape} for {len(rewards)} answers; return one number for each answer"
        )
    return found[: len(samples)]


def group_normalised(rewards: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """GRPO: (reward - mean) / (std + 1e-6) within each group; std is the sample standard deviation (ddof = 1)."""
    return _by_group(rewards, groups, _normalised)


def group_centred(rewards: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """Dr.GRPO: reward - mean within each group."""
    return _by_group(rewards, groups, lambda values: values - values.mean())


def leave_one_out(rewards: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """RLOO: reward minus the mean reward of the other members of the group."""
    return _by_group(rewards, groups, lambda values: (values - values.mean()) * len(values) / (len(values) - 1))


def siblings_normalised(rewards: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """(reward - mean reward of the group's other members) / (std + 1e-6); std is the group's sample standard deviation.

    For runs that train on an answer before all answers to its prompt have rewards. The scale of these advantages does
    not depend on the number of rewards so far. GRPO subtracts the mean of all rewards so far, including the answer's
    own. With two rewards, that halves the advantage. Short answers get their rewards first, so GRPO would weaken
    them."""
    return _by_group(rewards, groups, lambda values: _normalised(values) * len(values) / (len(values) - 1))


def batch_normalised(rewards: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """REINFORCE++: (reward - mean) / (std + 1e-6) over the whole batch, regardless of groups."""
    return _by_group(rewards, np.zeros(len(rewards), np.int64), _normalised)


def _normalised(values: np.ndarray) -> np.ndarray:
    return (values - values.mean()) / (values.std(ddof=1) + STD_FLOOR)


def _by_group(rewards: np.ndarray, groups: np.ndarray, rule: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    rewards = np.asarray(rewards, np.float64)
    advantages = np.zeros_like(rewards)
    for members in _members(groups):
        values = rewards[members]
        is_equal = np.ptp(values) <= EQUAL_WITHIN  # False also for NaN, which the step refuses
        if len(members) > 1 and not is_equal:
            advantages[members] = rule(values)
    return advantages.astype(np.float32)


def _members(groups: np.ndarray) -> Iterator[np.ndarray]:
    """Iterates over the groups; yields the indices of each group's answers."""
    order = np.argsort(groups, kind="stable")
    starts = np.flatnonzero(np.diff(np.asarray(groups)[order])) + 1
    return iter(np.split(order, starts)) if len(order) else iter(())


ADVANTAGES: dict[str, Advantage] = {
    "group": group_normalised,
    "mean": group_centred,
    "leave_one_out": leave_one_out,
    "siblings": siblings_normalised,
    "batch": batch_normalised,
}


def rewards_by_token(num_tokens: int, parts: Iterable[tuple[int, float]]) -> np.ndarray:
    """Returns the reward at each response token. `parts` are (position, value) pairs; -1 stands for the last token."""
    rewards = np.zeros(num_tokens, np.float64)
    for position, value in parts:
        if num_tokens:
            rewards[min(position, num_tokens - 1)] += value
    return rewards


def estimate(
    rewards: np.ndarray, values: np.ndarray, mask: np.ndarray, gamma: float, lam: float
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the GAE advantages and the returns (the value head's targets) of one response, one number per token.

    Only tokens where `mask` is True, those trained on, are actions; other tokens get 0 in both results. A reward at a
    token outside `mask` (given by an environment, or too old) is credited to the trained token before it. The value
    after the last token is 0.
    """
    advantages, returns = np.zeros(len(rewards), np.float32), np.zeros(len(rewards), np.float32)
    carried, next_value, earned = 0.0, 0.0, 0.0
    for t in range(len(rewards) - 1, -1, -1):
        earned += float(rewards[t])
        if not mask[t]:
            continue
        value = float(values[t])
        carried = earned + gamma * next_value - value + gamma * lam * carried
        advantages[t], returns[t] = carried, carried + value
        next_value, earned = value, 0.0
    return advantages, returns


def whitened(advantages: Sequence[np.ndarray], masks: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Returns the advantages, shifted and scaled to mean 0 and standard deviation 1 over the tokens in `masks`; 0 at
    other tokens."""
    trained = np.concatenate([a[m] for a, m in zip(advantages, masks, strict=True)]) if advantages else np.zeros(0)
    if len(trained) < 2 or np.ptp(trained) <= EQUAL_WITHIN:
        return [np.zeros_like(a) for a in advantages]
    mean, std = float(trained.mean(dtype=np.float64)), float(trained.std(ddof=1, dtype=np.float64))
    return [((a - mean) / (std + STD_FLOOR) * m).astype(np.float32) for a, m in zip(advantages, masks, strict=True)]
