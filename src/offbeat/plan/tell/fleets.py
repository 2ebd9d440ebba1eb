"""Cost against throughput: the best plans of an inventory, those of each class alone for the same money, and the split
that AReaL-Hex evidently ran."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from offbeat.errors import UserError
from offbeat.plan.columns.columns import problem_of
from offbeat.plan.cost.constants import Constants
from offbeat.plan.inputs.hardware import Inventory
from offbeat.plan.inputs.shapes import weight_bytes
from offbeat.plan.inputs.workload import Workload
from offbeat.plan.problem import RolloutColumn
from offbeat.plan.solve.search import fastest, frontier

NUM_POINTS = 12
COPIES = 5.0
"""Of the weights over the link between training and rollouts: AReaL-Hex's published update times come to 4.2, 5.7 and
5.7 of them."""


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


def split_by_class(inventory: Inventory, workload: Workload, constants: Constants | None = None) -> Point | None:
    """What AReaL-Hex (arXiv 2511.00796) evidently ran: the class with the most FLOPS an accelerator trains and all
    others generate, every machine is rented, and several copies of the weights cross the link while generation waits.
    Shapes, and what is in flight, are the best that our columns allow. None where there is no such plan."""
    trainer = max(inventory.classes, key=lambda name: inventory.classes[name].accelerator.flops)
    problem = problem_of(inventory, workload, constants)
    narrowed = dataclasses.replace(
        problem,
        gangs=tuple(gang for gang in problem.gangs if set(gang.nodes) == {trainer}),
        rollout=tuple(
            _waiting(column, COPIES * weight_bytes(workload.model) / inventory.link(trainer, column.offer).bytes_per_s)
            for column in problem.rollout
            if column.offer != trainer
        ),
    )
    if not narrowed.gangs or not narrowed.rollout:
        return None
    result = fastest(narrowed)
    if result.solution is None:
        return None
    rent = sum(offer.num_nodes * offer.node_price_per_h for offer in problem.offers.values())
    return Point(rent + problem.fixed_price_per_h, problem.demand.tokens / result.solution.tau_s)


def _waiting(column: RolloutColumn, seconds: float) -> RolloutColumn:
    """The same, with so much longer without generation per version."""
    return dataclasses.replace(column, blocking_s={root: lost + seconds for root, lost in column.blocking_s.items()})
