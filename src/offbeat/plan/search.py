"""From a problem to a plan with a proof: the fastest for a budget, the cheapest at a throughput, and what lies between.

Every gang carries what is proven of it: no plan up to such a period, or below such a price. The gang that promises most
is looked at first: prices by duality rule out as much as they can, for all gangs at once; then the integer program, for
this gang alone, either finds a plan or proves that there is none. It ends when no gang can beat the best plan by more
than the gap. Where the program runs out of time, what was proven before stays and the bracket is wider.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from offbeat.plan import bounds
from offbeat.plan.bounds import Multipliers
from offbeat.plan.certificate import Certificate, certify
from offbeat.plan.problem import Problem
from offbeat.plan.program import Aim, Outcome, Solver, Status, highs, holds, shortest_s, solve
from offbeat.plan.solution import Solution
from offbeat.plan.view import MICRO, Counts, Floats, View, micros, restore, view_of

GAP = 1e-3
WITHIN_S = 5.0
TRIES = 3
"""Of a gang whose program ran out of time, each nearer to what is proven."""
TIGHT = 1e-5
"""A linear relaxation that is this near to its gang's bound has nothing more to tell."""
FRESH_ENOUGH = 0.01
"""Of the trajectories in flight: nobody can tell apart mean ages that are nearer than this."""
FRESH_WITHIN_S = 1.0
"""A plan is there already; what was found by then is fresh enough."""
HAIR = 1e-12
"""Throughput and period are each other's quotient; a plan that meets one to this precision meets the other."""


@dataclass(frozen=True)
class Result:
    """What was asked, answered."""

    status: Status
    solution: Solution | None = None
    price_per_h: float = math.nan
    tokens_per_s: float = math.nan
    in_flight: int = 0
    """Trajectories."""
    mean_age: float = math.nan
    """Versions, by Little's law: (in flight + queue) / trajectories of a step."""
    tau_lo_s: float = 0.0
    """No plan within the budget has a shorter period."""
    price_lo_per_h: float = 0.0
    """No plan of this period costs less."""
    certificate: Certificate | None = None
    note: str = ""
    """In one line, where the answer needs a word."""


@dataclass
class _Search:
    """One search: what is known of every gang, and by what."""

    view: View
    gap: float
    within_s: float
    solver: Solver
    pool: list[Multipliers] = field(default_factory=list)

    def try_gang(self, tau_s: float, gang: int, aim: Aim, budget: int | None) -> Outcome:
        # The answer's own gap comes on top of that between bound and answer; of what is in flight nothing is proven.
        gap, within_s = self.gap / 4, self.within_s
        if aim is Aim.IN_FLIGHT:
            gap, within_s = FRESH_ENOUGH, min(within_s, FRESH_WITHIN_S)
        return solve(self.view, tau_s, [gang], aim, budget, gap, within_s, self.solver)


def fastest(
    problem: Problem,
    budget: float | None = None,
    gap: float = GAP,
    within_s: float = WITHIN_S,
    solver: Solver = highs,
) -> Result:
    """The shortest period for at most `budget` ($/h); of its plans the cheapest, of those one with least in flight.

    `within_s` limits each integer program, not the whole.
    """
    search = _Search(view_of(problem), gap, within_s, solver)
    cap = None if budget is None else micros(budget)
    status, counts, tau_s, low = _fastest(search, cap)
    tau_lo_s = float(low.min(initial=math.inf))
    if counts is None:
        return Result(status, tau_lo_s=tau_lo_s, note=_note(problem))
    # Proven is what lies below: at the bound itself, such as a gang's own period, there may be a plan.
    tau_lo_s = float(np.nextafter(min(tau_lo_s / (1 + 2 * HAIR), tau_s), 0.0))
    certificate = certify(search.view, search.pool, tau_lo_s, cap, gap=tau_s / tau_lo_s - 1)
    cheaper = _Search(search.view, gap, within_s, solver)
    counts, least = _cheapest(cheaper, tau_s, cap, counts)
    assert counts is not None, "the plan that was there is gone"
    return _result(search.view, tau_s, _freshest(cheaper, tau_s, counts), certificate, tau_lo_s, least)


def cheapest(
    problem: Problem,
    throughput: float,
    budget: float | None = None,
    gap: float = GAP,
    within_s: float = WITHIN_S,
    solver: Solver = highs,
) -> Result:
    """The least price at which a step's tokens come at `throughput` tokens a second; of its plans one with least in
    flight."""
    return _at(view_of(problem), _period(problem, throughput), budget, gap, within_s, solver)


def frontier(
    problem: Problem, num: int = 20, gap: float = GAP, within_s: float = WITHIN_S, solver: Solver = highs
) -> list[Result]:
    """The cheapest plans from the fastest period to the one where money can no longer be saved; each cheaper than the
    last."""
    quick = fastest(problem, None, gap, within_s, solver)
    if quick.solution is None:
        return []
    view = view_of(problem)
    far = _at(view, _far_s(view), None, gap, within_s, solver)
    slow = fastest(problem, far.price_per_h, gap, within_s, solver)
    if slow.solution is None:
        return [quick]
    points = [quick]
    for tau_s in np.geomspace(quick.solution.tau_s, slow.solution.tau_s, num)[1:-1]:
        point = _at(view, float(tau_s), None, gap, within_s, solver)
        if point.solution is not None and point.price_per_h < points[-1].price_per_h:
            points.append(point)
    return [*points, slow] if slow.price_per_h < points[-1].price_per_h else points


def _at(view: View, tau_s: float, budget: float | None, gap: float, within_s: float, solver: Solver) -> Result:
    search = _Search(view, gap, within_s, solver)
    counts, least = _cheapest(search, tau_s, None if budget is None else micros(budget), None)
    if counts is None:
        status = Status.INFEASIBLE if least == math.inf else Status.UNKNOWN
        return Result(status, tau_lo_s=tau_s if status is Status.INFEASIBLE else 0.0, note=_note(view.problem))
    counts = _freshest(search, tau_s, counts)
    certificate = certify(view, search.pool, tau_s, math.ceil(least) - 1, gap=view.price(counts) / max(least, 1.0) - 1)
    return _result(view, tau_s, counts, certificate, 0.0, least)


def _period(problem: Problem, throughput: float) -> float:
    return problem.demand.tokens / throughput * (1 + HAIR)


def _result(
    view: View, tau_s: float, counts: Counts, certificate: Certificate, tau_lo_s: float, least: float
) -> Result:
    demand, in_flight = view.problem.demand, view.in_flight(counts)
    price = view.price(counts)
    return Result(
        Status.FEASIBLE,
        restore(view, counts, tau_s),
        price / MICRO,
        demand.tokens / tau_s,
        in_flight,
        (in_flight + demand.queue) / demand.trajectories if demand.bound else 0.0,
        tau_lo_s,
        min(least, price) / MICRO,
        certificate,
        _note(view.problem),
    )


def _note(problem: Problem) -> str:
    if problem.demand.bound:
        return ""
    if problem.may_share:
        return "S = 0: generation and training take turns on the same nodes, so their times add up"
    return "S = 0 with disjoint pools: each waits while the other works, so their times add up and one of them is idle"


def _far_s(view: View) -> float:
    """A period at which one replica of any column suffices: whoever has no plan there has none at all."""
    if not len(view.gangs) or not len(view.columns):
        return 1.0
    alone = view.blocking + view.demand_tokens / view.rate
    opens = view.opens_s[np.isfinite(view.opens_s)]
    return float(max(alone.max(), opens.max(initial=0.0), view.period.max())) * (1 + 1e-9)


def _fastest(search: _Search, cap: int | None) -> tuple[Status, Counts | None, float, Floats]:
    """The best plan, its period, and by gang the period up to which there is none."""
    view = search.view
    every = np.arange(len(view.gangs))
    low, top = view.period.astype(float), _far_s(view)
    high, best = top * (1 + search.gap), None
    is_tight = np.zeros(len(every), dtype=bool)
    given_up = np.zeros(len(every), dtype=bool)
    while True:
        promising = np.flatnonzero((low * (1 + search.gap) < high) & ~given_up & (low <= top))
        if not len(promising):
            break
        gang = int(promising[np.argmin(low[promising])])
        if not is_tight[gang]:
            tokens, prices = bounds.most_tokens(view, float(low[gang]), gang, cap)
            if tokens < view.demand_tokens * (1 - TIGHT):
                before = low[gang]
                raised = bounds.shortest_periods(view, prices, cap, every[promising], low[promising], top * 2)
                low[promising] = np.maximum(low[promising], raised)
                search.pool.append(prices)
                is_tight[gang] = low[gang] <= before * (1 + TIGHT)
            else:
                is_tight[gang] = True
            continue
        found = _improve(search, gang, cap, float(low[gang]), min(high / (1 + search.gap), top))
        low[gang], given_up[gang] = found.low_s, found.status is Status.UNKNOWN
        if found.counts is not None:
            best, high = found.counts, found.high_s
    if best is None:
        return (
            (Status.UNKNOWN if given_up.any() else Status.INFEASIBLE),
            None,
            math.inf,
            np.where(low > top, np.inf, low),
        )
    return Status.FEASIBLE, best, high, low


@dataclass(frozen=True)
class _Found:
    status: Status
    low_s: float
    counts: Counts | None = None
    high_s: float = math.inf


def _improve(search: _Search, gang: int, cap: int | None, low_s: float, tau_s: float) -> _Found:
    """A plan of this gang at a period of `tau_s` or less, or the proof that it has none."""
    for _ in range(TRIES):
        outcome = search.try_gang(tau_s, gang, Aim.TOKENS, cap)
        if outcome.counts is not None:
            return _Found(Status.FEASIBLE, low_s, outcome.counts, shortest_s(search.view, outcome.counts, tau_s))
        if outcome.status is Status.INFEASIBLE:
            # A hair above, so that this gang is done with at this period.
            return _Found(Status.INFEASIBLE, max(low_s, tau_s * (1 + HAIR)))
        tau_s = math.sqrt(low_s * tau_s)
    return _Found(Status.UNKNOWN, low_s)


def _cheapest(search: _Search, tau_s: float, cap: int | None, best: Counts | None) -> tuple[Counts | None, float]:
    """The cheapest plan at this period and what no plan there costs less than; infinite where there is none."""
    view = search.view
    fast = np.flatnonzero(view.period <= tau_s)
    least = np.full(len(view.gangs), np.inf)
    least[fast] = view.fixed_price + view.gang_price[fast]
    is_tight = np.zeros(len(view.gangs), dtype=bool)
    given_up = np.zeros(len(view.gangs), dtype=bool)
    while True:
        below = math.inf if cap is None else cap + 1.0
        if best is not None:
            below = min(below, view.price(best) / (1 + search.gap))
        open_gangs = fast[(least[fast] < below) & ~given_up[fast]]
        if not len(open_gangs):
            break
        gang = int(open_gangs[np.argmin(least[open_gangs])])
        if not is_tight[gang]:
            is_tight[gang] = True
            prices = bounds.least_price(view, tau_s, gang) or bounds.most_tokens(view, tau_s, gang, None)[1]
            least[open_gangs] = np.maximum(least[open_gangs], bounds.least_prices(view, tau_s, prices, open_gangs))
            search.pool.append(prices)
            continue
        limit = None if math.isinf(below) else math.ceil(below) - 1
        outcome = search.try_gang(tau_s, gang, Aim.PRICE, limit)
        if outcome.counts is not None:
            best = outcome.counts
            least[gang] = max(least[gang], outcome.bound or 0.0)
        elif outcome.status is Status.INFEASIBLE:
            least[gang] = max(least[gang], math.inf if limit is None else limit + 1.0)
        else:
            given_up[gang] = True
    bound = float(least.min(initial=math.inf))
    if best is None:
        return None, bound if given_up.any() else math.inf
    return best, min(bound, float(view.price(best)))


def _freshest(search: _Search, tau_s: float, counts: Counts) -> Counts:
    """The same gang at the same price with the least in flight; the plan itself where time runs out."""
    price = search.view.price(counts)
    outcome = search.try_gang(tau_s, counts.gang, Aim.IN_FLIGHT, price)
    if outcome.counts is None or search.view.in_flight(outcome.counts) > search.view.in_flight(counts):
        return counts
    assert holds(search.view, outcome.counts, tau_s, price)
    return outcome.counts
