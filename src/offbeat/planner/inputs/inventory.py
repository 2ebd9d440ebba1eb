"""Reads an `Inventory` from a cluster's TOML file; each error message is one line.

A class of nodes is described by an accelerator of the catalogue, by numbers, or by both (the numbers win). The rate of
a link is taken from the first of these that gives it: a pair of classes, a pair of zones, the measured matrix, the
class's own number, then `between_zones`, `between_classes` or `between_nodes`. Guarantees: every pair of classes has a
link, and so has every class with two or more nodes; every guess is listed among the assumptions.
"""

from __future__ import annotations

import csv
import dataclasses
import itertools
import pathlib
from collections.abc import Mapping
from typing import Any

from pydantic import Field

from offbeat.config.explain import ValueOrigin, show
from offbeat.config.keys import Path
from offbeat.config.load import load_as
from offbeat.config.schema import Section
from offbeat.errors import UserError
from offbeat.planner.inputs import hardware
from offbeat.planner.inputs.hardware import GIGA, TERA, Accelerator, Inventory, Link, MachineClass
from offbeat.spelling import suggest

# Rates in [links] are in GB/s, one way, per node. Between zones, all nodes of two classes share one link; elsewhere
# each node has its own link, unless a pair has `shared = true`.

LATENCY_MS = 0.05
LEAST_GB_S = 1e-4
"""Lowest accepted rate; a lower rate was probably given in another unit."""
MOST_BETWEEN_ZONES_GB_S = 50.0
"""Highest accepted rate between zones: 400 Gbit/s, which a single sender does not reach between sites."""
Pair = frozenset[str]
Rows = Mapping[str, Mapping[str, float]]


class PairTable(Section):
    between: list[str] = Field(min_length=2, max_length=2)
    gb_s: float = Field(gt=0)
    shared: bool = False
    latency_ms: float = Field(LATENCY_MS, ge=0)


class Links(Section):
    between_nodes: float | None = Field(None, gt=0)
    between_classes: float | None = Field(None, gt=0)
    between_zones: float | None = Field(None, gt=0)
    zone_latency_ms: float = Field(20.0, ge=0)
    pair: list[PairTable] = Field(default_factory=list)
    matrix: dict[str, dict[str, float]] | None = None
    matrix_file: str | None = None


def resolve(
    links: Links,
    classes: Mapping[str, MachineClass],
    own: Mapping[str, float],
    origin: ValueOrigin,
    assumptions: list[str],
) -> tuple[dict[Pair, Link], dict[str, Link]]:
    """Returns the links by pair of classes (a class with itself: between its nodes), and the default links for machines
    added later, by kind (`nodes`, `classes` or `zones`). `own` holds the rate between two nodes of a class in GB/s, by
    class. Appends a sentence to `assumptions` for each guess."""
    defaults = _defaults(links)
    pairs = _pairs(links, classes, origin)
    measured = _measured(links, classes, origin, assumptions)
    found: dict[Pair, Link] = {}
    for one, other in itertools.combinations_with_replacement(classes, 2):
        key, is_near = frozenset((one, other)), classes[one].zone == classes[other].zone
        kind = "zones" if not is_near else "nodes" if one == other else "classes"
        if key in pairs:
            link: Link | None = pairs[key]
        elif key in measured:
            link = Link(measured[key] * GIGA)
        elif one == other and one in own:
            link = Link(own[one] * GIGA)
        else:
            link = defaults.get(kind)
        if link is not None:
            _check(key, link, classes, kind, origin)
            found[key] = link
        elif one != other or classes[one].num_nodes > 1:
            raise _missing(one, other, kind, origin)
    return found, defaults


def _defaults(links: Links) -> dict[str, Link]:
    found = {}
    if links.between_nodes is not None:
        found["nodes"] = Link(links.between_nodes * GIGA)
    if links.between_classes is not None:
        found["classes"] = Link(links.between_classes * GIGA)
    if links.between_zones is not None:
        found["zones"] = Link(links.between_zones * GIGA, links.zone_latency_ms / 1e3, is_shared=True)
    return found


def _pairs(links: Links, classes: Mapping[str, MachineClass], origin: ValueOrigin) -> dict[Pair, Link]:
    """Returns the links of [[links.pair]] by pair of classes. An entry that names classes overrides one that names
    their zones."""
    zones: dict[str, list[str]] = {}
    for name, machines in classes.items():
        zones.setdefault(machines.zone, []).append(name)
    found: dict[Pair, tuple[int, Link]] = {}
    said: set[Pair] = set()
    for index, table in enumerate(links.pair):
        place: Path = ("links", "pair", index, "between")
        what = f"{origin.before(place)}links.pair.{index}.between = {show(table.between)}"
        for name in table.between:
            if name not in classes and name not in zones:
                known = [*classes, *(zone for zone in zones if zone not in classes)]
                raise UserError(f"{what}: no class or zone {name!r}; {suggest(name, known)}")
        if frozenset(table.between) in said:
            raise UserError(f"{what}: this pair is given twice; keep one of the two")
        said.add(frozenset(table.between))
        rank = sum(name in classes for name in table.between)
        link = Link(table.gb_s * GIGA, table.latency_ms / 1e3, table.shared)
        ones, others = ([name] if name in classes else zones[name] for name in table.between)
        for one, other in itertools.product(ones, others):
            key = frozenset((one, other))
            if key not in found or rank > found[key][0]:
                found[key] = (rank, link)
    return {key: link for key, (_, link) in found.items()}


def _measured(
    links: Links, classes: Mapping[str, MachineClass], origin: ValueOrigin, assumptions: list[str]
) -> dict[Pair, float]:
    """Returns the rates in GB/s by pair of classes, from the measured matrix. Of the two directions, the slower one
    counts."""
    if links.matrix is not None and links.matrix_file is not None:
        where = origin.before(("links", "matrix_file"))
        raise UserError(f"{where}links.matrix_file and [links.matrix] are both given; keep one of them")
    if links.matrix is not None:
        where, rows = f"{origin.before(('links', 'matrix'))}[links.matrix]", links.matrix
    elif links.matrix_file is not None:
        file = pathlib.Path(origin.file or "").parent / links.matrix_file
        where, rows = str(file), _read_matrix(file, f"{origin.before(('links', 'matrix_file'))}links.matrix_file")
    else:
        return {}
    _check_square(where, rows, classes)
    for one, other in itertools.combinations(rows, 2):
        if rows[one][other] != rows[other][one]:
            slow = min(rows[one][other], rows[other][one])
            assumptions.append(f"{one} and {other}: the slower direction, {slow:g} GB/s, counts for both directions")
    return {frozenset((one, other)): min(rows[one][other], rows[other][one]) for one in rows for other in rows}


def _read_matrix(file: pathlib.Path, what: str) -> dict[str, dict[str, float]]:
    """Reads a CSV file whose first row and first column are names of classes; `what` names the setting in errors."""
    try:
        lines = [line for line in csv.reader(file.read_text("utf-8").splitlines()) if line]
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UserError(f"{what} = {show(str(file))}: cannot be read: {reason}") from error
    if not lines:
        raise UserError(f"{file} is empty; it must be a CSV file whose first row and first column name the classes")
    names = [name.strip() for name in lines[0][1:]]
    rows: dict[str, dict[str, float]] = {}
    for number, (name, *cells) in enumerate(lines[1:], 2):
        try:
            rows[name.strip()] = dict(zip(names, map(float, cells), strict=True))
        except ValueError:
            raise UserError(f"{file}:{number}: the row of {name!r} must have {len(names)} numbers, in GB/s") from None
    return rows


def _check_square(where: str, rows: Rows, classes: Mapping[str, MachineClass]) -> None:
    for name in {*rows, *(other for row in rows.values() for other in row)}:
        if name not in classes:
            raise UserError(f"{where}: there is no class {name!r}; {suggest(name, classes)}")
    for one in classes:
        if one not in rows:
            raise UserError(f"{where} is not square: the row of {one!r} is missing; add it")
        for other in classes:
            if other not in rows[one]:
                raise UserError(f"{where} is not square: the row of {one!r} lacks {other!r}; add it")
            if not rows[one][other] > 0:
                raise UserError(f"{where}: {one!r} to {other!r} is {rows[one][other]:g} GB/s; it must be above 0")


def _missing(one: str, other: str, kind: str, origin: ValueOrigin) -> UserError:
    remedy = f"links.between_{kind}, or [[links.pair]] with between = {show([one, other])} and gb_s"
    who = f"two nodes of {one}" if one == other else f"{one} and {other}"
    return UserError(f"{origin.before(('links',))}the rate between {who} is not given; add {remedy}")


def _check(key: Pair, link: Link, classes: Mapping[str, MachineClass], kind: str, origin: ValueOrigin) -> None:
    """Raises `UserError` if a link's rate is below `LEAST_GB_S`, above `MOST_BETWEEN_ZONES_GB_S` between zones, or more
    than a node can send. A node sends at most the sum of the rates between its accelerators and their host."""
    gb_s, who = link.bytes_per_s / GIGA, " and ".join(sorted(key))
    say = f"{origin.before(('links',))}the rate between nodes of {who}, {gb_s:g} GB/s"
    if gb_s < LEAST_GB_S:
        raise UserError(f"{say}: allowed {LEAST_GB_S:g} or more; is it in TB/s, perhaps?")
    buses = {name: classes[name].per_node * classes[name].accelerator.host_bytes_per_s / GIGA for name in key}
    slow = min(buses, key=buses.__getitem__)
    if gb_s > buses[slow]:
        what = f"a node of {slow} sends {buses[slow]:g} GB/s at most ({classes[slow].per_node} x host_gb_s)"
        raise UserError(f"{say}: {what}; if the rate is in Gbit/s, write {gb_s / 8:g}")
    if kind == "zones" and gb_s > MOST_BETWEEN_ZONES_GB_S:
        most = f"allowed {MOST_BETWEEN_ZONES_GB_S:g} or less between zones"
        raise UserError(f"{say}: {most}; if the rate is in Gbit/s, write {gb_s / 8:g}")


FIGURES: dict[str, tuple[str, float]] = {
    "tflops": ("flops", TERA),
    "fp8_tflops": ("fp8_flops", TERA),
    "memory_gb": ("memory_bytes", GIGA),
    "bandwidth_tb_s": ("memory_bytes_per_s", TERA),
    "link_gb_s": ("link_bytes_per_s", GIGA),
    "host_gb_s": ("host_bytes_per_s", GIGA),
}
"""Keys of an accelerator's numbers in a file, each with its field of `Accelerator` and its unit."""
SANE: dict[str, tuple[float, float, str, str]] = {
    "tflops": (1, 20_000, "PFLOPS", "GFLOPS"),
    "fp8_tflops": (1, 40_000, "PFLOPS", "GFLOPS"),
    "memory_gb": (1, 2_000, "TB", "MB"),
    "bandwidth_tb_s": (0.02, 50, "PB/s", "GB/s"),
    "link_gb_s": (1, 4_000, "TB/s", "MB/s"),
    "host_gb_s": (1, 1_000, "TB/s", "MB/s"),
}
"""For each key: the smallest and the largest accepted number, the unit in which a smaller number was probably given,
and the unit in which a larger one was. The upper limits will have to rise with new hardware."""
CPU = "cpu"
CPU_SANE = SANE | {"tflops": (0.001, 100, "PFLOPS", "GFLOPS"), "bandwidth_tb_s": (0.001, 5, "PB/s", "GB/s")}
"""Accepted ranges for the class `cpu`, which stands for processors without an accelerator; calibration uses the same
name."""
HOST_GB_S = 32.0
"""Rate of PCIe 4 x16, assumed for a card that is not in the catalogue."""
MOST_PER_ACCELERATOR_H = 100.0


class ClassTable(Section):
    accelerator: str | None = None
    tflops: float | None = Field(None, gt=0)
    fp8_tflops: float | None = Field(None, gt=0)
    memory_gb: float | None = Field(None, gt=0)
    bandwidth_tb_s: float | None = Field(None, gt=0)
    link_gb_s: float | None = Field(None, gt=0)
    host_gb_s: float | None = Field(None, gt=0)
    nodes: int = Field(ge=1)
    per_node: int = Field(ge=1)
    price: float | None = Field(None, ge=0)
    zone: str = "here"
    owned: bool = False
    reclaims_per_h: float = Field(0.0, ge=0, le=60)
    restart_s: float | None = Field(None, ge=0)
    between_nodes: float | None = Field(None, gt=0)


class ClusterFile(Section):
    classes: dict[str, ClassTable] = Field(min_length=1)
    links: Links = Links()


EXAMPLE = 'classes.h100 = {accelerator = "h100-sxm", nodes = 2, per_node = 8} and links.between_nodes = 25.0'


def _refusal(data: Mapping[str, Any]) -> str:
    """Returns why a file with the content `data` cannot describe a cluster; "" if it can."""
    if "model" in data and "classes" not in data:
        return "describes a workload; give the cluster's file first, as in offbeat plan CLUSTER.toml WORKLOAD.toml"
    return f"classes is missing; name your machines, for example {EXAMPLE}" if set(data) <= {"links"} else ""


def load_inventory(path: pathlib.Path | str) -> Inventory:
    """Reads the machines and links of a cluster file."""
    file, origin = load_as(path, ClusterFile, _refusal)
    assumptions: list[str] = []
    classes = {name: _class(name, table, origin, assumptions) for name, table in file.classes.items()}
    own = {name: table.between_nodes for name, table in file.classes.items() if table.between_nodes is not None}
    links, defaults = resolve(file.links, classes, own, origin, assumptions)
    return Inventory(classes, links, defaults, tuple(assumptions))


def _class(name: str, table: ClassTable, origin: ValueOrigin, assumptions: list[str]) -> MachineClass:
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
        has_catalogue_price=table.price is None and not table.owned,
        reclaims_per_h=table.reclaims_per_h,
        restart_s=_restart_s(name, table, origin, assumptions),
    )


def _restart_s(name: str, table: ClassTable, origin: ValueOrigin, assumptions: list[str]) -> float:
    if table.restart_s is not None and not table.reclaims_per_h:
        where = origin.before(("classes", name, "restart_s"))
        raise UserError(
            f"{where}classes.{name}.restart_s counts only for nodes that are taken back; set reclaims_per_h"
        )
    seconds = MachineClass.restart_s if table.restart_s is None else table.restart_s
    if table.reclaims_per_h:
        assumptions.append(
            f"{name}: each node is taken back {table.reclaims_per_h:g} times an hour, and replaced after {seconds:g} s"
        )
    return seconds


def _accelerator(name: str, table: ClassTable, origin: ValueOrigin, assumptions: list[str]) -> Accelerator:
    place: Path = ("classes", name)
    own = {FIGURES[key][0]: value * FIGURES[key][1] for key in FIGURES if (value := getattr(table, key)) is not None}
    if table.accelerator is not None:
        try:
            card = hardware.accelerator(table.accelerator)
        except UserError as error:
            raise UserError(f"{origin.before((*place, 'accelerator'))}classes.{name}.{error}") from None
        if not hardware.is_name(table.accelerator):
            assumptions.append(f'{name}: "{table.accelerator}" stands for {card.name}')
        return dataclasses.replace(card, **own, source=f"{card.source}; some figures given") if own else card
    needed = ["tflops", "memory_gb", "bandwidth_tb_s", *(["link_gb_s"] if table.per_node > 1 else [])]
    missing = [key for key in needed if getattr(table, key) is None]
    if missing:
        says = "accelerator is missing" if len(missing) == len(needed) else f"{', '.join(missing)} is missing"
        remedy = f"give an accelerator of the catalogue, or {', '.join(needed)}"
        raise UserError(f"{origin.before(place)}[classes.{name}]: {says}; {remedy}")
    if table.host_gb_s is None:
        own["host_bytes_per_s"] = HOST_GB_S * GIGA
        assumptions.append(f"{name}: {HOST_GB_S:g} GB/s to the host's memory, as PCIe 4 has")
    own.setdefault("link_bytes_per_s", own["host_bytes_per_s"])  # unused: a single card per node
    return Accelerator(name=name, **own)


def _price(name: str, table: ClassTable, card: Accelerator, origin: ValueOrigin, assumptions: list[str]) -> float:
    place: Path = ("classes", name, "price")
    if table.price is not None:
        if table.price > MOST_PER_ACCELERATOR_H:
            what = f"classes.{name}.price = {show(table.price)}: allowed up to {MOST_PER_ACCELERATOR_H:g} $/h per card"
            each = f"if that is the price of a node of {table.per_node} cards, write {table.price / table.per_node:.4g}"
            raise UserError(f"{origin.before(place)}{what}; {each}")
        return table.price
    if table.owned:
        assumptions.append(f"{name}: owned, so its price counts as 0; set classes.{name}.price to count a price")
        return 0.0
    if card.price_per_h is None:
        known = f"has no price for {card.name}" if table.accelerator else "does not have this accelerator"
        what = f"{origin.before(place)}classes.{name}.price is missing"
        raise UserError(f"{what}, and the catalogue {known}; give $/h per accelerator, or owned = true")
    low, high = hardware.entry(card.name).price_range or (card.price_per_h, card.price_per_h)
    span = f", the geometric mean of {low:g} and {high:g}" if low < high else ""
    assumptions.append(f"{name}: ${card.price_per_h:g}/h per accelerator from the catalogue{span}")
    return card.price_per_h


def check_range(place: Path, value: float | None, sane: tuple[float, float, str, str], origin: ValueOrigin) -> None:
    """Raises `UserError` if `value` is outside its range. `sane` holds the smallest and the largest value, then the
    units to suggest for a smaller and for a larger number."""
    low, high, below, above = sane
    if value is None or low <= value <= high:
        return
    key = ".".join(str(name) for name in place)
    likely = below if value < low else above
    allowed = f"allowed {low:g} to {high:g}; is it in {likely}, perhaps?"
    raise UserError(f"{origin.before(place)}{key} = {show(value)}: {allowed}")
