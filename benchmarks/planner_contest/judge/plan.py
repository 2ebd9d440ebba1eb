"""A plan as the judge sees it, and the figures that it judges by. Plain numbers, no column of the planner's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class Sync(StrEnum):
    """How a version gets to the rollout machines."""

    RELAY = "relay"
    """One copy over each slow link beside generation, which stops only to change over."""
    BLOCKING = "blocking"
    """Some copies over the slowest link, while trainer and generation wait, as in AReaL-Hex."""


@dataclass(frozen=True)
class Gang:
    nodes: Mapping[str, int]
    """By class; where layers are divided over classes, in the order of the stages."""
    tp: int
    pp: int
    dp: int
    layers: tuple[int, ...] = ()
    """Of each class, where a pipeline crosses classes."""
    batch_shares: Mapping[str, float] = field(default_factory=dict)
    """By class; empty: the batch is not divided over classes."""
    zero: int = 1


@dataclass(frozen=True)
class Replicas:
    """Replicas of one shape on one class."""

    offer: str
    tp: int
    concurrency: int
    count: int


@dataclass(frozen=True)
class Plan:
    gang: Gang
    replicas: tuple[Replicas, ...]
    sync: Sync = Sync.RELAY
    copies: float = 1.0
    """Of all weights, over the slowest link between gang and rollouts; only where sync blocks."""


@dataclass(frozen=True)
class Card:
    """What a card reaches of what its maker promises."""

    gemm: float = 0.65
    memory: float = 0.80
    attention: float = 0.70
    prefill: float = 0.60
    mfu: float = 0.40


@dataclass(frozen=True)
class Figures:
    cards: Mapping[str, Card] = field(default_factory=dict)
    """By the accelerator's name; any other is an ordinary `Card`."""
    network: float = 0.70
    all_reduce_s: float = 9e-6
    step_overhead_s: float = 1.5e-3
    exposed_tp: float = 0.5
    exposed_dp: float = 0.5
    gradient_bytes: float = 2.0
    """Of one parameter."""
    busy: float = 0.90
    """Of a replica's slots, those that hold a running trajectory on average."""
    memory_share: float = 0.88
    kv_slack: float = 1.25
    swap_s: float = 0.2
    """To change over to weights that lie in a card's memory already."""

    def card(self, name: str) -> Card:
        return self.cards.get(name, Card())
