"""Placement of a solution: which nodes train and which generate, the weights' paths, and the resulting period.

Nodes are chosen for the shortest period (time from one step to the next). Ties are decided by the shortest lag (time
until all rollout nodes have a new version), then by the shortest training step. If nodes are interchangeable, the first
are taken.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import networkx as nx

from offbeat.errors import UserError
from offbeat.planner.cost.constants import Constants
from offbeat.planner.cost.sizes import update_bytes
from offbeat.planner.inputs.hardware import Inventory, at_best
from offbeat.planner.inputs.workload import Workload
from offbeat.planner.place import realised
from offbeat.planner.place.islands import Placed, Stages, lay_gang, pack
from offbeat.planner.place.nodes import NodeFabric, by_class, class_and_number, fabric_of
from offbeat.planner.place.sync_tree import MAX_IMPROVED, SyncTree, relay, sync_tree
from offbeat.planner.problem import Gang, PlanningProblem, RolloutColumn, Solution

Score = TypeVar("Score", float, tuple[float, ...])
Counts = Mapping[str, int]
Members = Mapping[str, list[str]]
"""Names of nodes by class."""
Cost = Callable[[frozenset[str], frozenset[str]], Score]
"""Returns the cost of a split of the nodes, given the names of the training nodes and of the rollout nodes."""
MAX_TRIED = 300
MAX_REFINED = 3_000
"""Largest number of exchanges of two nodes that `_refined` tries; with many nodes, one pass would try thousands."""
SEED = 0


def split(
    fabric: NodeFabric, training: Counts, rollout: Counts, cost: Cost[Score]
) -> tuple[frozenset[str], frozenset[str]]:
    """Chooses nodes with a low `cost`; returns the names of the training nodes and of the rollout nodes. `training` and
    `rollout` hold how many nodes of each class are needed; the other nodes stay idle.

    Interchangeable nodes are taken in order. If there are few choices, all are tried. Otherwise two splits are
    compared: one with little bandwidth between training nodes and others (Kernighan-Lin), and one in which the nodes
    with the best links train. The better split is improved by exchanges of two nodes (Fiduccia-Mattheyses)."""
    members = by_class(fabric, fabric.nodes)
    if fabric.is_alike:
        return _sides(_in_order(members, training, rollout))
    if _num_choices(members, training, rollout) <= MAX_TRIED:
        return min((_sides(side_of) for side_of in _choices(members, training, rollout)), key=lambda pair: cost(*pair))
    starts = [_bisected(fabric, members, training, rollout), _well_linked(fabric, members, training, rollout)]
    return _sides(_refined(min(starts, key=lambda side_of: cost(*_sides(side_of))), members, cost))


def _in_order(members: Members, training: Counts, rollout: Counts) -> dict[str, str]:
    """Returns the side of each node: the first nodes of a class train ("train"), the next generate ("roll"), and the
    others stay idle ("idle")."""
    side_of: dict[str, str] = {}
    for offer, names in members.items():
        first, then = training.get(offer, 0), rollout.get(offer, 0)
        assert first + then <= len(names), f"bug: {first} nodes of {offer} train, {then} generate, {len(names)} exist"
        side_of |= dict(zip(names, ["train"] * first + ["roll"] * then + ["idle"] * len(names), strict=False))
    return side_of


def _sides(side_of: Mapping[str, str]) -> tuple[frozenset[str], frozenset[str]]:
    training, rollout = ([name for name, at in side_of.items() if at == side] for side in ("train", "roll"))
    return frozenset(training), frozenset(rollout)


def _num_choices(members: Members, training: Counts, rollout: Counts) -> int:
    counts = [(len(names), training.get(offer, 0), rollout.get(offer, 0)) for offer, names in members.items()]
    return math.prod(math.comb(n, t) * math.comb(n - t, r) for n, t, r in counts)


def _choices(members: Members, training: Counts, rollout: Counts) -> Iterator[dict[str, str]]:
    def of_class(offer: str, names: list[str]) -> Iterator[dict[str, str]]:
        for trains in itertools.combinations(names, training.get(offer, 0)):
            left = [name for name in names if name not in trains]
            for rolls in itertools.combinations(left, rollout.get(offer, 0)):
                yield dict.fromkeys(names, "idle") | dict.fromkeys(trains, "train") | dict.fromkeys(rolls, "roll")

    for parts in itertools.product(*(of_class(offer, names) for offer, names in members.items())):
        yield {name: side for part in parts for name, side in part.items()}


def _bisected(fabric: NodeFabric, members: Members, training: Counts, rollout: Counts) -> dict[str, str]:
    """Returns the side of each node (train, roll or idle). In each class, the training nodes are chosen to have little
    bandwidth to the other nodes."""
    ordered = {}
    for offer, names in members.items():
        first = training.get(offer, 0)
        if 0 < first < len(names):
            halves = (set(names[:first]), set(names[first:]))
            trains, others = nx.community.kernighan_lin_bisection(fabric.graph(names), halves, seed=SEED)
            names = sorted(trains) + sorted(others) if len(trains) == first else sorted(others) + sorted(trains)
        ordered[offer] = names
    return _in_order(ordered, training, rollout)


def _well_linked(fabric: NodeFabric, members: Members, training: Counts, rollout: Counts) -> dict[str, str]:
    """Returns the side of each node (train, roll or idle). In each class, the nodes with the best measured links train,
    and the nodes with the worst stay idle."""
    rates: dict[str, list[float]] = {}
    for pair, rate in fabric.measured.items():
        for name in pair:
            rates.setdefault(name, []).append(math.log(rate / fabric.link(*pair).bytes_per_s))
    ordered = {offer: sorted(names, key=lambda name: -sum(rates.get(name, []))) for offer, names in members.items()}
    return _in_order(ordered, training, rollout)


def _refined(side_of: dict[str, str], members: Members, cost: Cost[Score]) -> dict[str, str]:
    best, best_cost, num_left = side_of, cost(*_sides(side_of)), MAX_REFINED
    while True:
        now, free, trail = best, set(best), []
        while swaps := [(one, other) for names in members.values() for one, other in itertools.combinations(names, 2)
                        if one in free and other in free and now[one] != now[other]][:num_left]:  # fmt: skip
            num_left -= len(swaps)
            trials = [({**now, one: now[other], other: now[one]}, one, other) for one, other in swaps]
            costs = [cost(*_sides(trial)) for trial, _, _ in trials]
            now, one, other = trials[costs.index(min(costs))]
            free -= {one, other}
            trail.append((min(costs), now))
        if not trail or min(trail, key=lambda step: step[0])[0] >= best_cost:
            return best
        best_cost, best = min(trail, key=lambda step: step[0])


@dataclass(frozen=True)
class Placing:
    """The gang and the replicas of a plan on concrete nodes, with the resulting step time, version lags and period."""

    places: list[Placed]
    """The cards of each replica."""
    stages: Stages
    tree: SyncTree
    assumed: Gang
    """The training gang with the step time that was assumed before placement."""
    columns: tuple[RolloutColumn, ...]
    """The rollout columns (replica shapes) with the lags that were assumed before placement."""
    step_s: float
    """Seconds of the gang's training step on these nodes."""
    lags: realised.Arrivals
    problem: PlanningProblem
    """The planning problem after placement: a step time or lag that is longer on these nodes replaces the assumed
    one."""
    tau_s: float
    """Shortest period in seconds at which the solution meets all constraints on these nodes; at least
    `Solution.tau_s`."""


@dataclass(frozen=True)
class Placer:
    """Chooses concrete nodes for solutions of `problem`. The times in `problem` assume the best links of the
    inventory."""

    inventory: Inventory
    workload: Workload
    constants: Constants
    problem: PlanningProblem

    def best_step_s(self, gang: Gang) -> float:
        """Seconds of a gang's training step on the best nodes for it, as if rollout needed none of them."""
        fabric, best = fabric_of(self.inventory), at_best(self.inventory)

        def step_s(trains: frozenset[str], _: frozenset[str]) -> float:
            stages = lay_gang(fabric, gang, in_order(trains))
            return realised.step_s(fabric, best, stages, gang, self.workload, self.constants)

        return step_s(*split(fabric, gang.nodes, {}, step_s))

    def place(self, solution: Solution) -> Placing:
        problem = self.problem
        gang = problem.gang(solution)
        fabric, best = fabric_of(self.inventory), at_best(self.inventory)
        num_bytes = update_bytes(self.workload)
        is_apart = not any(column.is_home for column in problem.rollout if column.name in solution.replicas)

        def step_s(stages: Stages) -> float:
            return realised.step_s(fabric, best, stages, gang, self.workload, self.constants)

        def score(trains: frozenset[str], rolls: frozenset[str]) -> tuple[float, ...]:
            took_s, lags = step_s(lay_gang(fabric, gang, in_order(trains))), realised.Arrivals()
            if len(rolls) <= MAX_IMPROVED:  # with more nodes, a tree for every choice takes too long
                generating = rolls if is_apart else generating_on(places_of(fabric, problem, solution, trains, rolls))
                root = root_of(fabric, gang, trains, generating)
                lags = realised.arrivals(fabric, relay(fabric, root, generating, num_bytes), num_bytes, trains)
            placed = realised.slowed(problem, gang, took_s, lags)
            return realised.enough_s(problem, placed, solution), max(lags.by_class.values(), default=0.0), took_s

        trains, rolls = split(fabric, gang.nodes, solution.nodes, score)
        stages = lay_gang(fabric, gang, in_order(trains))
        places = places_of(fabric, problem, solution, trains, rolls)
        generating = rolls | generating_on(places)
        tree = sync_tree(fabric, root_of(fabric, gang, trains, generating), generating, num_bytes)
        lags = realised.arrivals(fabric, tree.senders, num_bytes, trains)
        took_s = step_s(stages)
        placed = realised.slowed(problem, gang, took_s, lags)
        tau_s = realised.period_s(problem, placed, solution)
        return Placing(places, stages, tree, gang, problem.rollout, took_s, lags, placed, tau_s)


def places_of(
    fabric: NodeFabric, problem: PlanningProblem, solution: Solution, trains: frozenset[str], rolls: frozenset[str]
) -> list[Placed]:
    """Returns the cards of each replica. They are on nodes rented for rollout (`rolls`) or, if the replica takes turns
    with training, on the training nodes (`trains`)."""
    places: list[Placed] = []
    gang = problem.gang(solution)
    for offer, (is_home, among) in itertools.product(problem.offers, ((False, rolls), (True, trains))):
        columns = {one.name: one for one in problem.rollout if one.offer == offer and one.is_home == is_home}
        sizes = {name: columns[name].num_accelerators for name in solution.replicas if name in columns}
        nodes = [fabric.nodes[name] for name in in_order(among) if fabric.nodes[name].offer == offer]
        # A gang that leaves cards of its node free for replicas trains on the first ones.
        home = gang.num_home_cards(problem.offers[offer], problem.demand.bound)
        taken = max(problem.offers[offer].per_node - home, 0) if is_home and problem.demand.bound else 0
        packed = pack(sizes, {name: solution.replicas[name] for name in sizes}, nodes, taken)
        if packed is None:
            raise UserError(f"the plan's replicas do not fit on its {len(nodes)} nodes of class {offer}; plan again")
        places += packed
    return places


def generating_on(places: Sequence[Placed]) -> frozenset[str]:
    return frozenset(placed.group.node for placed in places)


def root_of(fabric: NodeFabric, gang: Gang, trains: frozenset[str], rolls: frozenset[str]) -> str:
    """Returns the node that publishes versions: the training node of the class `gang.root` that has the best links to
    the rollout nodes, or the first one if no links were measured."""
    able = [name for name in in_order(trains) if fabric.nodes[name].offer == gang.root]
    if fabric.is_alike:
        return able[0]
    return max(able, key=lambda name: sum(fabric.bytes_per_s(name, other) for other in sorted(rolls)))


def in_order(names: frozenset[str]) -> list[str]:
    return sorted(names, key=class_and_number)
