"""Machines of an inventory: accelerators, classes of nodes and the links between them; and the catalogue.

Records use SI units: bytes, bytes per second, FLOP per second, seconds. Rates are one way, FLOP are dense, GB = 1e9
bytes. Prices are $/h per accelerator.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
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
    """One card with its maker's numbers, to which the cost model applies efficiencies."""

    name: str
    flops: float
    """Peak dense bf16 FLOP per second."""
    memory_bytes: float
    memory_bytes_per_s: float
    link_bytes_per_s: float
    """One-way rate to its neighbours inside a node."""
    host_bytes_per_s: float
    """One-way rate to the host's memory."""
    fp8_flops: float | None = None
    """Peak dense FLOP per second in 8-bit floats; None: the card has none, and computes such weights in bf16."""
    price_per_h: float | None = None
    """Indicative price; a class may have its own. None: no public price."""
    source: str = "given"
    """Source of the numbers, such as a data sheet; "given" if the user gave them."""


@dataclass(frozen=True)
class MachineClass:
    """Identical machines: the same card, cards per node, fabric, zone and price."""

    name: str
    accelerator: Accelerator
    per_node: int
    num_nodes: int
    """Number of nodes that can be rented, or are owned."""
    price_per_h: float
    """Price per accelerator; 0 for owned machines unless the file gives a price."""
    zone: str = "here"
    is_owned: bool = False
    has_catalogue_price: bool = False
    """Whether the price is the catalogue's, because the user gave none."""
    reclaims_per_h: float = 0.0
    """How often in an hour the provider takes a node back (spot machines)."""
    restart_s: float = 300.0
    """Seconds from a node's loss until another one works in its place."""

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
    """Classes of machines, and the links between their nodes."""

    classes: Mapping[str, MachineClass]
    links: Mapping[frozenset[str], Link] = field(default_factory=dict)
    """Links by the names of the two classes; a set of one name is the link between two nodes of that class."""
    default_links: Mapping[str, Link] = field(default_factory=dict)
    """Links for machines that are added later, keyed by `nodes` (between nodes of a class), `classes` (between classes
    in one zone) or `zones` (between zones)."""
    assumptions: tuple[str, ...] = ()
    """Assumptions behind the inventory, one sentence each."""
    measured: Mapping[frozenset[str], float] = field(default_factory=dict)
    """Measured bytes per second between two nodes, by their names (`h20-0`); overrides the link of their classes."""

    def link(self, one: str, other: str) -> Link:
        return self.links[frozenset((one, other))]


def with_alike_joined(inventory: Inventory) -> Inventory:
    """Returns the inventory with classes that differ in nothing but their names joined into one, called `a+b`, so that
    plans do not depend on how machines are divided into classes. Nothing is joined if links between single nodes were
    measured, which name nodes."""
    joined = inventory
    while not joined.measured:
        pair = next((pair for pair in itertools.combinations(joined.classes, 2) if _are_alike(joined, *pair)), None)
        if pair is None:
            return joined
        joined = _joined(joined, *pair)
    return joined


def _are_alike(inventory: Inventory, one: str, other: str) -> bool:
    first, second = inventory.classes[one], inventory.classes[other]
    if dataclasses.replace(second, name=one, num_nodes=first.num_nodes) != first:
        return False
    links = inventory.links
    inside = {links.get(frozenset(pair)) for pair in ((one, one), (other, other), (one, other))} - {None}
    others = [name for name in inventory.classes if name not in (one, other)]
    return len(inside) == 1 and all(links[frozenset((one, far))] == links[frozenset((other, far))] for far in others)


def _joined(inventory: Inventory, one: str, other: str) -> Inventory:
    first, second, name = inventory.classes[one], inventory.classes[other], f"{one}+{other}"
    both = dataclasses.replace(first, name=name, num_nodes=first.num_nodes + second.num_nodes)
    classes = {name if old == one else old: both if old == one else each for old, each in inventory.classes.items()}
    del classes[other]
    new = {one: name, other: name}
    links = {frozenset(new.get(old, old) for old in pair): link for pair, link in inventory.links.items()}
    line = (
        f"{one} and {other}: alike, so planned as one class; its first {first.num_nodes} nodes are {one}'s, "
        f"the other {second.num_nodes} {other}'s"
    )
    return dataclasses.replace(inventory, classes=classes, links=links, assumptions=(*inventory.assumptions, line))


def at_best(inventory: Inventory) -> Inventory:
    """Returns the inventory with each link between classes, or inside one class, as fast as the fastest measured link
    between their nodes. If some pairs of nodes were not measured, the given link of the classes counts too."""
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
    """An accelerator of the catalogue, and the range of its price in $/h across clouds (None: no public price)."""

    accelerator: Accelerator
    price_range: tuple[float, float] | None = None


def accelerator(name: str) -> Accelerator:
    """Accelerator of the catalogue by name or alias; case does not matter, and `_` and spaces count as `-`."""
    return entry(name).accelerator


def entry(name: str) -> Entry:
    plain = _plain(name)
    found = _aliases().get(plain)
    if found is None:
        raise UserError(f"accelerator {name!r} is not in the catalogue; {suggest(plain, _aliases())}")
    return _entries()[found]


def is_name(name: str) -> bool:
    """Whether `name` is an accelerator's name in the catalogue, and not an alias, which may be less exact."""
    return _plain(name) in _tables()


def is_known(name: str) -> bool:
    return _plain(name) in _aliases()


def names() -> list[str]:
    """Names of all accelerators in the catalogue, without aliases."""
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
    """Maps each alias of an accelerator, and its name, to its name in the catalogue."""
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
        fp8_flops=table["fp8_tflops"] * TERA if "fp8_tflops" in table else None,
        price_per_h=None if low is None else round(math.sqrt(low * high), 2),
        source=table["source"],
    )
    return Entry(card, None if low is None else (low, high))
