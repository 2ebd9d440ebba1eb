"""The integer program at a fixed period: is there a plan, and which one is best?

Variables are z (which gang), y (replicas of a column; once per set of rates, where these depend on the gang) and n
(nodes rented for rollout). Rows are scaled so that the largest coefficient of each is 1: a right side then counts in
units of the largest column, and the solver's absolute tolerance is a small part of one replica.

A solver answers in floats with a tolerance; nothing is called feasible before `holds` has found so in exact arithmetic,
and running out of time is `UNKNOWN`, never `INFEASIBLE`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array

from offbeat.plan.solve.exact import holds
from offbeat.plan.solve.quiet import quiet_stdout
from offbeat.plan.solve.view import Counts, Floats, Ints, View

TIGHTER = 1e-6
"""By how much of a replica demand is raised for a second try, when an answer met it only within the tolerance."""


class Aim(StrEnum):
    PRICE = "price"
    """The least money."""
    TOKENS = "tokens"
    """The most tokens in a period, which says how much shorter the period could be."""
    IN_FLIGHT = "in flight"
    """The fewest trajectories under way: the freshest data."""


class Status(StrEnum):
    FEASIBLE = "feasible"
    INFEASIBLE = "infeasible"
    """Proven: by the solver, with its tolerance in the plan's favour."""
    UNKNOWN = "unknown"
    """Time ran out, or an answer held only within the solver's tolerance."""


@dataclass(frozen=True)
class Outcome:
    status: Status
    counts: Counts | None = None
    bound: float | None = None
    """What no plan beats, in the aim's unit ($/h, tokens, trajectories), by the solver's word."""


@dataclass(frozen=True)
class Model:
    """minimise cost @ x, lower <= rows @ x <= upper, 0 <= x <= most, all of x integer."""

    cost: Floats
    rows: coo_array
    lower: Floats
    upper: Floats
    most: Floats


@dataclass(frozen=True)
class Answer:
    status: Status
    x: Floats | None = None
    bound: float | None = None


Solver = Callable[[Model, float, float], Answer]
"""Solves a model to a relative gap within a number of seconds."""


def highs(model: Model, gap: float, within_s: float) -> Answer:
    with quiet_stdout():
        result = milp(
            model.cost,
            integrality=np.ones(len(model.cost)),
            bounds=Bounds(np.zeros(len(model.most)), model.most),
            constraints=LinearConstraint(model.rows.tocsr(), model.lower, model.upper),
            options={"mip_rel_gap": gap, "time_limit": within_s},
        )
    bound = getattr(result, "mip_dual_bound", None)
    if result.x is not None:
        return Answer(Status.FEASIBLE, result.x, bound)
    return Answer(Status.INFEASIBLE if result.status == 2 else Status.UNKNOWN, None, bound)


def solve(
    view: View,
    tau_s: float,
    gangs: Sequence[int],
    aim: Aim = Aim.PRICE,
    budget: int | None = None,
    gap: float = 1e-4,
    within_s: float = 5.0,
    solver: Solver = highs,
    among: Ints | None = None,
) -> Outcome:
    """The best plan with one of these gangs at this period, for at most `budget` (millionths of $/h, all included).

    With `among` the answer, its status and its bound speak of plans that use these columns only: found much sooner.
    """
    gangs = [s for s in gangs if view.period[s] <= tau_s]
    if not gangs or (builder := _Builder(view, tau_s, gangs, aim, budget, among)).is_empty:
        return Outcome(Status.INFEASIBLE)
    outcome = Outcome(Status.UNKNOWN)
    for margin in (0.0, TIGHTER):
        answer = solver(builder.model(margin), gap, within_s)
        bound = None if answer.bound is None else builder.unscaled(answer.bound)
        if answer.x is None:
            # With the raised demand, infeasible says nothing of the true one.
            return Outcome(Status.UNKNOWN if margin else answer.status, None, outcome.bound if margin else bound)
        counts = builder.counts(answer.x)
        outcome = Outcome(Status.UNKNOWN, None, bound if outcome.bound is None else outcome.bound)
        if holds(view, counts, tau_s, budget):
            return Outcome(Status.FEASIBLE, counts, outcome.bound)
    return outcome


class _Builder:
    """Writes the rows of one program. Variables in order: z, y by set of rates, n, and the spare replicas' levels."""

    def __init__(
        self, view: View, tau_s: float, gangs: Sequence[int], aim: Aim, budget: int | None, among: Ints | None
    ):
        self.view, self.gangs, self.aim, self.budget = view, np.array(gangs), aim, budget
        every = view.tokens(tau_s, self.gangs)
        if among is not None:
            every[:, np.setdiff1d(np.arange(len(view.columns)), among)] = 0.0
        needs = np.where(every > 0, view.needs(tau_s, self.gangs), 0)
        of_set, self.rates_of = _alike(np.hstack([every, needs]))
        tokens, needs = every[of_set], needs[of_set]
        self.sets, self.columns = np.nonzero(tokens)
        """Of every y: its set of rates, its column."""
        self.tokens, self.needs = tokens[self.sets, self.columns], needs[self.sets, self.columns]
        self.num_z, self.num_y, self.num_n = len(gangs), len(self.columns), len(view.per_node)
        self.is_empty = self.num_y == 0 or view.in_flight_cap < 1
        if not self.is_empty:
            self.unit_tokens = float(self.tokens.max())
            """Demand is counted in replicas of the most productive column."""
            self.unit_price = float(max(view.node_price.max(), 1))
            spare = view.problem.spare_replicas
            self.levels = np.unique(self.tokens) if spare else np.array([])

    def model(self, margin: float) -> Model:
        """`margin` raises the demand, in replicas of the most productive column."""
        view, size = self.view, self.num_z + self.num_y + self.num_n + len(self.levels)
        parts: list[tuple[Ints, Ints, Floats]] = []
        lower: list[float] = []
        upper: list[float] = []

        def row(columns: Ints, values: Floats | Ints, low: float = -np.inf, high: float = np.inf) -> None:
            parts.append((np.full(len(columns), len(lower)), columns, np.asarray(values, dtype=float)))
            lower.append(low)
            upper.append(high)

        z, y = np.arange(self.num_z), self.num_z + np.arange(self.num_y)
        n = self.num_z + self.num_y + np.arange(self.num_n)
        row(z, np.ones(self.num_z), 1, 1)
        self._demand(row, y, n[-1] + 1 + np.arange(len(self.levels)), margin)
        widest = view.concurrency[self.columns].max()
        row(y, view.concurrency[self.columns] / widest, high=view.in_flight_cap / widest)
        for k in range(self.num_n):
            self._hardware(row, z, y, n, k)
        self._relays(row, y)
        if self.budget is not None:
            prices = np.concatenate([view.gang_price[self.gangs], view.node_price]) / self.unit_price
            row(np.concatenate([z, n]), prices, high=(self.budget - view.fixed_price) / self.unit_price)
        rows, columns, values = (np.concatenate(part) for part in zip(*parts, strict=True))
        matrix = coo_array((values, (rows, columns)), shape=(len(lower), size))
        return Model(self._cost(size), matrix, np.array(lower), np.array(upper), self._most())

    def _demand(self, row: Callable[..., None], y: Ints, q: Ints, margin: float) -> None:
        wanted = self.view.demand_tokens / self.unit_tokens + margin
        if not len(self.levels):
            row(y, self.tokens / self.unit_tokens, low=wanted)
            return
        # The sum of the k largest is the least, over levels w, of k w and what lies above w; it is attained at a w that
        # is some column's yield. So one level is chosen, yields are capped by it, and k of it are demanded in addition.
        row(q, np.ones(len(q)), 1, 1)
        for one, level in zip(q, self.levels / self.unit_tokens, strict=True):
            idle = wanted + self.view.problem.spare_replicas * level
            yields = np.minimum(self.tokens / self.unit_tokens, level)
            row(np.append(y, one), np.append(yields, -idle), low=0.0)

    def _hardware(self, row: Callable[..., None], z: Ints, y: Ints, n: Ints, k: int) -> None:
        view = self.view
        mine = view.group[self.columns] == k
        per_node, taken = float(view.per_node[k]), view.gang_nodes[self.gangs, k]
        sizes = view.accelerators[self.columns[mine]] / per_node
        row(np.append(y[mine], n[k]), np.append(sizes, -1.0), high=0.0)
        row(np.append(z, n[k]), np.append(taken, 1.0), high=float(view.num_nodes[k]))
        if self.rates_of.max() > 0:  # replicas at the rates of one set only beside a gang of that set
            room = float(max(view.most_nodes[k], 1))
            for index in np.unique(self.sets[mine]):
                here = mine & (self.sets == index)
                gangs = z[self.rates_of == index]
                values = view.accelerators[self.columns[here]] / per_node / room
                row(np.append(y[here], gangs), np.append(values, -np.ones(len(gangs))), high=0.0)

    def _relays(self, row: Callable[..., None], y: Ints) -> None:
        """Replicas that are in time only where versions come over some class: none without a replica there."""
        view = self.view
        group = view.group[self.columns]
        late = np.stack([self.sets, group, self.needs], axis=1)
        for index, k, need in np.unique(late[self.needs > 0], axis=0):
            here = (late == (index, k, need)).all(axis=1)
            relays = view.relays[(need >> np.arange(len(view.relays))) & 1 == 1]
            passing = np.isin(group, relays) & (self.sets == index)
            room = float(max(view.most_nodes[k] * view.per_node[k], 1))
            sizes = view.accelerators[self.columns[here]] / room
            row(np.concatenate([y[here], y[passing]]), np.concatenate([sizes, -np.ones(passing.sum())]), high=0.0)

    def _cost(self, size: int) -> Floats:
        cost, view = np.zeros(size), self.view
        n = slice(self.num_z + self.num_y, self.num_z + self.num_y + self.num_n)
        if self.aim is Aim.PRICE:
            cost[: self.num_z] = view.gang_price[self.gangs] / self.unit_price
            cost[n] = view.node_price / self.unit_price
        elif self.aim is Aim.TOKENS:
            cost[self.num_z : n.start] = -self.tokens / self.unit_tokens
        else:
            cost[self.num_z : n.start] = view.concurrency[self.columns]
        return cost

    def _most(self) -> Floats:
        view = self.view
        room = view.most_nodes * view.per_node
        by_place = room[view.group[self.columns]] // view.accelerators[self.columns]
        by_cap = view.in_flight_cap // view.concurrency[self.columns]
        ones = np.ones(self.num_z), np.ones(len(self.levels))
        return np.concatenate([ones[0], np.minimum(by_place, by_cap), view.most_nodes, ones[1]]).astype(float)

    def unscaled(self, bound: float) -> float:
        if self.aim is Aim.PRICE:
            return bound * self.unit_price + self.view.fixed_price
        return -bound * self.unit_tokens if self.aim is Aim.TOKENS else bound

    def counts(self, x: Floats) -> Counts:
        whole = np.rint(x).astype(int)
        chosen = int(np.argmax(whole[: self.num_z]))
        replicas = np.zeros(len(self.view.columns), dtype=int)
        of_gang = self.sets == self.rates_of[chosen]
        replicas[self.columns[of_gang]] = whole[self.num_z : self.num_z + self.num_y][of_gang]
        return Counts(int(self.gangs[chosen]), tuple(int(count) for count in replicas))


def _alike(rows: Floats) -> tuple[Ints, Ints]:
    """The first row of each kind, and by row its kind."""
    found: dict[bytes, int] = {}
    kinds = [found.setdefault(row.tobytes(), len(found)) for row in rows]
    return np.unique(kinds, return_index=True)[1], np.array(kinds)
