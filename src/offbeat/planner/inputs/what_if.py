"""Changes to an inventory: more or fewer nodes of a class, or a new class from the catalogue."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from offbeat.errors import UserError
from offbeat.planner.inputs import hardware
from offbeat.planner.inputs.hardware import Inventory, Link, MachineClass
from offbeat.spelling import suggest

PER_NODE = 8
"""Number of accelerators per node of a new class."""


def parse_changes(words: Sequence[str], option: str) -> dict[str, int]:
    """Parses words such as `h20:2` into numbers of nodes by name; a name alone means one node. `option` names the
    command-line option in errors."""
    found: dict[str, int] = {}
    for word in words:
        name, _, number = word.rpartition(":") if ":" in word else (word, "", "1")
        if not name or not number.isascii() or not number.isdigit() or int(number) < 1:
            raise UserError(f"{option} {word}: write NAME:NODES with 1 node or more, as in h20:2")
        found[name] = found.get(name, 0) + int(number)
    return found


def changed(
    inventory: Inventory, add: Mapping[str, int] | None = None, remove: Mapping[str, int] | None = None
) -> Inventory:
    """Returns the inventory with nodes added, then removed. Keys are names of classes, or of accelerators in the
    catalogue."""
    for name, num_nodes in (add or {}).items():
        inventory = _added(inventory, name, num_nodes)
    for name, num_nodes in (remove or {}).items():
        inventory = _removed(inventory, name, num_nodes)
    return inventory


def _added(inventory: Inventory, name: str, num_nodes: int) -> Inventory:
    found = _find(inventory, name, "add")
    if found is None:
        return _with_new_class(inventory, name, num_nodes)
    machines = inventory.classes[found]
    total = machines.num_nodes + num_nodes
    if total > 1 and frozenset((found,)) not in inventory.links:
        remedy = f"links.between_nodes or classes.{found}.between_nodes in the cluster's file"
        raise UserError(f"add {name}: the rate between two nodes of {found} is not given; add {remedy}")
    return _with(inventory, dataclasses.replace(machines, num_nodes=total))


def _removed(inventory: Inventory, name: str, num_nodes: int) -> Inventory:
    found = _find(inventory, name, "remove")
    if found is None:
        raise UserError(f"remove {name}: no class has this accelerator; {suggest(name, inventory.classes)}")
    machines = inventory.classes[found]
    left = machines.num_nodes - num_nodes
    if left < 0:
        raise UserError(f"remove {name}:{num_nodes}: too many nodes; class {found} has {machines.num_nodes}")
    if left:
        return _with(inventory, dataclasses.replace(machines, num_nodes=left))
    classes = {other: kept for other, kept in inventory.classes.items() if other != found}
    if not classes:
        raise UserError(f"remove {name}:{num_nodes}: no node would be left in the cluster; keep at least one")
    links = {pair: link for pair, link in inventory.links.items() if found not in pair}
    return dataclasses.replace(inventory, classes=classes, links=links)


def _find(inventory: Inventory, name: str, verb: str) -> str | None:
    """Returns the class that has this name or this accelerator; None if the catalogue has the accelerator but no class
    uses it. `verb` appears in errors."""
    if name in inventory.classes:
        return name
    if not hardware.is_known(name):
        choices = [*inventory.classes, *(other for other in hardware.names() if other not in inventory.classes)]
        raise UserError(f"{verb} {name}: neither a class nor an accelerator of the catalogue; {suggest(name, choices)}")
    wanted = hardware.accelerator(name).name
    having = [one for one, machines in inventory.classes.items() if machines.accelerator.name == wanted]
    if len(having) > 1:
        raise UserError(f"{verb} {name}: several classes have this accelerator; name one of {', '.join(having)}")
    return having[0] if having else None


def _with(inventory: Inventory, machines: MachineClass) -> Inventory:
    return dataclasses.replace(inventory, classes={**inventory.classes, machines.name: machines})


def _with_new_class(inventory: Inventory, name: str, num_nodes: int) -> Inventory:
    card = hardware.accelerator(name)
    zones = {machines.zone for machines in inventory.classes.values()}
    needed: dict[str, Link | None] = {"classes": inventory.default_links.get("classes")}
    if num_nodes > 1:
        needed["nodes"] = inventory.default_links.get("nodes")
    missing = [f"links.between_{kind}" for kind, link in needed.items() if link is None]
    keys = [*missing, *(["zone"] if len(zones) > 1 else []), *(["price"] if card.price_per_h is None else [])]
    if keys or card.price_per_h is None:
        lacks = f"no class has this accelerator, and for a new class there is no default for {', '.join(keys)}"
        raise UserError(f"add {name}: {lacks}; add the class to the cluster's file")
    zone = next(iter(zones))
    new = MachineClass(name, card, PER_NODE, num_nodes, card.price_per_h, zone, has_catalogue_price=True)
    links = {**inventory.links}
    links.update({frozenset((name, other)): inventory.default_links["classes"] for other in inventory.classes})
    if "nodes" in inventory.default_links:
        links[frozenset((name,))] = inventory.default_links["nodes"]
    assumption = f"{name}: a new class, {PER_NODE} per node, ${card.price_per_h:g}/h each; links by the file's defaults"
    grown = dataclasses.replace(inventory, links=links, assumptions=(*inventory.assumptions, assumption))
    return _with(grown, new)
