"""The judge's own records: a plan in plain numbers, and the constants with which it is judged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class Sync(StrEnum):
    """Ways in which a version reaches the rollout machines."""

    RELAY = "relay"
    """One copy crosses each slow link during generation, which stops only to switch weights."""
    BLOCKING = "blocking"
    """Several copies cross the slowest link while trainer and generation wait, as in AReaL-Hex."""


@dataclass(frozen=True)
class Gang:
    nodes: Mapping[str, int]
    """Number of nodes by class; if layers are divided over classes, in the order of the stages."""
    tp: int
    pp: int
    dp: int
    layers: tuple[int, ...] = ()
    """Number of layers of each class, if a pipeline crosses classes."""
    batch_shares: Mapping[str, float] = field(default_factory=dict)
    """Share of the batch by class; empty if the batch is not divided over classes."""
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
    """Number of copies of all weights over the slowest link between gang and rollouts; only for `BLOCKING`."""


@dataclass(frozen=True)
class Card:
    """Shares of its peak figures that a card reaches."""

    gemm: float = 0.65
    memory: float = 0.80
    attention: float = 0.70
    prefill: float = 0.60
    mfu: float = 0.40


@dataclass(frozen=True)
class Figures:
    cards: Mapping[str, Card] = field(default_factory=dict)
    """Cards by the accelerator's name; others have the defaults of `Card`."""
    network: float = 0.70
    all_reduce_s: float = 9e-6
    step_overhead_s: float = 1.5e-3
    row_overhead_s: float = 2.5e-5
    """Host's seconds for each running trajectory of a decode step."""
    exposed_tp: float = 0.5
    exposed_dp: float = 0.5
    gradient_bytes: float = 2.0
    """Bytes of the gradient of one parameter."""
    busy: float = 0.90
    """Mean share of a replica's slots that hold a running trajectory."""
    memory_share: float = 0.88
    kv_slack: float = 1.25
    swap_s: float = 0.2
    """Time to switch to weights that are in the card's memory already."""

    def card(self, name: str) -> Card:
        return self.cards.get(name, Card())
