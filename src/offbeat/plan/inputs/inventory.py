"""From a cluster's TOML file to an `Inventory`, or to one line that says what is wrong with it.

A class is an accelerator of the catalogue, or figures of one's own, or both (one's own win). Links are looked up from
the most particular to the most general: a pair of classes, a pair of zones, the measured matrix, the class's own
figure, then `between_zones`, `between_classes` or `between_nodes`. Guarantees: every pair of classes has a link, and so
has every class with two nodes; nothing is guessed without being told among the assumptions.
"""

from __future__ import annotations

import dataclasses
import pathlib

from pydantic import Field

from offbeat.config.explain import Origin, show
from offbeat.config.lines import Path
from offbeat.config.load import load_as
from offbeat.config.section import Section
from offbeat.errors import UserError
from offbeat.plan.inputs import catalogue
from offbeat.plan.inputs.hardware import Accelerator, Inventory, MachineClass
from offbeat.plan.inputs.links import Links, resolve

TERA, GIGA = 1e12, 1e9
FIGURES: dict[str, tuple[str, float]] = {
    "tflops": ("flops", TERA),
    "memory_gb": ("memory_bytes", GIGA),
    "bandwidth_tb_s": ("memory_bytes_per_s", TERA),
    "link_gb_s": ("link_bytes_per_s", GIGA),
    "host_gb_s": ("host_bytes_per_s", GIGA),
}
"""What a file may say of an accelerator, the field that it fills, and its unit."""
SANE: dict[str, tuple[float, float, str, str]] = {
    "tflops": (1, 20_000, "PFLOPS", "GFLOPS"),
    "memory_gb": (1, 2_000, "TB", "MB"),
    "bandwidth_tb_s": (0.02, 50, "PB/s", "GB/s"),
    "link_gb_s": (1, 4_000, "TB/s", "MB/s"),
    "host_gb_s": (1, 1_000, "TB/s", "MB/s"),
}
"""Between which values a figure can be meant, and the unit that was likely meant below and above. In ten years' time
the upper ends may need a push."""
CPU = "cpu"
CPU_SANE = SANE | {"tflops": (0.001, 100, "PFLOPS", "GFLOPS"), "bandwidth_tb_s": (0.001, 5, "PB/s", "GB/s")}
"""Of a class of that name: processors without an accelerator, as calibration calls them."""
HOST_GB_S = 32.0
"""PCIe 4 x16: what a card of one's own is taken to have."""
MOST_PER_ACCELERATOR_H = 100.0


class ClassTable(Section):
    accelerator: str | None = None
    tflops: float | None = Field(None, gt=0)
    memory_gb: float | None = Field(None, gt=0)
    bandwidth_tb_s: float | None = Field(None, gt=0)
    link_gb_s: float | None = Field(None, gt=0)
    host_gb_s: float | None = Field(None, gt=0)
    nodes: int = Field(ge=1)
    per_node: int = Field(ge=1)
    price: float | None = Field(None, ge=0)
    zone: str = "here"
    owned: bool = False
    between_nodes: float | None = Field(None, gt=0)


class ClusterFile(Section):
    classes: dict[str, ClassTable] = Field(min_length=1)
    links: Links = Links()


def load_inventory(path: pathlib.Path | str) -> Inventory:
    """The machines in a file."""
    file, origin = load_as(path, ClusterFile)
    assumptions: list[str] = []
    classes = {name: _class(name, table, origin, assumptions) for name, table in file.classes.items()}
    own = {name: table.between_nodes for name, table in file.classes.items() if table.between_nodes is not None}
    links, defaults = resolve(file.links, classes, own, origin, assumptions)
    return Inventory(classes, links, defaults, tuple(assumptions))


def _class(name: str, table: ClassTable, origin: Origin, assumptions: list[str]) -> MachineClass:
    place: Path = ("classes", name)
    for key in FIGURES:
        check_range((*place, key), getattr(table, key), (CPU_SANE if name == CPU else SANE)[key], origin)
    card = _accelerator(name, table, origin, assumptions)
    return MachineClass(
        name=name,
        accelerator=card,
        per_node=table.per_node,
        num_nodes=table.nodes,
        price_per_h=_price(name, table, card, origin, assumptions),
        zone=table.zone,
        is_owned=table.owned,
    )


def _accelerator(name: str, table: ClassTable, origin: Origin, assumptions: list[str]) -> Accelerator:
    place: Path = ("classes", name)
    own = {FIGURES[key][0]: value * FIGURES[key][1] for key in FIGURES if (value := getattr(table, key)) is not None}
    if table.accelerator is not None:
        try:
            card = catalogue.accelerator(table.accelerator)
        except UserError as error:
            raise UserError(f"{origin.before((*place, 'accelerator'))}classes.{name}.{error}") from None
        return dataclasses.replace(card, **own, source=f"{card.source}; some figures given") if own else card
    needed = ["tflops", "memory_gb", "bandwidth_tb_s", *(["link_gb_s"] if table.per_node > 1 else [])]
    missing = [key for key in needed if getattr(table, key) is None]
    if missing:
        says = "accelerator is missing" if len(missing) == len(needed) else f"{', '.join(missing)} is missing"
        remedy = f"give a name of the catalogue, or {', '.join(needed)}"
        raise UserError(f"{origin.before(place)}[classes.{name}]: {says}; {remedy}")
    if table.host_gb_s is None:
        own["host_bytes_per_s"] = HOST_GB_S * GIGA
        assumptions.append(f"{name}: {HOST_GB_S:g} GB/s to the host's memory, as PCIe 4 has")
    own.setdefault("link_bytes_per_s", own["host_bytes_per_s"])  # alone in its node, it has no neighbour
    return Accelerator(name=name, **own)


def _price(name: str, table: ClassTable, card: Accelerator, origin: Origin, assumptions: list[str]) -> float:
    place: Path = ("classes", name, "price")
    if table.price is not None:
        if table.price > MOST_PER_ACCELERATOR_H:
            told = f"classes.{name}.price = {show(table.price)}"
            remedy = f"of one accelerator, not of a node; {table.per_node} at that price a node would be"
            each = f"{table.price / table.per_node:.4g}"
            raise UserError(f"{origin.before(place)}{told}: is the $/h {remedy} {each}")
        return table.price
    if table.owned:
        assumptions.append(f"{name}: owned, so it costs nothing; classes.{name}.price would say otherwise")
        return 0.0
    if card.price_per_h is None:
        known = f"the catalogue knows none for {card.name}" if table.accelerator else "it is no accelerator we know"
        raise UserError(
            f"{origin.before(place)}classes.{name}.price: is missing, and {known}; give $/h, or owned = true"
        )
    low, high = catalogue.entry(card.name).price_range or (card.price_per_h, card.price_per_h)
    span = f", the middle of {low:g} to {high:g}" if low < high else ""
    assumptions.append(f"{name}: ${card.price_per_h:g}/h per accelerator from the catalogue{span}")
    return card.price_per_h


def check_range(place: Path, value: float | None, sane: tuple[float, float, str, str], origin: Origin) -> None:
    """Refuses a figure that can only be in another unit, and names that unit."""
    low, high, below, above = sane
    if value is None or low <= value <= high:
        return
    key = ".".join(str(name) for name in place)
    likely = below if value < low else above
    raise UserError(
        f"{origin.before(place)}{key} = {show(value)}: allowed {low:g} to {high:g}; is it in {likely}, perhaps?"
    )
