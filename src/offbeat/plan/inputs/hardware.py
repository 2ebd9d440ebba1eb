"""The machines that a plan may use: accelerators, classes of nodes, and the links between them.

Plain records in SI units: bytes, bytes a second, FLOP a second, seconds; one way, dense, GB = 1e9. Prices are $/h per
accelerator. Whoever reads a file makes these; the cost model reads nothing else.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Accelerator:
    """One card, as its maker tells it; what it really reaches is the cost model's affair."""

    name: str
    flops: float
    """Dense bf16 FLOP a second at its peak."""
    memory_bytes: float
    memory_bytes_per_s: float
    link_bytes_per_s: float
    """To its neighbours inside a node, one way."""
    host_bytes_per_s: float
    """To the host's memory, one way."""
    price_per_h: float | None = None
    """Indicative; a class may say its own."""
    source: str = "given"
    """Where the figures come from: a page of the catalogue, or the user."""


@dataclass(frozen=True)
class MachineClass:
    """Machines that are alike: the same card, as many in a node, one fabric, one zone, one price."""

    name: str
    accelerator: Accelerator
    per_node: int
    num_nodes: int
    """On offer, or owned."""
    price_per_h: float
    """Per accelerator; 0 for one that is owned, unless its owner says what it costs."""
    zone: str = "here"
    is_owned: bool = False

    @property
    def node_price_per_h(self) -> float:
        return self.price_per_h * self.per_node

    @property
    def num_accelerators(self) -> int:
        return self.per_node * self.num_nodes


@dataclass(frozen=True)
class Link:
    """What one node can send to another."""

    bytes_per_s: float
    latency_s: float = 50e-6
    is_shared: bool = False
    """All that crosses between these two classes (or zones) shares one such link, instead of one a node."""


@dataclass(frozen=True)
class Inventory:
    """Classes by name, and the link between a node of one class and another node of the same or of another class."""

    classes: Mapping[str, MachineClass]
    links: Mapping[frozenset[str], Link] = field(default_factory=dict)
    """By the names of both classes; a class alone stands for two nodes of it."""
    default_links: Mapping[str, Link] = field(default_factory=dict)
    """What holds for machines that nobody named yet: `nodes` of one class, `classes` of one zone, `zones`."""
    assumptions: tuple[str, ...] = ()
    """What nobody said and was taken from elsewhere, a sentence each."""
    measured: Mapping[frozenset[str], float] = field(default_factory=dict)
    """Bytes a second between two nodes, by their names (`h20-0`): stands above the link of their classes."""

    def link(self, one: str, other: str) -> Link:
        return self.links[frozenset((one, other))]


def at_best(inventory: Inventory) -> Inventory:
    """The links of classes as good as those of any two of their nodes: no choice of nodes has better ones."""
    if not inventory.measured:
        return inventory
    found: dict[frozenset[str], list[float]] = {}
    for pair, rate in inventory.measured.items():
        ends = [(offer, int(number)) for offer, _, number in (name.rpartition("-") for name in pair)]
        if all(offer in inventory.classes and at < inventory.classes[offer].num_nodes for offer, at in ends):
            found.setdefault(frozenset(offer for offer, _ in ends), []).append(rate)
    links = dict(inventory.links)
    for classes, rates in found.items():
        sizes = [inventory.classes[name].num_nodes for name in classes]
        num_pairs = math.prod(sizes) if len(sizes) > 1 else math.comb(sizes[0], 2)
        others = [links[classes].bytes_per_s] if len(rates) < num_pairs else []
        links[classes] = dataclasses.replace(links[classes], bytes_per_s=max(rates + others))
    return dataclasses.replace(inventory, links=links)
