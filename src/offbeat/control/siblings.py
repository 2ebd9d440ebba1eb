"""What the members of a group tell about one another's length.

Duty: siblings answer the same prompt, so a finished one says something of those still running. Under a `Law` a group
has one hidden score of its own; here that score is inferred from members that ended and from members that are at least
so long, on a grid, and with it the share of the variance that groups have in common and the lengths that running
members will reach.

Guarantees: a member that still runs is drawn longer than it is; without siblings, or with nothing shared, the law alone
decides.
"""

from __future__ import annotations

import numpy as np

from offbeat.control.law import Law, rank, score

_GROUP_SCORES = np.linspace(-3.5, 3.5, 29)
_GROUP_PRIOR = -0.5 * _GROUP_SCORES**2
_SHARES = np.linspace(0.0, 0.9, 7)
_MAX_SHARE = 0.95
"""Members are never quite alike: a share of one would leave no length to a member that outlives its siblings."""


def evidence(law: Law, num_tokens: np.ndarray, ended: np.ndarray, shared: float) -> np.ndarray:
    """The log-likelihood of each group's members at each hidden score of the grid: groups × scores.

    A row of `num_tokens` is a group; a negative number stands for no member.
    """
    shared = min(shared, _MAX_SHARE)
    scores = np.where(ended, law.scores(num_tokens), law.bounds(num_tokens))
    apart = (scores[..., None] - np.sqrt(shared) * _GROUP_SCORES) / np.sqrt(1 - shared)
    log_density = -0.5 * apart**2 - 0.5 * np.log(1 - shared)
    log_beyond = np.log(np.maximum(1 - rank(apart), 1e-12))
    by_member = np.where(ended[..., None], log_density, log_beyond)
    return np.where((num_tokens < 0)[..., None], 0.0, by_member).sum(axis=1)


def shared_share(law: Law, num_tokens: np.ndarray, ended: np.ndarray) -> float:
    """The share of the score's variance that members of these groups have in common, on average over what is likely."""
    prior = np.exp(_GROUP_PRIOR) / np.exp(_GROUP_PRIOR).sum()
    fits = []
    for shared in _SHARES:
        by_score = evidence(law, num_tokens, ended, float(shared))
        most = by_score.max(axis=1)
        fits.append(float((most + np.log(np.exp(by_score - most[:, None]) @ prior)).sum()))
    likely = np.exp(np.array(fits) - max(fits))
    return float(likely @ _SHARES / likely.sum())


def group_scores(law: Law, num_tokens: np.ndarray, ended: np.ndarray) -> np.ndarray:
    """The probability of each hidden score of the grid, by group."""
    by_score = evidence(law, num_tokens, ended, law.shared) + _GROUP_PRIOR
    likely = np.exp(by_score - by_score.max(axis=1, keepdims=True))
    return likely / likely.sum(axis=1, keepdims=True)


def draw(law: Law, num_tokens: np.ndarray, ended: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Whole lengths for all members of these groups: those that ended keep theirs."""
    shared = min(law.shared, _MAX_SHARE)
    likely = group_scores(law, num_tokens, ended).cumsum(axis=1)
    picks = (rng.random((len(likely), 1)) > likely).sum(axis=1).clip(max=len(_GROUP_SCORES) - 1)
    width = _GROUP_SCORES[1] - _GROUP_SCORES[0]
    centre = np.sqrt(shared) * (_GROUP_SCORES[picks] + width * (rng.random(len(picks)) - 0.5))[:, None]
    below = rank((law.bounds(num_tokens) - centre) / np.sqrt(1 - shared))
    drawn = centre + np.sqrt(1 - shared) * score(below + rng.random(below.shape) * (1 - below))
    longer = np.maximum(law.lengths(drawn), num_tokens + 1).clip(max=law.max_tokens)
    return np.where(ended, num_tokens, longer)


def expected_length(law: Law, num_tokens: np.ndarray, ended: np.ndarray) -> np.ndarray:
    """The length each member is expected to reach; those that ended keep theirs."""
    shared = min(law.shared, _MAX_SHARE)
    likely = group_scores(law, num_tokens, ended)
    curve = score(1 - law.survival[:-1])
    expected = np.zeros(num_tokens.shape)
    for index, group_score in enumerate(_GROUP_SCORES):
        alive = 1 - rank((curve - np.sqrt(shared) * group_score) / np.sqrt(1 - shared))
        rest = alive[::-1].cumsum()[::-1]
        at = num_tokens.clip(0, law.max_tokens - 1)
        expected += likely[:, index, None] * rest[at] / np.maximum(alive[at], 1e-12)
    return np.where(ended, num_tokens, np.minimum(num_tokens + expected, law.max_tokens))
