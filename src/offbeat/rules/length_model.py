"""The length model: the distribution of answer lengths, learnt from finished and running answers.

A mean over finished answers is biased short, because the long ones are still running. Here every trajectory is one
record of its whole length: an event if it ended by itself, right-censored if it was cut at `max_tokens` or is still
running. These records give the Kaplan-Meier estimate of the share of answers longer than t: S(t) = Π (1 − d_j / n_j)
over the lengths t_j ≤ t, where n_j answers reached t_j tokens and d_j of them ended there.

Members of a group answer the same prompt, so a finished member is evidence about those still running. A Gaussian copula
models this: each member has a standard normal score whose rank is the rank of its length, and the share `shared` of the
score's variance is common to the group. This hidden common part is inferred on a grid, from the lengths of finished
members and from the current lengths of running members, which are lower bounds.

Guarantees: each trajectory counts once, with its latest report. Trajectories that ended under earlier versions count
exponentially less. Drawn lengths lie between 1 and `max_tokens`, and above the current length of a running member; the
same scores give the same lengths.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable
from dataclasses import dataclass

import numpy as np

_SCORES = np.linspace(-6.0, 6.0, 2401)
_RANKS = np.array([0.5 * math.erfc(-score / math.sqrt(2)) for score in _SCORES])


def rank(scores: np.ndarray) -> np.ndarray:
    """Returns the share of a standard normal population below each score."""
    return np.interp(scores, _SCORES, _RANKS)


def score(ranks: np.ndarray) -> np.ndarray:
    """Returns the standard normal score of each rank (share of a population below the score), between -6 and 6."""
    return np.interp(ranks, _RANKS, _SCORES)


@dataclass(frozen=True, eq=False)
class LengthDistribution:
    """Distribution of answer lengths, and their correlation within groups."""

    survival: np.ndarray
    """Entry t, from 0 to max_tokens, is the share of answers with more than t tokens; answers are cut at max_tokens."""
    shared: float = 0.0
    """Fraction of the variance of length scores (standard normal scores) that is common to the members of a group."""

    @property
    def max_tokens(self) -> int:
        return len(self.survival) - 1

    @property
    def mean(self) -> float:
        return float(self.survival[:-1].sum())

    def lengths(self, scores: np.ndarray) -> np.ndarray:
        """Returns an answer length in tokens for each standard normal score: the quantile at the score's rank."""
        lengths = np.searchsorted(-self.survival[:-1], rank(scores) - 1, side="right")
        return np.clip(lengths, 1, self.max_tokens)

    def scores(self, num_tokens: np.ndarray) -> np.ndarray:
        """Returns the standard normal score of answers that ended with `num_tokens` tokens. Equally long answers cover
        a range of ranks; the score is that of the middle rank."""
        num_tokens = np.clip(num_tokens, 1, self.max_tokens)
        after = np.where(num_tokens < self.max_tokens, self.survival[num_tokens], 0.0)
        return score(1 - (self.survival[num_tokens - 1] + after) / 2)

    def bounds(self, num_tokens: np.ndarray) -> np.ndarray:
        """Returns the lowest standard normal score that an answer with more than `num_tokens` tokens can have."""
        return score(1 - self.survival[np.clip(num_tokens, 0, self.max_tokens - 1)])


_GROUP_SCORES = np.linspace(-3.5, 3.5, 29)
_GROUP_PRIOR = -0.5 * _GROUP_SCORES**2
_SHARES = np.linspace(0.0, 0.9, 7)
_MAX_SHARE = 0.95
"""Largest shared part of the variance. With 1, all members of a group would have the same length."""


def evidence(law: LengthDistribution, num_tokens: np.ndarray, ended: np.ndarray, shared: float) -> np.ndarray:
    """Returns the log-likelihood of the lengths in each group, for each value of the group's hidden score (the part of
    the length score that its members share). The result has shape (groups, values).

    `num_tokens` and `ended` have one row per group and one column per member; a negative number of tokens means that
    the group has no such member.
    """
    shared = min(shared, _MAX_SHARE)
    scores = np.where(ended, law.scores(num_tokens), law.bounds(num_tokens))
    apart = (scores[..., None] - np.sqrt(shared) * _GROUP_SCORES) / np.sqrt(1 - shared)
    log_density = -0.5 * apart**2 - 0.5 * np.log(1 - shared)
    log_beyond = np.log(np.maximum(1 - rank(apart), 1e-12))
    by_member = np.where(ended[..., None], log_density, log_beyond)
    return np.where((num_tokens < 0)[..., None], 0.0, by_member).sum(axis=1)


def shared_share(law: LengthDistribution, num_tokens: np.ndarray, ended: np.ndarray) -> float:
    """Estimates the fraction of the variance of length scores that members of a group have in common, as the mean of
    the values in `_SHARES` weighted by their likelihood. `num_tokens` and `ended` are as for `evidence`."""
    prior = np.exp(_GROUP_PRIOR) / np.exp(_GROUP_PRIOR).sum()
    fits = []
    for shared in _SHARES:
        by_score = evidence(law, num_tokens, ended, float(shared))
        most = by_score.max(axis=1)
        fits.append(float((most + np.log(np.exp(by_score - most[:, None]) @ prior)).sum()))
    likely = np.exp(np.array(fits) - max(fits))
    return float(likely @ _SHARES / likely.sum())


def group_scores(law: LengthDistribution, num_tokens: np.ndarray, ended: np.ndarray) -> np.ndarray:
    """Returns the probability of each value of each group's hidden score; shape and parameters as for `evidence`."""
    by_score = evidence(law, num_tokens, ended, law.shared) + _GROUP_PRIOR
    likely = np.exp(by_score - by_score.max(axis=1, keepdims=True))
    return likely / likely.sum(axis=1, keepdims=True)


def draw(law: LengthDistribution, num_tokens: np.ndarray, ended: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Draws the final length of each member of each group; a member that ended keeps its length. `num_tokens` and
    `ended` are as for `evidence`."""
    shared = min(law.shared, _MAX_SHARE)
    likely = group_scores(law, num_tokens, ended).cumsum(axis=1)
    picks = (rng.random((len(likely), 1)) > likely).sum(axis=1).clip(max=len(_GROUP_SCORES) - 1)
    width = _GROUP_SCORES[1] - _GROUP_SCORES[0]
    centre = np.sqrt(shared) * (_GROUP_SCORES[picks] + width * (rng.random(len(picks)) - 0.5))[:, None]
    below = rank((law.bounds(num_tokens) - centre) / np.sqrt(1 - shared))
    drawn = centre + np.sqrt(1 - shared) * score(below + rng.random(below.shape) * (1 - below))
    longer = np.maximum(law.lengths(drawn), num_tokens + 1).clip(max=law.max_tokens)
    return np.where(ended, num_tokens, longer)


FORGET = 0.95
"""Factor on the weight of ended trajectories at each new version, so that about twenty versions count."""
MIN_WEIGHT = 0.05
MAX_RECORDS = 8192
"""Largest number of ended trajectories that are remembered; the oldest are deleted first."""
TAIL = 0.25
"""Share of the records, the longest ones, to which the power law for still longer answers is fitted."""
MAX_GROUPS = 64
"""Number of latest groups from which the shared variance is estimated."""


@dataclass(slots=True)
class _LengthRecord:
    num_tokens: int
    group: Hashable
    is_event: bool = False
    """Whether the trajectory ended by itself."""
    weight: float | None = None
    """Weight of a trajectory that has ended; None while it is running. A running one has weight 1."""


class LengthEstimator:
    """Learns the distribution of answer lengths from reports about trajectories, which are identified by `key`.
    Trajectories with the same `group` answer the same prompt; None: nothing is known about other answers. `advance`
    must be called at each new version."""

    def __init__(self, max_tokens: int):
        self.max_tokens = max_tokens
        self._records: dict[Hashable, _LengthRecord] = {}
        self._law: LengthDistribution | None = None
        """Result of `law`, cached until the next report."""

    def running(self, key: Hashable, num_tokens: int, group: Hashable = None) -> None:
        """Reports that a trajectory has `num_tokens` so far and will be continued."""
        self._put(key, _LengthRecord(min(num_tokens, self.max_tokens), group))

    def finished(self, key: Hashable, num_tokens: int, group: Hashable = None) -> None:
        """Reports that a trajectory ended by itself, or was cut at `max_tokens`."""
        is_event = num_tokens < self.max_tokens
        self._put(key, _LengthRecord(min(num_tokens, self.max_tokens), group, is_event, weight=1.0))

    def dropped(self, key: Hashable) -> None:
        """Reports that a running trajectory will not be continued; its final length stays unknown."""
        if key in self._records and self._records[key].weight is None:
            self._records[key].weight = 1.0

    def advance(self) -> None:
        """Reduces the weight of ended trajectories, because a new version has been published. Deletes those whose
        weight falls below `MIN_WEIGHT`, and the oldest beyond `MAX_RECORDS`."""
        ended = {key: record.weight for key, record in self._records.items() if record.weight is not None}
        for index, (key, weight) in enumerate(ended.items()):
            if weight * FORGET < MIN_WEIGHT or len(ended) - index > MAX_RECORDS:
                del self._records[key]
            else:
                self._records[key].weight = weight * FORGET
        self._law = None

    @property
    def num_ended(self) -> float:
        """Sum of the weights of ended trajectories; those that ended under earlier versions have less weight."""
        return sum(record.weight for record in self._records.values() if record.weight is not None)

    def law(self) -> LengthDistribution:
        """Returns the distribution of answer lengths learnt so far."""
        if self._law is None:
            curve = kaplan_meier(self._records.values(), self.max_tokens)
            self._law = LengthDistribution(curve, self._shared_share(curve))
        return self._law

    def _put(self, key: Hashable, record: _LengthRecord) -> None:
        self._records.pop(key, None)  # so that records stay in the order of their latest reports
        self._records[key] = record
        self._law = None

    def _shared_share(self, curve: np.ndarray) -> float:
        groups: dict[Hashable, list[_LengthRecord]] = {}
        for record in reversed(self._records.values()):
            if record.group is not None and (record.group in groups or len(groups) < MAX_GROUPS):
                groups.setdefault(record.group, []).append(record)
        several = [members for members in groups.values() if len(members) > 1]
        return shared_share(LengthDistribution(curve), *_table(several)) if several else 0.0


def _table(groups: list[list[_LengthRecord]]) -> tuple[np.ndarray, np.ndarray]:
    """Returns two arrays with a row per group and a column per member: the number of tokens (-1: no such member), and
    whether the member ended by itself."""
    size = max((len(members) for members in groups), default=0)
    num_tokens, ended = np.full((len(groups), size), -1), np.zeros((len(groups), size), bool)
    for row, members in enumerate(groups):
        num_tokens[row, : len(members)] = [record.num_tokens for record in members]
        ended[row, : len(members)] = [record.is_event for record in members]
    return num_tokens, ended


def kaplan_meier(records: Iterable[_LengthRecord], max_tokens: int) -> np.ndarray:
    """Returns the share of answers longer than t tokens, at t = 0..max_tokens. Beyond the longest record the curve
    follows a power law fitted to the longest records."""
    rows = [(r.num_tokens, r.is_event, 1.0 if r.weight is None else r.weight) for r in records]
    if not rows:
        return np.ones(max_tokens + 1)
    num_tokens, is_event, weights = (np.array(column) for column in zip(*rows, strict=True))
    ends = np.bincount(num_tokens, weights * is_event, minlength=max_tokens + 1)
    came_so_far = np.bincount(num_tokens, weights, minlength=max_tokens + 1)[::-1].cumsum()[::-1]
    share = np.divide(ends, came_so_far, out=np.zeros(max_tokens + 1), where=ends > 0)
    curve = np.cumprod(1 - np.minimum(share, 1.0))
    longest = int(num_tokens.max())
    if curve[longest] > 0 and longest < max_tokens:
        beyond = np.arange(longest, max_tokens + 1) / max(longest, 1)
        curve[longest:] = curve[longest] * np.maximum(beyond, 1.0) ** -_tail_exponent(num_tokens, is_event, weights)
    return curve


def _tail_exponent(num_tokens: np.ndarray, is_event: np.ndarray, weights: np.ndarray) -> float:
    """Returns the exponent of a power law fitted to the longest records, including unfinished answers (Hill
    estimator)."""
    least = max(float(np.quantile(num_tokens, 1 - TAIL)), 1.0)
    is_long = num_tokens >= least
    num_ends = float((weights * is_event)[is_long].sum())
    way = float((weights * np.log(np.maximum(num_tokens, 1) / least))[is_long].sum())
    return (num_ends + 1) / (way + 1 / math.e)
