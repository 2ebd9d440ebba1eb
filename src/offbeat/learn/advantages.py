"""Advantages: how much better an answer was than its group's others.

Groups are told apart by explicit ids, never by position, so unequal groups and any order give the same result. A group
of one, and a group whose rewards are all equal, has advantage exactly 0: rounding noise must not become a signal.
"""

from __future__ import annotations

import numpy as np

STD_FLOOR = 1e-6
"""Added to a group's standard deviation, as the published GRPO implementations do."""
EQUAL_WITHIN = 1e-8
"""Rewards closer than this count as equal."""


def group_normalised(rewards: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """GRPO: (reward - mean) / (std + 1e-6) within each group, with the sample's standard deviation (ddof 1)."""
    rewards = np.asarray(rewards, np.float64)
    advantages = np.zeros_like(rewards)
    for group in np.unique(groups):
        members = np.flatnonzero(groups == group)
        values = rewards[members]
        if len(members) > 1 and np.ptp(values) > EQUAL_WITHIN:
            advantages[members] = (values - values.mean()) / (values.std(ddof=1) + STD_FLOOR)
    return advantages.astype(np.float32)
