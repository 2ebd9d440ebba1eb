"""How long prompts and answers are, as far as costs depend on it: mean, mean square, and a quantile for the tail.

From a law, from a histogram, or from what was observed. A cap cuts what is longer, as `max_new_tokens` does: it counts
with the cap's length. `tail_share` is the share of answers that are longer than the quantile; it is 0 where the
quantile is the cap.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from statistics import NormalDist

import numpy as np

from offbeat.errors import UserError
from offbeat.plan.inputs.workload import Lengths

QUANTILE = 0.95
"""Of answers that must end within the age window, unless a workload says otherwise."""


def constant(num_tokens: float) -> Lengths:
    return Lengths(num_tokens, num_tokens**2, num_tokens, 0.0, num_tokens)


def uniform(shortest: float, longest: float, quantile: float = QUANTILE) -> Lengths:
    """Every length between two is as likely."""
    return histogram([shortest, longest], [1.0], quantile)


def log_normal(median: float, sigma: float, cap: float, quantile: float = QUANTILE) -> Lengths:
    """Lengths whose logarithm is normal around that of the median, cut at the cap."""
    if sigma == 0:
        return constant(min(median, cap))
    normal, mu = NormalDist(), math.log(median)
    at_cap = (math.log(cap) - mu) / sigma
    cut = 1 - normal.cdf(at_cap)
    mean = math.exp(mu + sigma**2 / 2) * normal.cdf(at_cap - sigma) + cap * cut
    mean_square = math.exp(2 * mu + 2 * sigma**2) * normal.cdf(at_cap - 2 * sigma) + cap**2 * cut
    tail = min(cap, math.exp(mu + sigma * normal.inv_cdf(quantile)))
    return Lengths(mean, mean_square, tail, 1 - quantile if tail < cap else 0.0, cap)


def histogram(edges: Sequence[float], counts: Sequence[float], quantile: float = QUANTILE) -> Lengths:
    """Bins between rising edges, with how many fell into each; within a bin every length is as likely."""
    if len(edges) != len(counts) + 1:
        raise UserError(f"{len(edges)} edges for {len(counts)} counts: there must be one edge more")
    if any(low >= high for low, high in itertools.pairwise(edges)) or edges[0] < 0:
        raise UserError("edges: must rise, from 0 or more")
    if min(counts) < 0 or sum(counts) <= 0:
        raise UserError("counts: must be 0 or more, and not all 0")
    shares = np.array(counts, float) / sum(counts)
    low, high = np.array(edges[:-1], float), np.array(edges[1:], float)
    longest = float(high[np.flatnonzero(shares)[-1]])
    tail = float(np.interp(quantile, np.concatenate([[0.0], np.cumsum(shares)]), edges))
    return Lengths(
        mean=float(shares @ (low + high) / 2),
        mean_square=float(shares @ (low**2 + low * high + high**2) / 3),
        tail=min(tail, longest),
        tail_share=1 - quantile if tail < longest else 0.0,
        longest=longest,
    )


def from_samples(lengths: Sequence[int], quantile: float = QUANTILE, cap: float = math.inf) -> Lengths:
    """What was observed, such as the answers of a finished run; the tail is one of the lengths that occurred."""
    if not len(lengths):
        raise UserError("no lengths: nothing was observed yet")
    tokens = np.minimum(np.array(lengths, float), cap)
    tail = float(np.quantile(tokens, quantile, method="inverted_cdf"))
    longest = float(tokens.max()) if math.isinf(cap) else cap
    share = float(np.mean(tokens > tail))
    return Lengths(float(tokens.mean()), float(np.mean(tokens**2)), tail, share, longest)
