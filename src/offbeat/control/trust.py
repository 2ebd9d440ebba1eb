"""Whether a worker can still be believed.

Duty: shut out a worker whose log-probs are not those of the weights that it claims, by mistake or on purpose, and none
that is honest: other arithmetic moves a log-prob by up to 0.1, rarely by 0.5. The trainer computes log-probs itself
(`offbeat.learn.audit`) and counts, for every segment, the tokens compared and those that are off. What is judged is the
latest segments that a worker handed in, so that no past buys credit.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

OFF_GAP = 0.5
"""A token is off where its log-prob is further than this from the trainer's."""
HONEST_SHARE, FORGED_SHARE = 0.01, 0.05
"""Tokens that are off: at most in honest segments, and at least in forged ones. Where a fifth of the tokens are forged
and the forger guesses well, one in twenty is off; honest engines stay below one in a hundred."""
TOUCHED = (0.2, 1.0)
"""The share of its segments that a forger touches: some, or all of them a little."""
MAX_STEP = 3.0
"""The most that one segment adds: a flipped bit, or a driver's hiccup, can spoil one through and through."""
MAX_SUSPICION = 10.0
"""Four segments in a row that are off throughout pass it. Honest ones with a token in 200 off come to 6 in 30,000."""
WINDOW = 256
"""Segments looked back on."""


class Compared(NamedTuple):
    """A segment that the trainer looked at."""

    num_tokens: int
    """Compared: those whose own weights were at hand."""
    num_off: int


def suspicion(compared: Iterable[Compared]) -> float:
    """How much speaks against whoever handed these in, the latest last: the larger of two cumulative sums of log-ratios
    of likelihoods, forged over honest, that begin anew whenever they fall below 0."""
    sums = [0.0] * len(TOUCHED)
    for num_tokens, num_off in compared:
        forged = num_off * math.log(FORGED_SHARE / HONEST_SHARE)
        forged += (num_tokens - num_off) * math.log((1 - FORGED_SHARE) / (1 - HONEST_SHARE))
        for i, touched in enumerate(TOUCHED):
            sums[i] = max(0.0, sums[i] + min(_mixed(forged, touched), MAX_STEP))
    return max(sums)


def _mixed(forged: float, touched: float) -> float:
    """The log-ratio of a segment that is forged with a probability of `touched`, given that of one that is."""
    return forged if touched == 1 else math.log1p(touched * math.expm1(min(forged, 100.0)))


def is_believable(compared: Iterable[Compared]) -> bool:
    return suspicion(compared) <= MAX_SUSPICION
