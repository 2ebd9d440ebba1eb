"""A solution on its machines: which nodes, in which order, how weights reach them, and what that really takes.

Nodes are chosen by what the plan takes on them: first the period, then the seconds of a version's way, then the gang's
step. Where nodes are alike there is nothing to choose.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from offbeat.errors import UserError
from offbeat.plan.cost.constants import Constants
from offbeat.plan.cost.sizes import update_bytes
from offbeat.plan.inputs.hardware import Inventory, at_best
from offbeat.plan.inputs.workload import Workload
from offbeat.plan.place import realised
from offbeat.plan.place.islands import Layout, Placed, lay_gang, pack
from offbeat.plan.place.nodes import Fabric, fabric_of
from offbeat.plan.place.partition import split
from offbeat.plan.place.sync_tree import MAX_IMPROVED, SyncTree, relay, sync_tree
from offbeat.plan.problem import Gang, Problem, RolloutColumn
from offbeat.plan.solution import Solution


@dataclass(frozen=True)
class Placing:
    """A solution, placed."""

    fabric: Fabric
    places: tuple[Placed, ...]
    """Of all replicas."""
    layout: Layout
    tree: SyncTree
    assumed: Gang
    """The gang as its column has it."""
    columns: tuple[RolloutColumn, ...]
    """Rollout columns as they were made."""
    step_s: float
    """The gang's, on these nodes."""
    lags_s: Mapping[str, float]
    """By class that rolls out: until its last node has a version."""
    problem: Problem
    """With the gang and the lags as they are on these nodes, where that is slower."""
    tau_s: float
    """The shortest period at which the solution holds here, not below its own."""


@dataclass(frozen=True)
class Placer:
    """What a solution needs to find its places; `problem` has the columns as they were made, not as corrected."""

    inventory: Inventory
    workload: Workload
    constants: Constants
    problem: Problem

    def best_step_s(self, gang: Gang) -> float:
        """Of a gang that may take any nodes, whatever rolls out."""
        fabric, best = fabric_of(self.inventory), at_best(self.inventory)

        def step_s(trains: frozenset[str], _: frozenset[str]) -> float:
            layout = lay_gang(fabric, gang, in_order(trains))
            return realised.step_s(fabric, best, layout, gang, self.workload, self.constants)

        return step_s(*split(fabric, gang.nodes, {}, step_s))

    def place(self, solution: Solution) -> Placing:
        problem = self.problem
        gang = next(gang for gang in problem.gangs if gang.name == solution.gang)
        fabric, best = fabric_of(self.inventory), at_best(self.inventory)
        num_bytes = update_bytes(self.workload)
        is_apart = not any(column.is_home for column in problem.rollout if column.name in solution.replicas)

        def step_s(layout: Layout) -> float:
            return realised.step_s(fabric, best, layout, gang, self.workload, self.constants)

        def score(trains: frozenset[str], rolls: frozenset[str]) -> tuple[float, ...]:
            layout, lags = lay_gang(fabric, gang, in_order(trains)), {}
            if len(rolls) <= MAX_IMPROVED:  # beyond, a tree for every choice takes longer than it can bring
                generating = rolls if is_apart else generating_on(places_of(fabric, problem, solution, trains, rolls))
                root = root_of(fabric, gang, trains, generating)
                lags = realised.lags_s(fabric, relay(fabric, root, generating, num_bytes), num_bytes)
            took_s = step_s(layout)
            placed = realised.slowed(problem, gang, took_s, lags)
            return realised.enough_s(problem, placed, solution), max(lags.values(), default=0.0), took_s

        trains, rolls = split(fabric, gang.nodes, solution.nodes, score)
        layout = lay_gang(fabric, gang, in_order(trains))
        places = places_of(fabric, problem, solution, trains, rolls)
        generating = rolls | generating_on(places)
        tree = sync_tree(fabric, root_of(fabric, gang, trains, generating), generating, num_bytes)
        lags = realised.lags_s(fabric, tree.senders, num_bytes)
        took_s = step_s(layout)
        placed = realised.slowed(problem, gang, took_s, lags)
        tau_s = realised.period_s(problem, placed, solution)
        return Placing(fabric, tuple(places), layout, tree, gang, problem.rollout, took_s, lags, placed, tau_s)


def places_of(
    fabric: Fabric, problem: Problem, solution: Solution, trains: frozenset[str], rolls: frozenset[str]
) -> list[Placed]:
    """Replicas on the nodes rented for them, or on the gang's own."""
    places: list[Placed] = []
    for offer, (is_home, among) in itertools.product(problem.offers, ((False, rolls), (True, trains))):
        columns = {one.name: one for one in problem.rollout if one.offer == offer and one.is_home == is_home}
        sizes = {name: columns[name].num_accelerators for name in solution.replicas if name in columns}
        nodes = [fabric.nodes[name] for name in in_order(among) if fabric.nodes[name].offer == offer]
        packed = pack(sizes, {name: solution.replicas[name] for name in sizes}, nodes)
        if packed is None:
            raise UserError(f"class {offer}: the replicas of the plan do not fit its {len(nodes)} nodes")
        places += packed
    return places


def generating_on(places: Sequence[Placed]) -> frozenset[str]:
    return frozenset(placed.group.node for placed in places)


def root_of(fabric: Fabric, gang: Gang, trains: frozenset[str], rolls: frozenset[str]) -> str:
    """The training node of the publishing class with the best links to those that roll out; the first where all are
    alike."""
    able = [name for name in in_order(trains) if fabric.nodes[name].offer == gang.root]
    if fabric.is_alike:
        return able[0]
    return max(able, key=lambda name: sum(fabric.bytes_per_s(name, other) for other in sorted(rolls)))


def in_order(names: frozenset[str]) -> list[str]:
    return sorted(names, key=lambda name: (name.rpartition("-")[0], int(name.rpartition("-")[2])))
