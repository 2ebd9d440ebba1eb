"""Cost against throughput: the best plans of an inventory, and those of each class alone for the same money."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from offbeat.errors import UserError
from offbeat.plan.columns import problem_of
from offbeat.plan.cost.constants import Constants
from offbeat.plan.hardware import Inventory
from offbeat.plan.search import frontier
from offbeat.plan.workload import Workload

NUM_POINTS = 12


@dataclass(frozen=True)
class Point:
    price_per_h: float
    tokens_per_s: float


def mixed(inventory: Inventory, workload: Workload, constants: Constants | None = None) -> list[Point]:
    """The frontier of all classes together, the fastest first."""
    results = frontier(problem_of(inventory, workload, constants), NUM_POINTS)
    return [Point(result.price_per_h, result.tokens_per_s) for result in results]


def homogeneous(
    inventory: Inventory, workload: Workload, constants: Constants | None = None
) -> Mapping[str, list[Point]]:
    """By class: its frontier alone, with as many nodes as the price of the whole inventory buys; empty where the model
    fits no such fleet."""
    money = sum(machines.node_price_per_h * machines.num_nodes for machines in inventory.classes.values())
    found: dict[str, list[Point]] = {}
    for name in inventory.classes:
        try:
            found[name] = mixed(alone(inventory, name, money), workload, constants)
        except UserError:
            found[name] = []
    return found


def alone(inventory: Inventory, name: str, money_per_h: float) -> Inventory:
    """One class of an inventory; one that is owned, or has no link between its nodes, stays as large as it is."""
    machines = inventory.classes[name]
    link = inventory.links.get(frozenset((name,)))
    if machines.node_price_per_h and link is not None:
        machines = dataclasses.replace(machines, num_nodes=max(1, int(money_per_h / machines.node_price_per_h + 1e-9)))
    links = {} if link is None else {frozenset((name,)): link}
    return Inventory({name: machines}, links, inventory.default_links)
