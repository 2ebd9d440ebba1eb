"""The workload as plain records: shape of the model, lengths of prompts and answers, and requirements of a step."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from statistics import NormalDist

import numpy as np

from offbeat.errors import UserError


class KvPolicy(StrEnum):
    """Treatment of the KV cache of running answers when a new version arrives."""

    REFILL = "refill"
    """The KV cache is computed again under the new weights."""
    STALE = "stale"
    """The KV cache is kept, and the answer continues under the new weights."""
    FINISH = "finish"
    """Running answers end on the old weights; new answers wait until then."""


@dataclass(frozen=True)
class ModelShape:
    """Shape of a decoder, dense or with experts."""

    name: str
    num_layers: int
    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn: int
    """Width of the feed-forward part, or of one expert."""
    vocab: int
    is_tied: bool = False
    num_experts: int = 0
    """Number of routed experts in each layer that has experts; 0 for a dense model."""
    experts_per_token: int = 0
    num_shared_experts: int = 0
    dense_layers: int = 0
    """In a model with experts, the number of first layers without experts; these have width `dense_ffn`."""
    dense_ffn: int = 0
    bytes_per_weight: int = 2
    """Bytes of a weight in an engine; 1: 8-bit floats, with which cards that have them compute, too."""
    bytes_per_kv: int = 2


@dataclass(frozen=True)
class LengthStatistics:
    """Statistics of the length of prompts or answers, in tokens."""

    mean: float
    mean_square: float
    tail: float
    """A quantile of the lengths. Answers up to this length must end early enough to be trained on within the staleness
    bound; longer answers continue over several versions."""
    tail_share: float
    """Share of answers longer than `tail`; 0 if `tail` is the cap on lengths."""
    longest: float


@dataclass(frozen=True)
class RewardMachines:
    """Machines that compute rewards."""

    seconds: float
    """Seconds to score one trajectory; each slot scores one trajectory at a time."""
    num_slots: int
    price_per_slot_h: float = 0.0


@dataclass(frozen=True)
class Workload:
    """Requirements of one training step, and the run's rules, such as the staleness bound."""

    model: ModelShape
    groups_per_step: int
    group_size: int
    prompt: LengthStatistics
    answer: LengthStatistics
    bound: int = 4
    """Staleness bound, `max_staleness` in the configuration."""
    updates_per_step: int = 1
    has_reference: bool = False
    has_critic: bool = False
    recomputes_logprobs: bool = True
    """Whether a step has one more forward pass, for the proximal log-probs."""
    lora_rank: int = 0
    kv: KvPolicy = KvPolicy.REFILL
    waste_share: float = 0.0
    """Share of generated tokens that are not trained on, because their groups are dropped or not needed."""
    headroom: float = 0.1
    """Share by which generation should exceed the tokens that training needs, if that costs neither speed nor money.
    This surplus keeps the trainer from waiting if the cost model is slightly wrong."""
    delta_density: float = 1.0
    """Bytes of a weight update divided by the bytes of all trained weights."""
    reward: RewardMachines | None = None
    colocates: bool = True
    """Whether cards may take turns between training and generation if the staleness bound is 0."""
    any_trainer: bool = True
    """Whether gangs may use tensor and pipeline parallelism and machines of two classes. Otherwise they are those that
    Offbeat's own trainer runs: one class, and copies of the model that share its state (ZeRO 2 or 3)."""
    assumptions: tuple[str, ...] = ()
    """Assumptions behind the workload, one sentence each."""

    @property
    def bytes_per_trained_weight(self) -> int:
        """Bytes of a weight in the trainer and in a version; engines make 8-bit weights of it when they load it."""
        return max(2, self.model.bytes_per_weight)

    @property
    def shares_nodes(self) -> bool:
        """Whether some cards of a node may train while its other cards generate."""
        return self.colocates and self.bound > 0

    @property
    def may_share(self) -> bool:
        """Whether replicas may use the training gang's nodes: only with staleness bound 0, which makes generation and
        training take turns."""
        return self.colocates and self.bound == 0

    @cached_property
    def trajectories_per_step(self) -> int:
        return self.groups_per_step * self.group_size

    @cached_property
    def generated_tokens_per_step(self) -> float:
        """Tokens that the rollout machines must generate per step, waste included."""
        return self.trajectories_per_step * self.answer.mean / (1 - self.waste_share)

    @cached_property
    def trained_tokens_per_step(self) -> float:
        return self.trajectories_per_step * (self.answer.mean + self.prompt.mean)


# Length statistics from a distribution, a histogram or samples. A cap cuts longer answers, as `max_new_tokens` does.

QUANTILE = 0.95
"""Default share of answers that must end early enough to be trained on within the staleness bound."""


def constant(num_tokens: float) -> LengthStatistics:
    return LengthStatistics(num_tokens, num_tokens**2, num_tokens, 0.0, num_tokens)


def uniform(shortest: float, longest: float, quantile: float = QUANTILE) -> LengthStatistics:
    """Statistics of lengths spread evenly between `shortest` and `longest`."""
    return histogram([shortest, longest], [1.0], quantile)


def log_normal(median: float, sigma: float, cap: float, quantile: float = QUANTILE) -> LengthStatistics:
    """Statistics of log-normal lengths; lengths above `cap` are cut to `cap`."""
    if sigma == 0:
        return constant(min(median, cap))
    normal, mu = NormalDist(), math.log(median)
    at_cap = (math.log(cap) - mu) / sigma
    cut = 1 - normal.cdf(at_cap)
    mean = math.exp(mu + sigma**2 / 2) * normal.cdf(at_cap - sigma) + cap * cut
    mean_square = math.exp(2 * mu + 2 * sigma**2) * normal.cdf(at_cap - 2 * sigma) + cap**2 * cut
    tail = min(cap, math.exp(mu + sigma * normal.inv_cdf(quantile)))
    return LengthStatistics(mean, mean_square, tail, 1 - quantile if tail < cap else 0.0, cap)


def histogram(edges: Sequence[float], counts: Sequence[float], quantile: float = QUANTILE) -> LengthStatistics:
    """Statistics of lengths given as counts of bins between rising edges; within a bin they are uniform."""
    if len(edges) != len(counts) + 1:
        raise UserError(f"there are {len(edges)} edges and {len(counts)} counts; give one more edge than counts")
    if any(low >= high for low, high in itertools.pairwise(edges)) or edges[0] < 0:
        raise UserError("edges must rise, and the first edge must be 0 or more")
    if min(counts) < 0 or sum(counts) <= 0:
        raise UserError("counts must all be 0 or more, and at least one must be above 0")
    shares = np.array(counts, float) / sum(counts)
    low, high = np.array(edges[:-1], float), np.array(edges[1:], float)
    longest = float(high[np.flatnonzero(shares)[-1]])
    tail = float(np.interp(quantile, np.concatenate([[0.0], np.cumsum(shares)]), edges))
    return LengthStatistics(
        mean=float(shares @ (low + high) / 2),
        mean_square=float(shares @ (low**2 + low * high + high**2) / 3),
        tail=min(tail, longest),
        tail_share=1 - quantile if tail < longest else 0.0,
        longest=longest,
    )


def from_samples(lengths: Sequence[int], quantile: float = QUANTILE, cap: float = math.inf) -> LengthStatistics:
    """Statistics of observed lengths, cut to `cap`. The quantile `tail` is one of these lengths, not an interpolated
    value."""
    if not len(lengths):
        raise UserError("there are no lengths for statistics; give a run that has trained at least one step")
    tokens = np.minimum(np.array(lengths, float), cap)
    tail = float(np.quantile(tokens, quantile, method="inverted_cdf"))
    longest = float(tokens.max()) if math.isinf(cap) else cap
    share = float(np.mean(tokens > tail))
    return LengthStatistics(float(tokens.mean()), float(np.mean(tokens**2)), tail, share, longest)
