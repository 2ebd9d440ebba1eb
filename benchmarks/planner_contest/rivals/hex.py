"""AReaL-Hex's Algorithm 1 in three readings, with gangs and rollout shapes taken from a `Problem`.

*literal*: as printed. The answer is the last bisection that was looked at; eq. 2 is solved by filling each class with
the shape of most tokens a second per card, without a thought for what may be in flight.
*charitable*: the best bisection seen, both ways round, and eq. 2 with what the paper leaves out: how much is in flight
is chosen as well as any one cap per card allows, under the bound and for the time that the longest answers need.
*evident*: what the paper evidently ran: classes with more FLOPS per byte of memory bandwidth train, the others roll
out (of several classes the best such cut), with eq. 2 as in the charitable reading.

The same for all: training search = the fastest gang of the problem that fits into the training nodes; no averaging
window (a steady state); reward 0; the update is some copies of the weights over the slowest link between gang and
rollouts, and blocks. Every node is given to one of the sides. Prices are not looked at.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from benchmarks.planner_contest.judge.shape import weight_bytes
from benchmarks.planner_contest.rivals.answer import Answer
from benchmarks.planner_contest.rivals.repartition import bisections, rest
from offbeat.planner.inputs.hardware import Inventory
from offbeat.planner.inputs.workload import Workload
from offbeat.planner.problem import Gang, PlanningProblem, RolloutColumn

COPIES = 5.0
"""Of the weights over the slow link: published update times come to 4.2, 5.7 and 5.7."""
MAX_ROUNDS = 20
"""K: rounds without a change after which it stops; a bisection of gamma has said all it can by then."""
CLOSE = 0.01
"""C_T ~ C_I."""


@dataclass(frozen=True)
class Costs:
    """One bisection with what both sides take."""

    train_s: float
    rollout_s: float
    answer: Answer | None

    @property
    def step_s(self) -> float:
        return max(self.train_s, self.rollout_s)


@dataclass(frozen=True)
class Hex:
    inventory: Inventory
    workload: Workload
    problem: PlanningProblem
    copies: float = COPIES

    def literal(self) -> Answer | None:
        last = None
        for training in self._rounds(is_exact=False):
            costs = self.costs(training, is_exact=False)
            last = costs.answer or last
        return last

    def charitable(self) -> Answer | None:
        sides = [side for one in self._rounds(is_exact=True) for side in (one, rest(self.inventory, one))]
        return min((self.costs(side, is_exact=True) for side in sides), key=lambda costs: costs.step_s).answer

    def evident(self) -> Answer | None:
        def ridge(name: str) -> float:
            card = self.inventory.classes[name].accelerator
            return card.flops / card.memory_bytes_per_s

        names = sorted(self.inventory.classes, key=ridge, reverse=True)
        cuts = [{name: self.inventory.classes[name].num_nodes for name in names[:i]} for i in range(1, len(names))]
        every = [self.costs(training, is_exact=True) for training in cuts]
        return min(every, key=lambda costs: costs.step_s).answer if every else None

    def _rounds(self, is_exact: bool) -> list[dict[str, int]]:
        """The bisections that the search on gamma looks at, in order."""
        known, seen = bisections(self.inventory), []
        gamma, low, high = 1.0, 0.0, 1.0
        stable, before = 0, math.nan
        while stable < MAX_ROUNDS:
            training = known.at(gamma)
            seen.append(training)
            costs = self.costs(training, is_exact)
            if abs(costs.train_s - costs.rollout_s) <= CLOSE * costs.step_s < math.inf:
                break
            if costs.train_s < costs.rollout_s:
                high = gamma
            else:
                low = gamma
            stable, before = stable + 1 if costs.step_s == before else 0, costs.step_s
            gamma = (low + high) / 2
        return seen

    def costs(self, training: Mapping[str, int], is_exact: bool) -> Costs:
        """C_T and C_I of eq. 1; infinite for a side that cannot work."""
        gang = self.train_search(training)
        replicas = self.rollouts(rest(self.inventory, training), is_exact, gang)
        train_s = gang.step_s if gang else math.inf
        if not replicas:
            return Costs(train_s, math.inf, None)
        if gang is None:
            return Costs(math.inf, 0.0, None)
        return Costs(train_s, self.rollout_s(gang, replicas), Answer(gang, replicas))

    def train_search(self, training: Mapping[str, int]) -> Gang | None:
        """The fastest gang inside these nodes."""
        inside = [
            gang for gang in self.problem.gangs if all(num <= training.get(name, 0) for name, num in gang.nodes.items())
        ]
        return min(inside, key=lambda gang: gang.step_s, default=None)

    def rollouts(self, nodes: Mapping[str, int], is_exact: bool, gang: Gang | None) -> dict[str, int]:
        """Eq. 2: most tokens a second. Its finish times equalise, so each class is filled for itself."""
        if not is_exact:
            return self._filled(nodes, math.inf)
        caps = sorted({column.concurrency / column.num_accelerators for column in self.problem.rollout})
        room = self.problem.demand.bound * self.problem.demand.trajectories
        plans = [plan for plan in (self._filled(nodes, cap) for cap in caps) if plan]
        fitting = [plan for plan in plans if self._in_flight(plan) <= room] or plans[:1]
        return min(fitting, key=lambda plan: self._paced_s(plan, gang), default={})

    def _filled(self, nodes: Mapping[str, int], cap: float) -> dict[str, int]:
        """Each class full of the shape that gives most per card with at most `cap` in flight a card."""
        replicas = {}
        for name, num_nodes in nodes.items():
            per_node = self.inventory.classes[name].per_node

            def node_rate(column: RolloutColumn, per_node: int = per_node) -> float:
                return per_node // column.num_accelerators * column.tokens_per_s

            shapes = [
                column
                for column in self.problem.rollout
                if column.offer == name and column.concurrency / column.num_accelerators <= cap
            ]
            if num_nodes and shapes:
                best = max(shapes, key=node_rate)
                replicas[best.name] = num_nodes * (per_node // best.num_accelerators)
        return {name: count for name, count in replicas.items() if count}

    def rollout_s(self, gang: Gang, replicas: Mapping[str, int]) -> float:
        """A batch at the common rate, what an update stops, and the update's copies."""
        columns = self._columns
        rate = self._rate(replicas)
        stopped = sum(columns[n].tokens_per_s * columns[n].blocking_s[gang.root] * y for n, y in replicas.items())
        links = [self.inventory.link(near, columns[name].offer).bytes_per_s for near in gang.nodes for name in replicas]
        update_s = self.copies * weight_bytes(self.workload.model) / min(links)
        return (self.problem.demand.tokens + stopped) / rate + update_s

    def _paced_s(self, replicas: Mapping[str, int], gang: Gang | None) -> float:
        """A batch at the common rate, or what answers of the tail's length need for the bound, where that is longer."""
        demand, columns = self.problem.demand, self._columns
        roots = {gang.root} if gang else {one.root for one in self.problem.gangs}
        over = {*(gang.nodes if gang else ()), *(columns[name].offer for name in replicas)}
        lag_s = min(max(columns[name].lag_from_s(root, over) for name in replicas) for root in roots) + demand.lag_s
        tail_s = demand.tail_tokens * max(columns[name].token_s for name in replicas) + lag_s
        ready_s = (gang.period_s if gang else 0.0) + tail_s
        return max(demand.tokens / self._rate(replicas), ready_s / (demand.bound + 1 - demand.age_guard))

    @property
    def _columns(self) -> dict[str, RolloutColumn]:
        return {column.name: column for column in self.problem.rollout}

    def _rate(self, replicas: Mapping[str, int]) -> float:
        columns = self._columns
        return sum(columns[name].tokens_per_s * count for name, count in replicas.items())

    def _in_flight(self, replicas: Mapping[str, int]) -> float:
        columns = self._columns
        return sum(columns[name].concurrency * count for name, count in replicas.items())
