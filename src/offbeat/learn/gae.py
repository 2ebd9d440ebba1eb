"""Generalised advantage estimation: token by token, from rewards at their positions and a value head's guesses.

Only trained tokens are moments of choice; tokens in between (given by an environment, or too old) are passed over, and
what was earned at them belongs to the choice before. After the last token nothing more is to be expected.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from offbeat.control.settle import EQUAL_WITHIN
from offbeat.learn.advantages import STD_FLOOR


def rewards_by_token(num_tokens: int, parts: Iterable[tuple[int, float]]) -> np.ndarray:
    """Rewards as (position, value) laid out over a response; -1 stands for the last token."""
    rewards = np.zeros(num_tokens, np.float64)
    for position, value in parts:
        if num_tokens:
            rewards[min(position, num_tokens - 1)] += value
    return rewards


def estimate(
    rewards: np.ndarray, values: np.ndarray, mask: np.ndarray, gamma: float, lam: float
) -> tuple[np.ndarray, np.ndarray]:
    """Advantages and returns of one response; 0 where a token is not trained on."""
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
    """Advantages of a whole batch with mean 0 and standard deviation 1 over the trained tokens."""
    trained = np.concatenate([a[m] for a, m in zip(advantages, masks, strict=True)]) if advantages else np.zeros(0)
    if len(trained) < 2 or np.ptp(trained) <= EQUAL_WITHIN:
        return [np.zeros_like(a) for a in advantages]
    mean, std = float(trained.mean(dtype=np.float64)), float(trained.std(ddof=1, dtype=np.float64))
    return [((a - mean) / (std + STD_FLOOR) * m).astype(np.float32) for a, m in zip(advantages, masks, strict=True)]
