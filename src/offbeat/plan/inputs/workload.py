"""What is to be trained: the model's shape, the lengths of its answers, and what a step asks for.

Plain records; whoever reads a file makes these, and the cost model reads nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property


class KvPolicy(StrEnum):
    """What becomes of running answers when a version arrives."""

    REFILL = "refill"
    """Their keys and values are computed again under the new weights."""
    STALE = "stale"
    """They are kept, and the answer goes on under the new weights."""
    FINISH = "finish"
    """They end on the old weights; new answers wait."""


@dataclass(frozen=True)
class ModelShape:
    """A decoder, dense or with experts."""

    name: str
    num_layers: int
    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn: int
    """Width of the feed-forward part; of one expert where there are experts."""
    vocab: int
    is_tied: bool = False
    num_experts: int = 0
    """0 for a dense model."""
    experts_per_token: int = 0
    num_shared_experts: int = 0
    dense_layers: int = 0
    """Of a model with experts, how many first layers have none; their width is `dense_ffn`."""
    dense_ffn: int = 0
    bytes_per_weight: int = 2
    bytes_per_kv: int = 2


@dataclass(frozen=True)
class Lengths:
    """Tokens of a prompt or an answer: what the cost model needs of their law."""

    mean: float
    mean_square: float
    tail: float
    """The quantile that must fit into the age window; what is longer is carried on over versions."""
    tail_share: float
    """How much of the answers is longer than that."""
    longest: float


@dataclass(frozen=True)
class RewardPool:
    """Rewards as a stage of their own."""

    seconds: float
    """Of one trajectory, in one slot."""
    num_slots: int
    price_per_slot_h: float = 0.0


@dataclass(frozen=True)
class Workload:
    """What one step asks for, and what rules hold."""

    model: ModelShape
    groups_per_step: int
    group_size: int
    prompt: Lengths
    answer: Lengths
    bound: int = 4
    """`max_staleness`."""
    updates_per_step: int = 1
    has_reference: bool = False
    has_critic: bool = False
    recomputes_logprobs: bool = True
    """One more forward pass over what was generated, for the proximal log-probs."""
    lora_rank: int = 0
    kv: KvPolicy = KvPolicy.REFILL
    waste_share: float = 0.0
    """Of generated tokens, those that nobody trains on: dropped, filtered, over-provisioned."""
    headroom: float = 0.1
    """Of what a step asks for: what rollouts should generate beyond it where that costs nothing, so that a cost model's
    error does not leave the trainer waiting."""
    delta_density: float = 1.0
    """Bytes of a weight update over those of all weights."""
    reward: RewardPool | None = None
    colocates: bool = True
    """With bound 0: whether cards may train and generate by turns."""
    assumptions: tuple[str, ...] = ()
    """What nobody said and was taken from elsewhere, a sentence each."""

    @property
    def may_share(self) -> bool:
        """Whether replicas may stand on the gang's own nodes: only where generation waits for training."""
        return self.colocates and self.bound == 0

    @cached_property
    def trajectories_per_step(self) -> int:
        return self.groups_per_step * self.group_size

    @cached_property
    def generated_tokens_per_step(self) -> float:
        """Waste included: what the rollout machines must deliver."""
        return self.trajectories_per_step * self.answer.mean / (1 - self.waste_share)

    @cached_property
    def trained_tokens_per_step(self) -> float:
        return self.trajectories_per_step * (self.answer.mean + self.prompt.mean)
