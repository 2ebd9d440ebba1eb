"""The [links] of a cluster's file: what a node can send to another, for every pair of classes that can meet.

GB/s, one way, per node. Between zones all nodes of two classes share one link; elsewhere each node has its own, unless
a pair says `shared = true`.
"""

from __future__ import annotations

import csv
import itertools
import pathlib
from collections.abc import Mapping

from pydantic import Field

from offbeat.config.explain import Origin, show
from offbeat.config.lines import Path
from offbeat.config.section import Section
from offbeat.errors import UserError
from offbeat.plan.inputs.hardware import Link, MachineClass
from offbeat.spelling import suggest

GIGA = 1e9
LATENCY_MS = 0.05
LEAST_GB_S = 1e-4
"""Under a megabit a second nobody trains: it is in another unit."""
MOST_BETWEEN_ZONES_GB_S = 50.0
"""400 Gbit/s: more than one sender gets between sites."""
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
    origin: Origin,
    assumptions: list[str],
) -> tuple[dict[Pair, Link], dict[str, Link]]:
    """The link of every pair that has one, and those of machines that nobody named; `own` is inside a class."""
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


def _pairs(links: Links, classes: Mapping[str, MachineClass], origin: Origin) -> dict[Pair, Link]:
    """Links by pairs of classes; those that name two classes win over those that name zones."""
    zones: dict[str, list[str]] = {}
    for name, machines in classes.items():
        zones.setdefault(machines.zone, []).append(name)
    found: dict[Pair, tuple[int, Link]] = {}
    said: set[Pair] = set()
    for index, table in enumerate(links.pair):
        place: Path = ("links", "pair", index, "between")
        for name in table.between:
            if name not in classes and name not in zones:
                known = [*classes, *(zone for zone in zones if zone not in classes)]
                told = f"links.pair.{index}.between = {show(table.between)}"
                raise UserError(f"{origin.before(place)}{told}: no class or zone {name!r}; {suggest(name, known)}")
        if frozenset(table.between) in said:
            raise UserError(
                f"{origin.before(place)}links.pair.{index}.between = {show(table.between)}: was said before"
            )
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
    links: Links, classes: Mapping[str, MachineClass], origin: Origin, assumptions: list[str]
) -> dict[Pair, float]:
    """GB/s by pairs, from the matrix; the slower way counts where the two ways differ."""
    if links.matrix is not None and links.matrix_file is not None:
        raise UserError(
            f"{origin.before(('links', 'matrix_file'))}links.matrix_file: [links.matrix] is there too; keep one"
        )
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
            assumptions.append(f"{one} and {other}: measured differently each way, {slow:g} GB/s counts both ways")
    return {frozenset((one, other)): min(rows[one][other], rows[other][one]) for one in rows for other in rows}


def _read_matrix(file: pathlib.Path, told: str) -> dict[str, dict[str, float]]:
    """A CSV whose first row and column are names of classes."""
    try:
        lines = [line for line in csv.reader(file.read_text("utf-8").splitlines()) if line]
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no UTF-8 text"
        raise UserError(f"{told} = {show(str(file))}: cannot be read: {reason}") from error
    if not lines:
        raise UserError(f"{file}: is empty; its first row and column should be names of classes")
    names = [name.strip() for name in lines[0][1:]]
    rows: dict[str, dict[str, float]] = {}
    for number, (name, *cells) in enumerate(lines[1:], 2):
        try:
            rows[name.strip()] = dict(zip(names, map(float, cells), strict=True))
        except ValueError:
            raise UserError(f"{file}:{number}: wants {len(names)} numbers in GB/s after {name!r}") from None
    return rows


def _check_square(where: str, rows: Rows, classes: Mapping[str, MachineClass]) -> None:
    for name in {*rows, *(other for row in rows.values() for other in row)}:
        if name not in classes:
            raise UserError(f"{where}: there is no class {name!r}; {suggest(name, classes)}")
    for one in classes:
        if one not in rows:
            raise UserError(f"{where}: is not square: the row of {one!r} is missing")
        for other in classes:
            if other not in rows[one]:
                raise UserError(f"{where}: is not square: the row of {one!r} lacks {other!r}")
            if not rows[one][other] > 0:
                raise UserError(f"{where}: {one!r} to {other!r} = {rows[one][other]:g}: allowed more than 0, in GB/s")


def _missing(one: str, other: str, kind: str, origin: Origin) -> UserError:
    remedy = f"links.between_{kind}, or [[links.pair]] with between = {show([one, other])} and gb_s"
    who = f"two nodes of {one}" if one == other else f"{one} and {other}"
    return UserError(f"{origin.before(('links',))}nothing says how fast {who} reach each other; add {remedy}")


def _check(key: Pair, link: Link, classes: Mapping[str, MachineClass], kind: str, origin: Origin) -> None:
    """Refuses what no node can send: its network cards sit on the same buses as its accelerators."""
    gb_s, who = link.bytes_per_s / GIGA, " and ".join(sorted(key))
    say = f"{origin.before(('links',))}the link of {who}, {gb_s:g} GB/s"
    if gb_s < LEAST_GB_S:
        raise UserError(f"{say}: allowed {LEAST_GB_S:g} or more; is it in TB/s, perhaps?")
    buses = {name: classes[name].per_node * classes[name].accelerator.host_bytes_per_s / GIGA for name in key}
    slow = min(buses, key=buses.__getitem__)
    if gb_s > buses[slow]:
        told = f"a node of {slow} has {classes[slow].per_node} buses and moves {buses[slow]:g} GB/s at most"
        raise UserError(f"{say}: {told}; is it in Gbit/s? then write {gb_s / 8:g}")
    if kind == "zones" and gb_s > MOST_BETWEEN_ZONES_GB_S:
        most = f"allowed {MOST_BETWEEN_ZONES_GB_S:g} or less between zones"
        raise UserError(f"{say}: {most}; is it in Gbit/s? then write {gb_s / 8:g}")
