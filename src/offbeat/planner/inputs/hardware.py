"""Machines of an inventory: accelerators, classes of nodes and the links between them; and the catalogue.

Plain records in SI units: bytes, bytes per second, FLOP per second, seconds; one way, dense, GB = 1e9. Prices are $/h
per accelerator.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

from offbeat.errors import UserError
from offbeat.spelling import suggest


@dataclass(frozen=True)
class Accelerator:
    """One card with its maker's numbers; the cost model applies efficiencies."""

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
    """Indicative; a class may have its own."""
    source: str = "given"
    """Source of the numbers: a page of the catalogue, or the user."""


@dataclass(frozen=True)
class MachineClass:
    """Equal machines: the same card, cards per node, fabric, zone and price."""

    name: str
    accelerator: Accelerator
    per_node: int
    num_nodes: int
    """On offer, or owned."""
    price_per_h: float
    """Per accelerator; 0 for an owned one, unless the file says otherwise."""
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
    """Link from one node to another."""

    bytes_per_s: float
    latency_s: float = 50e-6
    is_shared: bool = False
    """Whether all traffic between two classes (or zones) shares one link, instead of one per node."""


@dataclass(frozen=True)
class Inventory:
    """Classes by name, and the link between a node of one class and another node of the same or of another class."""

    classes: Mapping[str, MachineClass]
    links: Mapping[frozenset[str], Link] = field(default_factory=dict)
    """By the names of both classes; one name stands for two nodes of a class."""
    default_links: Mapping[str, Link] = field(default_factory=dict)
    """Links of machines that are added later: `nodes` of one class, `classes` of one zone, `zones`."""
    assumptions: tuple[str, ...] = ()
    """Assumed values, a sentence each."""
    measured: Mapping[frozenset[str], float] = field(default_factory=dict)
    """Bytes per second between two nodes by name (`h20-0`); overrides the link of their classes."""

    def link(self, one: str, other: str) -> Link:
        return self.links[frozenset((one, other))]


def at_best(inventory: Inventory) -> Inventory:
    """The inventory with every link of classes as good as the best measured link between their nodes."""
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


TERA, GIGA = 1e12, 1e9


@dataclass(frozen=True)
class Entry:
    """An accelerator of the catalogue, and the range of its price in $/h over clouds; None if no price is public."""

    accelerator: Accelerator
    price_range: tuple[float, float] | None = None


def accelerator(name: str) -> Accelerator:
    """Accelerator by name or alias; case, `_` and spaces do not matter."""
    return entry(name).accelerator


def entry(name: str) -> Entry:
    plain = _plain(name)
    found = _aliases().get(plain)
    if found is None:
        raise UserError(f"accelerator {name!r}: is not in the catalogue; {suggest(plain, _aliases())}")
    return _entries()[found]


def is_known(name: str) -> bool:
    return _plain(name) in _aliases()


def names() -> list[str]:
    """Every accelerator of the catalogue, without aliases."""
    return list(_entries())


def _plain(name: str) -> str:
    return name.strip().lower().replace("_", "-").replace(" ", "-")


@functools.cache
def _tables() -> Mapping[str, Mapping[str, Any]]:
    return tomllib.loads(resources.files("offbeat.planner.inputs").joinpath("catalogue.toml").read_text("utf-8"))


@functools.cache
def _entries() -> Mapping[str, Entry]:
    return {name: _entry(name, table) for name, table in _tables().items()}


@functools.cache
def _aliases() -> Mapping[str, str]:
    """Names by name and alias."""
    return {alias: name for name, table in _tables().items() for alias in (name, *table.get("aliases", ()))}


def _entry(name: str, table: Mapping[str, Any]) -> Entry:
    low, high = table.get("price", (None, None))
    card = Accelerator(
        name=name,
        flops=table["tflops"] * TERA,
        memory_bytes=table["memory_gb"] * GIGA,
        memory_bytes_per_s=table["bandwidth_tb_s"] * TERA,
        link_bytes_per_s=table["link_gb_s"] * GIGA,
        host_bytes_per_s=table["host_gb_s"] * GIGA,
        price_per_h=None if low is None else round(math.sqrt(low * high), 2),
        source=table["source"],
    )
    return Entry(card, None if low is None else (low, high))
