"""Times of a placed plan: a gang's step over the links of its nodes, a version's lag to each class, and the period.

Times are computed as for the columns (candidate gangs and replica shapes), but over the links in use. Gradients go
around a ring at the rate of its slowest link. Activations go from each stage to the next. A class has a version when
its last node has it. Guarantee: no time is shorter than the one in the column, so bounds proven for the columns hold
for placed plans.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field, replace

from offbeat.planner.columns.gangs import over_links
from offbeat.planner.cost.constants import Constants
from offbeat.planner.cost.training_time import boundary_s
from offbeat.planner.inputs.hardware import Inventory
from offbeat.planner.inputs.workload import Workload
from offbeat.planner.place.islands import Group, Stages
from offbeat.planner.place.nodes import NodeFabric
from offbeat.planner.place.sync_tree import Senders, arrival_s
from offbeat.planner.problem import Gang, PlanningProblem, RolloutColumn, Solution
from offbeat.planner.solve.check import check

ROUNDING = 1e-9
"""Relative difference that counts as rounding: two values may be sums of the same terms in another order."""
BISECTIONS = 40


def step_s(
    fabric: NodeFabric, best: Inventory, stages: Stages, gang: Gang, workload: Workload, constants: Constants
) -> float:
    """Seconds of a gang's step over the links between the cards in `stages`, but at least `gang.step_s`. `best` is the
    inventory with the best links."""
    links = dict(best.links)
    for pair, rate in _slowest(fabric, stages).items():
        links[pair] = replace(links[pair], bytes_per_s=min(rate, links[pair].bytes_per_s))
    stages_s = over_links(gang, replace(best, links=links), workload, constants).step_s
    loads = [load(fabric, one, other) for one, other in itertools.pairwise(stages)]
    return max(stages_s, *(boundary_s(workload, 1 / each, 1) for each in loads if each), gang.step_s)


def _slowest(fabric: NodeFabric, stages: Stages) -> dict[frozenset[str], float]:
    """Returns, for each pair of node classes, the rate of the slowest gradient-ring link between their nodes."""
    slowest: dict[frozenset[str], float] = {}
    for stage in stages:
        ring = list(dict.fromkeys(group.node for group in stage))
        for one, other in zip(ring, [*ring[1:], ring[0]], strict=True):
            if one != other:
                pair = frozenset(fabric.nodes[name].offer for name in (one, other))
                slowest[pair] = min(slowest.get(pair, math.inf), fabric.bytes_per_s(one, other))
    return slowest


def load(fabric: NodeFabric, stage: Sequence[Group], following: Sequence[Group]) -> float:
    """Seconds per byte from a pipeline stage to the `following` stage, as limited by the busiest node or shared link;
    0 if all bytes stay inside nodes."""
    pairs = Counter((one.node, other.node) for one, other in zip(stage, following, strict=True))
    sent, received, shared = defaultdict[str, float](float), defaultdict[str, float](float), 0.0
    for (one, other), count in pairs.items():
        if one == other:
            continue
        each = count / len(stage) / fabric.bytes_per_s(one, other)
        sent[one] += each
        received[other] += each
        shared += each if fabric.link(one, other).is_shared else 0.0
    return max(shared, *sent.values(), *received.values(), 0.0)


@dataclass(frozen=True)
class Arrivals:
    """Seconds from a version's publication until the last node of a class has it, by class."""

    rented_s: Mapping[str, float] = field(default_factory=dict)
    """Of the nodes that only generate."""
    home_s: Mapping[str, float] = field(default_factory=dict)
    """Of the nodes that also train, without the one that publishes."""

    def of(self, column: RolloutColumn) -> float:
        return (self.home_s if column.is_home else self.rented_s).get(column.offer, 0.0)

    @property
    def by_class(self) -> dict[str, float]:
        names = [*self.rented_s, *(name for name in self.home_s if name not in self.rented_s)]
        return {name: max(self.rented_s.get(name, 0.0), self.home_s.get(name, 0.0)) for name in names}


def arrivals(fabric: NodeFabric, senders: Senders, num_bytes: float, trains: Container[str] = ()) -> Arrivals:
    """Returns when the classes have a version; `trains` are the nodes that train."""
    rented: dict[str, float] = {}
    home: dict[str, float] = {}
    for name, seconds in arrival_s(fabric, senders, num_bytes).items():
        offer, found = fabric.nodes[name].offer, home if name in trains else rented
        found[offer] = max(found.get(offer, 0.0), seconds)
    return Arrivals(rented, home)


def slowed(
    problem: PlanningProblem, gang: Gang, step_s: float, lags: Arrivals, by: float = ROUNDING
) -> PlanningProblem:
    """Returns the problem with longer times: `step_s` for the gang's training step, and `lags` until a class has a
    version that the gang publishes. A time is replaced only if it grows by more than the share `by`. If no
    time is replaced, the same object is returned."""
    relays = {*gang.nodes, *lags.by_class} if problem.demand.bound else ()

    def is_worse(column: RolloutColumn) -> bool:
        return lags.of(column) > column.lag_from_s(gang.root, relays) * (1 + by)

    def later(column: RolloutColumn) -> RolloutColumn:
        least_s, over_s = lags.of(column), column.lag_over_s.get(gang.root, {})
        lag_s = {**column.lag_s, gang.root: max(least_s, column.lag_from_s(gang.root))}
        over_s = {name: max(least_s, way_s) for name, way_s in over_s.items()}
        return replace(column, lag_s=lag_s, lag_over_s={**column.lag_over_s, gang.root: over_s})

    gangs, rollout = problem.gangs, problem.rollout
    if any(step_s > each.step_s * (1 + by) for each in gangs if each.name == gang.name):
        gangs = tuple(replace(each, step_s=step_s) if each.name == gang.name else each for each in gangs)
    if any(is_worse(column) for column in rollout):
        rollout = tuple(later(column) if is_worse(column) else column for column in rollout)
    if gangs is problem.gangs and rollout is problem.rollout:
        return problem
    return replace(problem, gangs=gangs, rollout=rollout)


def enough_s(problem: PlanningProblem, placed: PlanningProblem, solution: Solution) -> float:
    """Returns a period (seconds per step) long enough for a solution of `problem` to meet all constraints of `placed`.
    `placed` is `problem` with a longer training step or longer lags.

    With a staleness bound above 0, the result is the shortest such period. It follows from the gang's own period and
    the age window (the time that a long answer may take). With bound 0, the result is `solution.tau_s` plus the
    increase of the gang's period and the largest increase of a lag."""
    demand, tau_s, gang = placed.demand, solution.tau_s, placed.gang(solution)
    period_s, root = gang.period_s, gang.root
    slower = {column.name: column for column in placed.rollout if solution.replicas.get(column.name)}
    if not demand.bound:
        before = {column.name: column.lag_from_s(root) for column in problem.rollout if column.name in slower}
        rises = [slower[name].lag_from_s(root) - before[name] for name in slower]
        return tau_s + (period_s - problem.gang(solution).period_s) + max(rises, default=0.0)
    relays = {*gang.nodes, *(each.offer for each in slower.values())}
    tail, reward_s = demand.tail_tokens, demand.lag_s
    tails = [tail * each.token_s + reward_s + each.lag_from_s(root, relays) for each in slower.values()]
    opens_s = (max(tails, default=0.0) + period_s) / (demand.bound + 1 - demand.age_guard)
    return max(tau_s, period_s, opens_s if tail else 0.0)


def period_s(problem: PlanningProblem, placed: PlanningProblem, solution: Solution) -> float:
    """Shortest period in seconds, but at least `solution.tau_s`, at which `solution` meets all constraints of `placed`.
    `placed` is `problem` with a longer training step or longer lags."""
    if placed is problem or not check(placed, solution):
        return solution.tau_s
    low_s, high_s = solution.tau_s, enough_s(problem, placed, solution)
    while check(placed, replace(solution, tau_s=high_s)):
        high_s = max(math.nextafter(high_s, math.inf), high_s * (1 + 1e-15))
    for _ in range(0 if placed.demand.bound else BISECTIONS):
        middle_s = (low_s + high_s) / 2
        holds = not check(placed, replace(solution, tau_s=middle_s))
        low_s, high_s = (low_s, middle_s) if holds else (middle_s, high_s)
    return high_s
