"""The integer program at a fixed period (time from one step to the next): finds the best plan, or proves there is none.

Variables are z (1 for the chosen gang), y (replicas of each column) and n (nodes rented for rollout). If the token
rates of columns depend on the gang, each set of rates has its own y. Rows are scaled so that the solver's tolerance is
a small part of a replica. A plan from the solver counts as feasible only if `holds` confirms it in exact arithmetic. If
the solver runs out of time, the status is `UNKNOWN`, never `INFEASIBLE`.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array

from offbeat.planner.solve import bounds
from offbeat.planner.solve.view import ColumnCounts, Floats, Ints, View


def holds(view: View, counts: ColumnCounts, tau_s: float, budget: int | None = None) -> bool:
    """Whether the plan `counts` satisfies every constraint at the period `tau_s`, in exact arithmetic. `budget` is in
    millionths of $/h (None: no limit)."""
    demand, gang = view.problem.demand, view.gangs[counts.gang]
    tau = Fraction(tau_s)
    used = [j for j, count in enumerate(counts.replicas) if count]
    relays = {*gang.nodes, *(view.columns[j][0].offer for j in used)} if demand.bound else set[str]()
    lag = {j: Fraction(demand.lag_s) + Fraction(view.columns[j][0].lag_from_s(gang.root, relays)) for j in used}
    lost = {j: Fraction(view.columns[j][0].blocking_s[gang.root]) for j in used}
    if not demand.bound:
        lost = {j: seconds + Fraction(gang.period_s) + lag[j] for j, seconds in lost.items()}
    if demand.tail_tokens:
        tails = {j: Fraction(demand.tail_tokens) * Fraction(view.columns[j][0].token_s) for j in used}
        window = (demand.bound + 1 - Fraction(demand.age_guard)) * tau - Fraction(gang.period_s)
        room = {j: window - lag[j] if demand.bound else tau - lost[j] for j in used}
        if any(tails[j] > room[j] for j in used):
            return False
    if not all(view.columns[j][0].fits_beside(gang) for j in used):
        return False
    rates = {j: Fraction(view.rate[j]) * counts.replicas[j] for j in used}
    return (
        Fraction(gang.period_s) <= tau
        and (demand.reward_rate is None or demand.trajectories <= Fraction(demand.reward_rate) * tau)
        and sum(rates[j] * max(tau - lost[j], Fraction(0)) for j in used) >= Fraction(demand.tokens)
        and view.in_flight(counts) <= Fraction(view.in_flight_cap)
        and bool((view.nodes(counts) <= view.free_nodes[counts.gang]).all())
        and bool((view.nodes(counts) >= view.least_generating).all())
        and (budget is None or view.price(counts) <= budget)
    )


def shortest_s(view: View, counts: ColumnCounts, tau_s: float) -> float:
    """Returns the shortest period in seconds at which the plan `counts` meets all constraints, computed in closed form
    and rounded up. The plan must meet them at `tau_s`, and `tau_s` is returned if no shorter period passes `holds`."""
    s, used = counts.gang, np.flatnonzero(counts.replicas)
    opening_s = view.opening_s(counts)
    opens_s = max(float(view.period[s]), *(float(opening_s[j]) for j in used))
    rates = {j: Fraction(view.rate[j]) * counts.replicas[j] for j in used}
    lost = sum((rates[j] * Fraction(view.blocking[s, j]) for j in used), Fraction(0))
    tokens_s = (Fraction(view.demand_tokens) + lost) / sum(rates.values())
    shortest = max(opens_s, float(tokens_s))
    for _ in range(4):
        if shortest >= tau_s:
            break
        if holds(view, counts, shortest):
            return shortest
        shortest = float(np.nextafter(shortest, np.inf))
    return tau_s


STDOUT = 1


@contextlib.contextmanager
def quiet_stdout() -> Iterator[None]:
    """Silences the standard output of all threads, because HiGHS prints a line that no option turns off."""
    if sys.stdout is not None:
        sys.stdout.flush()
    try:
        kept = os.dup(STDOUT)
    except OSError:  # already closed
        yield
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, STDOUT)
    try:
        yield
    finally:
        if os.name == "posix":
            ctypes.CDLL(None).fflush(None)  # otherwise the C library would write its buffer later
        os.dup2(kept, STDOUT)
        os.close(kept)
        os.close(nowhere)


TIGHTER = 1e-6
"""Increase of the demand for tokens when the program is solved a second time, in units of the tokens of one replica. It
is solved again if the first plan fails the exact check (`holds`), because the solver allows small violations."""


class Aim(StrEnum):
    PRICE = "price"
    """Lowest price."""
    TOKENS = "tokens"
    """Most tokens generated in a period, which shows how much shorter the period could be."""
    IN_FLIGHT = "in flight"
    """Fewest trajectories in flight, for the freshest data."""


class Status(StrEnum):
    FEASIBLE = "feasible"
    INFEASIBLE = "infeasible"
    """The solver proved that there is no plan."""
    UNKNOWN = "unknown"
    """Time ran out, or the solver's plan met the constraints only within its tolerance, not exactly."""


@dataclass(frozen=True)
class SolverOutcome:
    status: Status
    counts: ColumnCounts | None = None
    bound: float | None = None
    """The solver's bound on the aim over all plans, in the aim's unit: millionths of $/h, tokens or trajectories."""


@dataclass(frozen=True)
class LinearProgram:
    """Integer program: minimise cost @ x with lower <= rows @ x <= upper and 0 <= x <= most, where the entries of x
    that are marked in `whole` are integers."""

    cost: Floats
    rows: coo_array
    lower: Floats
    upper: Floats
    most: Floats
    whole: NDArray[np.bool_]


@dataclass(frozen=True)
class ProgramAnswer:
    status: Status
    x: Floats | None = None
    bound: float | None = None


Solver = Callable[[LinearProgram, float, float], ProgramAnswer]
"""Solves an integer program; takes the program, a relative gap and a time limit in seconds."""


def highs(model: LinearProgram, gap: float, within_s: float) -> ProgramAnswer:
    with quiet_stdout():
        result = milp(
            model.cost,
            integrality=model.whole.astype(int),
            bounds=Bounds(np.zeros(len(model.most)), model.most),
            constraints=LinearConstraint(model.rows.tocsr(), model.lower, model.upper),
            options={"mip_rel_gap": gap, "time_limit": within_s},
        )
    bound = getattr(result, "mip_dual_bound", None)
    if result.x is not None:
        return ProgramAnswer(Status.FEASIBLE, result.x, bound)
    return ProgramAnswer(Status.INFEASIBLE if result.status == 2 else Status.UNKNOWN, None, bound)


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
) -> SolverOutcome:
    """Returns the best plan by `aim` at this period, with one of `gangs` and for at most `budget` (millionths of $/h,
    including the reward pool; None: any price). `solver` runs once or twice, each time until the relative `gap` is
    reached or `within_s` seconds have passed. `among` restricts plans to these columns (replica shapes; None: all),
    which is much faster; status and bound then hold only for such plans."""
    gangs = [s for s in gangs if view.period[s] <= tau_s]
    if not gangs or (builder := _Builder(view, tau_s, gangs, aim, budget, among)).is_empty:
        return SolverOutcome(Status.INFEASIBLE)
    outcome = SolverOutcome(Status.UNKNOWN)
    for margin in (0.0, TIGHTER):
        answer = solver(builder.model(margin), gap, within_s)
        bound = None if answer.bound is None else builder.unscaled(answer.bound)
        if answer.x is None:
            # That the raised demand is infeasible proves nothing about the true demand.
            return SolverOutcome(Status.UNKNOWN if margin else answer.status, None, outcome.bound if margin else bound)
        counts = builder.counts(answer.x)
        outcome = SolverOutcome(Status.UNKNOWN, None, bound if outcome.bound is None else outcome.bound)
        if holds(view, counts, tau_s, budget):
            return SolverOutcome(Status.FEASIBLE, counts, outcome.bound)
    return outcome


@dataclass(frozen=True)
class WholeNodes:
    """Outcome of `with_whole_nodes`."""

    status: Status
    """`INFEASIBLE` is a proof; `FEASIBLE` only says that this relaxation has a solution."""
    nodes: Ints | None = None
    """Nodes of each class that replicas use in the solution."""
    shortest_s: float = math.inf
    """Shortest period that the solution allows."""
    bound: float | None = None
    """Bound on the aim over all plans of the gang, in the aim's unit."""


def with_whole_nodes(
    view: View, tau_s: float, gang: int, aim: Aim, budget: int | None, gap: float, within_s: float, solver: Solver
) -> WholeNodes:
    """Solves a relaxation in which numbers of nodes are whole, but numbers of replicas may be fractions. Its columns
    are few, those of `bounds.envelope`, so it is solved in milliseconds however many replica shapes there are. For
    clusters of few nodes it proves much more than dual prices can, in which nodes are fractions too."""
    if view.period[gang] > tau_s:
        return WholeNodes(Status.INFEASIBLE)
    few, factor = bounds.envelope(view, tau_s, gang, gap / 2)
    builder = _Builder(view, tau_s, [gang], aim, budget, few, factor)
    if builder.is_empty:
        return WholeNodes(Status.INFEASIBLE)
    answer = solver(builder.model(0.0), gap / 4, within_s)
    bound = None if answer.bound is None else builder.unscaled(answer.bound)
    if answer.x is None:
        return WholeNodes(answer.status, bound=bound)
    replicas = answer.x[builder.num_z : -builder.num_n]
    used = builder.columns[replicas > 0]
    rates = factor * view.rate[used] * replicas[replicas > 0]
    tokens_s = (view.demand_tokens + float(rates @ view.blocking[gang, used])) / float(rates.sum())
    opens_s = float(view.windows.opens_s[gang, used].max(initial=0.0))
    shortest_s = min(max(tokens_s, opens_s, float(view.period[gang])), tau_s)
    nodes = np.rint(answer.x[-builder.num_n :]).astype(np.int64)
    return WholeNodes(answer.status, nodes, shortest_s, bound)


class _Builder:
    """Builds one integer program. Its variables are, in this order, z (1 for the chosen gang), y (replicas of each
    column) and n (nodes rented for rollout). Gangs with equal token rates and relays share one set of y.

    With a `factor` that is not None, tokens are raised by it, y may be fractions, and no constraint on relays
    applies."""

    def __init__(
        self,
        view: View,
        tau_s: float,
        gangs: list[int],
        aim: Aim,
        budget: int | None,
        among: Ints | None,
        factor: float | None = None,
    ):
        self.view, self.gangs, self.aim, self.budget = view, np.array(gangs), aim, budget
        self.is_relaxed = factor is not None
        every = view.tokens(tau_s, self.gangs) * (factor or 1.0)
        if among is not None:
            every[:, np.setdiff1d(np.arange(len(view.columns)), among)] = 0.0
        needs = np.where(every > 0, view.needs(tau_s, self.gangs), 0)
        of_set, self.rates_of = _alike(np.hstack([every, needs]))
        tokens, needs = every[of_set], needs[of_set]
        self.sets, self.columns = np.nonzero(tokens)
        """Set of token rates, and column (replica shape), of each variable y."""
        self.tokens, self.needs = tokens[self.sets, self.columns], needs[self.sets, self.columns]
        self.num_z, self.num_y, self.num_n = len(gangs), len(self.columns), len(view.per_node)
        self.is_empty = self.num_y == 0 or view.in_flight_cap < 1
        if not self.is_empty:
            self.unit_tokens = float(self.tokens.max())
            """Unit of demand: tokens of one replica of the most productive column."""
            self.unit_price = float(max(view.node_price.max(), 1))

    def model(self, margin: float) -> LinearProgram:
        """Returns the integer program to solve. The demand for tokens is raised by `margin` times `unit_tokens`, to
        make up for the solver's tolerance."""
        view, size = self.view, self.num_z + self.num_y + self.num_n
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
        row(y, self.tokens / self.unit_tokens, low=view.demand_tokens / self.unit_tokens + margin)
        widest = view.concurrency[self.columns].max()
        row(y, view.concurrency[self.columns] / widest, high=view.in_flight_cap / widest)
        for k in range(self.num_n):
            self._hardware(row, z, y, n, k)
        if not self.is_relaxed:
            self._relays(row, y)
        if self.budget is not None:
            prices = np.concatenate([view.gang_price[self.gangs], view.node_price]) / self.unit_price
            row(np.concatenate([z, n]), prices, high=(self.budget - view.fixed_price) / self.unit_price)
        rows, columns, values = (np.concatenate(part) for part in zip(*parts, strict=True))
        matrix = coo_array((values, (rows, columns)), shape=(len(lower), size))
        whole = np.ones(size, dtype=bool)
        whole[y] = not self.is_relaxed
        return LinearProgram(self._cost(size), matrix, np.array(lower), np.array(upper), self._most(), whole)

    def _hardware(self, row: Callable[..., None], z: Ints, y: Ints, n: Ints, k: int) -> None:
        view = self.view
        mine = view.group[self.columns] == k
        per_node, taken = float(view.per_node[k]), view.gang_nodes[self.gangs, k]
        sizes = view.accelerators[self.columns[mine]] / per_node
        row(np.append(y[mine], n[k]), np.append(sizes, -1.0), high=0.0)
        row(np.append(z, n[k]), np.append(taken, 1.0), high=float(view.num_nodes[k]))  # n is also limited by itself
        if least := int(view.least_generating[k]):  # full nodes, and a card of one more
            row(y[mine], sizes, low=least - 1 + 1 / per_node)
        if self.rates_of.max() > 0:  # replicas with a set's rates require a gang of that set
            room = float(max(view.most_nodes[k], 1))
            for index in np.unique(self.sets[mine]):
                here = mine & (self.sets == index)
                gangs = z[self.rates_of == index]
                values = view.accelerators[self.columns[here]] / per_node / room
                row(np.append(y[here], gangs), np.append(values, -np.ones(len(gangs))), high=0.0)

    def _relays(self, row: Callable[..., None], y: Ints) -> None:
        """Adds constraints for replicas whose long answers are in time only if another node class relays new versions:
        the plan must then have a replica on a class that relays."""
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
        most = np.full(self.num_y, np.inf) if self.is_relaxed else np.minimum(by_place, by_cap)
        return np.concatenate([np.ones(self.num_z), most, view.most_nodes]).astype(float)

    def unscaled(self, bound: float) -> float:
        if self.aim is Aim.PRICE:
            return bound * self.unit_price + self.view.fixed_price
        return -bound * self.unit_tokens if self.aim is Aim.TOKENS else bound

    def counts(self, x: Floats) -> ColumnCounts:
        whole = np.rint(x).astype(int)
        chosen = int(np.argmax(whole[: self.num_z]))
        replicas = np.zeros(len(self.view.columns), dtype=int)
        of_gang = self.sets == self.rates_of[chosen]
        replicas[self.columns[of_gang]] = whole[self.num_z : self.num_z + self.num_y][of_gang]
        return ColumnCounts(int(self.gangs[chosen]), tuple(int(count) for count in replicas))


def _alike(rows: Floats) -> tuple[Ints, Ints]:
    """Groups equal rows: returns the index of the first row of each group, and the group of each row."""
    found: dict[bytes, int] = {}
    kinds = [found.setdefault(row.tobytes(), len(found)) for row in rows]
    return np.unique(kinds, return_index=True)[1], np.array(kinds)
