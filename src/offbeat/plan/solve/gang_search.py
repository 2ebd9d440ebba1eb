"""Gang by gang: which has the best plan, and what is proven of all the others.

Every gang carries what is proven of it: no plan up to such a period, or below such a price. The gang that promises most
is looked at first: prices by duality rule out as much as they can, for all gangs at once; then the integer program, for
this gang alone, either finds a plan or proves that there is none. Before the whole program one of a few dozen columns
is asked, those that the prices make likely: where thousands of replicas are counted its plan is as near to the bound as
was asked for, and the whole program, which takes many times as long, need not run. It ends when no gang can beat
the best plan by more than the gap. Where the program runs out of time, what was proven before stays and the bracket is
wider.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from offbeat.plan.solve import bounds
from offbeat.plan.solve.bounds import Multipliers
from offbeat.plan.solve.exact import holds, shortest_s
from offbeat.plan.solve.program import Aim, Outcome, Solver, Status, solve
from offbeat.plan.solve.view import Counts, Floats, View

TRIES = 3
"""Of a gang whose program ran out of time, each nearer to what is proven."""
GUESSES = (0.5, 8.0, 64.0)
"""Gaps above what is proven of a gang: where plans are looked for among its likely columns before the whole program."""
TIGHT = 1e-5
"""A linear relaxation that is this near to its gang's bound has nothing more to tell."""
FRESH_ENOUGH = 0.01
"""Of the trajectories in flight: nobody can tell apart mean ages that are nearer than this."""
FRESH_WITHIN_S = 1.0
"""A plan is there already; what was found by then is fresh enough."""
SHARES = (1.0, 0.5, 0.25)
"""Of the headroom that was asked for: how much of it is tried."""
NEARLY = 0.8
"""Of a headroom: whoever has so much of it has it."""
HAIR = 1e-12
"""Of a period: what no user can ask for, and what lifts a bound above the period that was tried."""


@dataclass
class Search:
    """One search: what is known of every gang, and by what."""

    view: View
    gap: float
    within_s: float
    solver: Solver
    pool: list[Multipliers] = field(default_factory=list)
    last: dict[int, Multipliers] = field(default_factory=dict)
    """By gang: the prices of its latest relaxation."""

    def try_gang(
        self, tau_s: float, gang: int, aim: Aim, budget: int | None, guide: Multipliers | None = None
    ) -> Outcome:
        """With a guide only among the columns that its prices make likely."""
        # The answer's own gap comes on top of that between bound and answer; of what is in flight nothing is proven.
        gap, within_s = self.gap / 4, self.within_s
        if aim is Aim.IN_FLIGHT:
            gap, within_s = FRESH_ENOUGH, min(within_s, FRESH_WITHIN_S)
        among = None if guide is None else bounds.likely(self.view, tau_s, guide, gang)
        return solve(self.view, tau_s, [gang], aim, budget, gap, within_s, self.solver, among)


def far_s(view: View) -> float:
    """A period at which one replica of any column suffices: whoever has no plan there has none at all."""
    if not len(view.gangs) or not len(view.columns):
        return 1.0
    alone = view.blocking + view.demand_tokens / view.rate
    opens = view.windows.opens_s[np.isfinite(view.windows.opens_s)]
    return float(max(alone.max(), opens.max(initial=0.0), view.period.max())) * (1 + 1e-9)


def fastest_counts(search: Search, cap: int | None) -> tuple[Status, Counts | None, float, Floats]:
    """The best plan, its period, and by gang the period up to which there is none."""
    view = search.view
    every = np.arange(len(view.gangs))
    low, top = view.period.astype(float), far_s(view)
    high, best = top * (1 + search.gap), None
    is_tight = np.zeros(len(every), dtype=bool)
    is_guessed = np.zeros(len(every), dtype=bool)
    given_up = np.zeros(len(every), dtype=bool)
    while True:
        promising = np.flatnonzero((low * (1 + search.gap) < high) & ~given_up & (low <= top))
        if not len(promising):
            break
        gang = int(promising[np.argmin(low[promising])])
        if not is_tight[gang]:
            tokens, prices = bounds.most_tokens(view, float(low[gang]), gang, cap)
            search.last[gang] = prices
            if tokens < view.demand_tokens * (1 - TIGHT):
                before = low[gang]
                raised = bounds.shortest_periods(view, prices, cap, every[promising], low[promising], top * 2)
                low[promising] = np.maximum(low[promising], raised)
                search.pool.append(prices)
                is_tight[gang] = low[gang] <= before * (1 + TIGHT)
            else:
                is_tight[gang] = True
            continue
        below_s = min(high / (1 + search.gap), top)
        if not is_guessed[gang]:
            is_guessed[gang] = True
            found = _guess(search, gang, cap, float(low[gang]), below_s)
            if found.counts is not None:
                best, high = found.counts, found.high_s
            continue
        found = _improve(search, gang, cap, float(low[gang]), below_s)
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


def _guess(search: Search, gang: int, cap: int | None, low_s: float, below_s: float) -> _Found:
    """A plan of this gang among its likely columns, at a period near to what is proven where there is one."""
    for share in GUESSES:
        tau_s = min(low_s * (1 + share * search.gap), below_s)
        outcome = search.try_gang(tau_s, gang, Aim.TOKENS, cap, search.last[gang])
        if outcome.counts is not None:
            return _Found(Status.FEASIBLE, low_s, outcome.counts, shortest_s(search.view, outcome.counts, tau_s))
        if tau_s == below_s:
            break
    return _Found(Status.UNKNOWN, low_s)


def _improve(search: Search, gang: int, cap: int | None, low_s: float, tau_s: float) -> _Found:
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


def cheapest_counts(search: Search, tau_s: float, cap: int | None, best: Counts | None) -> tuple[Counts | None, float]:
    """The cheapest plan at this period and what no plan there costs less than; infinite where there is none."""
    view = search.view
    fast = np.flatnonzero(view.period <= tau_s)
    least = np.full(len(view.gangs), np.inf)
    least[fast] = view.fixed_price + view.gang_price[fast]
    is_tight = np.zeros(len(view.gangs), dtype=bool)
    is_guessed = np.zeros(len(view.gangs), dtype=bool)
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
            search.last[gang] = prices
            continue
        limit = None if math.isinf(below) else math.ceil(below) - 1
        if not is_guessed[gang]:
            is_guessed[gang] = True
            best = search.try_gang(tau_s, gang, Aim.PRICE, limit, search.last[gang]).counts or best
            continue
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


def roomy_counts(
    search: Search, tau_s: float, cap: int, plans: Sequence[Counts], headroom: float
) -> tuple[Search, Counts] | None:
    """The cheapest plan of these plans' gangs that generates more by the headroom at this period, and has long answers
    ready as much earlier; or by as much of it as that much money allows, the latter given up first. With the search
    that asked for so much; None where there is nothing to spare.
    """
    demand, windows = search.view.problem.demand, search.view.windows
    had = max(_headroom(search.view, tau_s, plan) for plan in plans) * (1 - TIGHT)
    gangs = dict.fromkeys(plan.gang for plan in plans)
    most = {gang: bounds.most_tokens(search.view, tau_s, gang, cap)[0] * (1 + TIGHT) / demand.tokens for gang in gangs}
    for in_time, share in itertools.product((True, False), SHARES):
        wanted = headroom * share
        more = 1 + (had if NEARLY * wanted <= had < wanted else wanted)
        able = [gang for gang in gangs if most[gang] >= more]
        if not able:
            continue
        problem = replace(search.view.problem, demand=replace(demand, tokens=demand.tokens * more))
        view = replace(search.view, problem=problem, windows=replace(windows, stretch=more if in_time else 1.0))
        roomy = Search(view, search.gap, search.within_s, search.solver)
        found = [_roomy_counts(roomy, tau_s, cap, gang) for gang in able]
        if counts := min((one for one in found if one is not None), key=view.price, default=None):
            return roomy, counts
    return _with_its_own(search, tau_s, [plan for plan in plans if search.view.price(plan) <= cap])


def _with_its_own(search: Search, tau_s: float, plans: Sequence[Counts]) -> tuple[Search, Counts] | None:
    """The plan with the most headroom as it is, and a search that asks for what it has."""
    view = search.view
    best = max(plans, key=lambda plan: _headroom(view, tau_s, plan), default=None)
    if best is None or (had := _headroom(view, tau_s, best) * (1 - TIGHT)) <= 0:
        return None
    demand = view.problem.demand
    problem = replace(view.problem, demand=replace(demand, tokens=demand.tokens * (1 + had)))
    return replace(search, view=replace(view, problem=problem)), best


def _headroom(view: View, tau_s: float, plan: Counts) -> float:
    """The share by which a plan generates more than a step asks for."""
    return float(view.tokens(tau_s, np.array([plan.gang]))[0] @ np.array(plan.replicas)) / view.demand_tokens - 1


def _roomy_counts(roomy: Search, tau_s: float, cap: int, gang: int) -> Counts | None:
    guide = bounds.least_price(roomy.view, tau_s, gang)
    if guide is None or bounds.least_prices(roomy.view, tau_s, guide, np.array([gang]))[0] > cap:
        return None
    likely = roomy.try_gang(tau_s, gang, Aim.PRICE, cap, guide).counts
    return likely or roomy.try_gang(tau_s, gang, Aim.PRICE, cap).counts


def freshest_counts(search: Search, tau_s: float, counts: Counts) -> Counts:
    """The same gang at the same price with the least in flight; the plan itself where time runs out."""
    view, price = search.view, search.view.price(counts)
    relaxed = bounds.least_in_flight(view, tau_s, counts.gang, price)
    guides = (None,) if relaxed is None else (relaxed[1], None)
    for guide in guides:
        if relaxed is not None and view.in_flight(counts) <= relaxed[0] * (1 + FRESH_ENOUGH):
            break
        outcome = search.try_gang(tau_s, counts.gang, Aim.IN_FLIGHT, price, guide)
        if outcome.counts is not None and view.in_flight(outcome.counts) < view.in_flight(counts):
            assert holds(view, outcome.counts, tau_s, price)
            counts = outcome.counts
    return counts


def tidied(view: View, tau_s: float, counts: Counts) -> Counts:
    """The plan without shapes that bring little: while most of its headroom stays, the least productive one goes."""
    least = 1 + NEARLY * _headroom(view, tau_s, counts)
    tokens = view.tokens(tau_s, np.array([counts.gang]))[0]
    for j in sorted(np.flatnonzero(counts.replicas), key=lambda j: tokens[j] * counts.replicas[j]):
        replicas = tuple(0 if i == j else count for i, count in enumerate(counts.replicas))
        fewer = replace(counts, replicas=replicas)
        if 1 + _headroom(view, tau_s, fewer) < least:
            break
        if holds(view, fewer, tau_s):
            counts = fewer
    return counts
