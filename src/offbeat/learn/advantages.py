"""Advantages: how much better an answer was than was to be expected.

Groups are told apart by explicit ids, never by position, so unequal groups and any order give the same result. A group
of one, and a group whose rewards are all equal, has advantage exactly 0 (as has a batch of such): rounding noise must
not become a signal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from offbeat.control.settle import EQUAL_WITHIN

STD_FLOOR = 1e-6
"""Added to a standard deviation, as the published GRPO implementations do."""

Advantage = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""From the rewards and the group ids of a batch's answers to their advantages."""


def group_normalised(rewards: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """GRPO: (reward - mean) / (std + 1e-6) within each group, with the sample's standard deviation (ddof 1)."""
    return _by_group(rewards, groups, _normalised)


def group_centred(rewards: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """Dr.GRPO: reward - mean within each group."""
    return _by_group(rewards, groups, lambda values: values - values.mean())


def leave_one_out(rewards: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """RLOO: reward - mean of the group's others."""
    return _by_group(rewards, groups, lambda values: (values - values.mean()) * len(values) / (len(values) - 1))


def siblings_normalised(rewards: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """(reward - mean of the group's others) / (std + 1e-6), with the standard deviation that `group_normalised` has.

    Where only some of a group are known it counts as much as where all are: GRPO's own would be halved for two of them,
    and those are the short ones."""
    return _by_group(rewards, groups, lambda values: _normalised(values) * len(values) / (len(values) - 1))


def batch_normalised(rewards: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """REINFORCE++: (reward - mean) / (std + 1e-6) over the whole batch, whatever the groups."""
    return _by_group(rewards, np.zeros(len(rewards), np.int64), _normalised)


def _normalised(values: np.ndarray) -> np.ndarray:
    return (values - values.mean()) / (values.std(ddof=1) + STD_FLOOR)


def _by_group(rewards: np.ndarray, groups: np.ndarray, rule: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    rewards = np.asarray(rewards, np.float64)
    advantages = np.zeros_like(rewards)
    for members in _members(groups):
        values = rewards[members]
        is_equal = np.ptp(values) <= EQUAL_WITHIN  # False also of NaN, which is for the step to refuse
        if len(members) > 1 and not is_equal:
            advantages[members] = rule(values)
    return advantages.astype(np.float32)


def _members(groups: np.ndarray) -> Iterator[np.ndarray]:
    """Where each group's answers are."""
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
