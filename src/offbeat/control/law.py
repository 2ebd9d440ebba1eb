"""A law of lengths: how long answers are, and how much the members of a group have in common.

Duty: what a prediction draws from. The lengths of single answers follow a survival curve of any shape; members of a
group are tied by a Gaussian copula: each has a standard normal score, `shared` of whose variance is the group's own,
and the score's rank is the rank of its length. For log-normal lengths that is a shared part of the log-variance.

Guarantees: what is drawn lies between 1 and `max_tokens`; the same scores give the same lengths.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

_SCORES = np.linspace(-6.0, 6.0, 2401)
_RANKS = np.array([0.5 * math.erfc(-score / math.sqrt(2)) for score in _SCORES])


def rank(scores: np.ndarray) -> np.ndarray:
    """The share of a standard normal population below these scores."""
    return np.interp(scores, _SCORES, _RANKS)


def score(ranks: np.ndarray) -> np.ndarray:
    """The standard normal score of these ranks, which may be 0 and 1."""
    return np.interp(ranks, _RANKS, _SCORES)


@dataclass(frozen=True, eq=False)
class Law:
    """See the module."""

    survival: np.ndarray
    """At t = 0..max_tokens: the share of answers that have more than t tokens. What would go on at the last is cut."""
    shared: float = 0.0
    """The share of a score's variance that members of a group have in common."""

    @property
    def max_tokens(self) -> int:
        return len(self.survival) - 1

    @property
    def mean(self) -> float:
        return float(self.survival[:-1].sum())

    @property
    def mean_context(self) -> float:
        """Tokens of its own answer that a token has before it, on average over all tokens."""
        tokens = self.survival[:-1]
        return float(tokens @ np.arange(len(tokens)) / tokens.sum())

    def lengths(self, scores: np.ndarray) -> np.ndarray:
        """Whole numbers of tokens, one a score."""
        lengths = np.searchsorted(-self.survival[:-1], rank(scores) - 1, side="right")
        return np.clip(lengths, 1, self.max_tokens)

    def scores(self, num_tokens: np.ndarray) -> np.ndarray:
        """The scores of answers that ended with so many tokens: the middle of those that give this length."""
        num_tokens = np.clip(num_tokens, 1, self.max_tokens)
        after = np.where(num_tokens < self.max_tokens, self.survival[num_tokens], 0.0)
        return score(1 - (self.survival[num_tokens - 1] + after) / 2)

    def bounds(self, num_tokens: np.ndarray) -> np.ndarray:
        """The lowest score of an answer that has more than so many tokens."""
        return score(1 - self.survival[np.clip(num_tokens, 0, self.max_tokens - 1)])
