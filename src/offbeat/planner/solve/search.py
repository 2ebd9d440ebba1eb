"""The search for a plan with a proof: the fastest plan within a budget, the cheapest at a throughput, or several plans
from the fastest to the cheapest.

Every training gang has a proven lower bound on the period, or on the price, of plans that use it. The search always
takes the gang with the lowest bound. Dual prices first raise the bounds of all gangs at once. Then the integer program
for this gang alone finds a plan or proves that none exists; it first tries the few columns (replica shapes) that the
dual prices make likely. The search ends when no gang can beat the best plan by more than the gap, a relative tolerance.
If the program runs out of time, the gap that is reported is wider.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from offbeat.planner.problem import PlanningProblem, Solution
from offbeat.planner.solve import bounds
from offbeat.planner.solve.bounds import MARGIN, Multipliers
from offbeat.planner.solve.certificate import Certificate, certify
from offbeat.planner.solve.program import (
    Aim,
    Solver,
    SolverOutcome,
    Status,
    WholeNodes,
    highs,
    holds,
    shortest_s,
    solve,
    with_whole_nodes,
)
from offbeat.planner.solve.view import MICRO, ColumnCounts, Floats, Ints, View, micros, restore, view_of

GAP = 1e-3
"""Relative gap between a plan's period and the lower bound at which the search ends; less is below what placement can
tell, and far below the errors of the cost model."""
PRICE_GAP = 1e-3
"""Relative gap between price and bound at which the search for a lower price ends. Numbers of nodes are whole, so a
smaller gap would take several times as long to prove."""
TRIES = 3
"""Number of times that the integer program of one gang is tried if it runs out of time. Each try has a period nearer to
the gang's lower bound."""
WIDER = 4.0
"""Factor between the steps by which a relaxation looks for a period that it cannot rule out."""
GUESSES = (0.5, 8.0, 64.0, 512.0, math.inf)
"""Periods at which a gang is tried with its likely columns (replica shapes) only, before it is tried with all columns.
Each is given as its distance above the gang's lower bound, in multiples of the gap; the last is the longest of use."""
TIGHT = 1e-5
"""Relative tolerance of linear relaxations: raising a bound by a smaller share counts as no improvement."""
FRESH_ENOUGH = 0.01
"""Relative tolerance of the number of trajectories in flight; smaller differences hardly change the mean staleness."""
LEAST_S = 0.05
"""Shortest time limit in seconds that is given to an integer program."""
FINISH_S = 1.0
"""Seconds that making a plan cheaper and fresher may take after the time for finding it is over."""
WITHIN_S, FRESH_WITHIN_S = 1.0, 0.3
"""Time limits in seconds: of an integer program, and of one that only lowers the number of trajectories in flight."""
SHARES = (1.0, 0.5, 0.25)
"""Shares of `Demand.headroom` (surplus over the demand for tokens) that are tried, in this order."""
NEARLY = 0.8
"""A plan with at least this share of a headroom (surplus over the demand for tokens) counts as having all of it."""
HAIR = 1e-12
"""Relative difference between periods that is too small to matter to users. A lower bound is raised by this share above
a period that was ruled out."""


@dataclass
class Search:
    """State of one search for a plan."""

    view: View
    gap: float
    """Relative distance between a plan and the lower bound at which the plan is good enough."""
    solver: Solver
    pool: list[Multipliers] = field(default_factory=list)
    """Dual prices found so far. `certify` takes from them those that prove the bound."""
    last: dict[int, Multipliers] = field(default_factory=dict)
    """Dual prices of each gang's latest linear relaxation."""
    until_s: float = math.inf
    """Seconds of processor time (`time.process_time`) after which no further integer program is started, so that the
    gap stays wider."""

    @property
    def is_late(self) -> bool:
        return time.process_time() > self.until_s

    def try_gang(
        self, tau_s: float, gang: int, aim: Aim, budget: int | None, guide: Multipliers | None = None
    ) -> SolverOutcome:
        """Solves the integer program of one training gang. With `guide`, uses only the columns (replica shapes) that
        these dual prices make likely."""
        # The program's gap adds to the gap between bound and plan. Nothing is proven about trajectories in flight.
        gap, within_s = (FRESH_ENOUGH, FRESH_WITHIN_S) if aim is Aim.IN_FLIGHT else (self.gap / 4, WITHIN_S)
        if self.is_late:
            return SolverOutcome(Status.UNKNOWN)
        within_s = min(within_s, max(self.until_s - time.process_time(), LEAST_S))
        if guide is not None:
            among = bounds.likely(self.view, tau_s, guide, gang)
        elif aim is Aim.IN_FLIGHT:
            among = None
        else:
            among = self._possible(tau_s, gang, aim, budget)
        return solve(self.view, tau_s, [gang], aim, budget, gap, within_s, self.solver, among)

    def whole_nodes(self, tau_s: float, gang: int, aim: Aim, budget: int | None) -> WholeNodes:
        """Solves the relaxation of `with_whole_nodes` for one training gang."""
        if self.is_late:
            return WholeNodes(Status.UNKNOWN)
        within_s = min(WITHIN_S, max(self.until_s - time.process_time(), LEAST_S))
        return with_whole_nodes(self.view, tau_s, gang, aim, budget, self.gap, within_s, self.solver)

    def least_price(self, tau_s: float, gang: int, limit: int | None) -> float:
        """Returns a lower bound on the price of this gang's plans for at most `limit` (both in millionths of $/h);
        infinite if there are none."""
        relaxed = self.whole_nodes(tau_s, gang, Aim.PRICE, limit)
        if relaxed.status is Status.INFEASIBLE:
            return math.inf
        return 0.0 if relaxed.bound is None else relaxed.bound * (1 - MARGIN) - 1.0

    def rules_out(self, tau_s: float, gang: int, budget: int | None) -> bool:
        """Whether it is proven that this gang has no plan at this period for at most `budget` (millionths of $/h; None:
        any price)."""
        if self.whole_nodes(tau_s, gang, Aim.TOKENS, budget).status is Status.INFEASIBLE:
            return True
        # A budget just below the lowest price is within the solver's tolerance, the price itself is not.
        if budget is not None and self.least_price(tau_s, gang, None) > budget:
            return True
        return self.try_gang(tau_s, gang, Aim.TOKENS, budget).status is Status.INFEASIBLE

    def _possible(self, tau_s: float, gang: int, aim: Aim, budget: int | None) -> Ints | None:
        """Returns the columns that a plan of this gang can contain, by the dual prices of a relaxation at this period;
        None: any."""
        if aim is Aim.PRICE and budget is not None:
            prices = bounds.least_price(self.view, tau_s, gang)
            if prices is None:
                return None
        elif aim is Aim.TOKENS:
            _, prices = bounds.most_tokens(self.view, tau_s, gang, budget)
        else:
            return None
        self.pool.append(prices)
        return bounds.possible(self.view, tau_s, prices, budget, gang)


def far_s(view: View) -> float:
    """Returns a period, in seconds, so long that one replica of any column (replica shape) can generate all tokens of a
    step. A training gang without a plan at this period has no plan at all."""
    if not len(view.gangs) or not len(view.columns):
        return 1.0
    alone = view.blocking + view.demand_tokens / view.rate
    opens = view.windows.alone_s(np.arange(len(view.gangs)))  # without a relay, which might cost too much
    opens = opens[np.isfinite(opens)]
    return float(max(alone.max(), opens.max(initial=0.0), view.period.max())) * (1 + 1e-9)


def fastest_counts(
    search: Search, cap: int | None, below_s: float = math.inf, best: ColumnCounts | None = None
) -> tuple[Status, ColumnCounts | None, float, Floats]:
    """Searches for the fastest plan for at most `cap` (millionths of $/h; None: any price), with a period below
    `below_s`; `best` is a plan that was found earlier, if any. Returns the status, the plan, its period, and for each
    training gang a lower bound on the period of its plans, or a period from `below_s` on."""
    view = search.view
    every = np.arange(len(view.gangs))
    low, top = view.period.astype(float), far_s(view)
    high = min(top * (1 + search.gap), below_s * (1 + search.gap))
    if best is not None:
        high = shortest_s(view, best, top)
    is_tight, is_whole, is_guessed, given_up = np.zeros((4, len(every)), dtype=bool)
    while True:
        promising = np.flatnonzero((low * (1 + search.gap) < high) & ~given_up & (low <= top))
        if not len(promising):
            break
        gang = int(promising[np.argmin(low[promising])])
        if not is_tight[gang]:
            tokens, prices = bounds.most_tokens(view, float(low[gang]), gang, cap)
            search.last[gang] = prices
            before = low[gang]
            if tokens < view.demand_tokens * (1 - TIGHT):
                raised = bounds.shortest_periods(view, prices, cap, every[promising], low[promising], top * 2)
                low[promising] = np.maximum(low[promising], raised)
                search.pool.append(prices)
            # Steps below the gap lead nowhere: relaxations with whole nodes make larger ones.
            is_tight[gang] = low[gang] <= before * (1 + search.gap)
            continue
        under_s = min(high / (1 + search.gap), top)
        if search.is_late and best is not None:
            break
        if not is_whole[gang]:
            is_whole[gang] = True
            low[gang] = _raised(search, gang, cap, float(low[gang]), under_s)
            continue
        if not is_guessed[gang]:
            is_guessed[gang] = True
            found = _guess(search, gang, cap, float(low[gang]), under_s)
            if found.counts is not None:
                best, high = found.counts, found.high_s
            continue
        # A plan with more tokens may be hardly faster, so periods of the best gang are halved.
        tau_s = math.sqrt(float(low[gang]) * under_s) if best is not None and best.gang == gang else under_s
        found = _improve(search, gang, cap, float(low[gang]), tau_s)
        low[gang], given_up[gang] = found.low_s, found.status is Status.UNKNOWN
        if found.counts is not None:
            best, high = found.counts, found.high_s
    if best is None:
        status = Status.UNKNOWN if given_up.any() else Status.INFEASIBLE
        return status, None, math.inf, np.where(low > top, np.inf, low)
    return Status.FEASIBLE, best, high, low


@dataclass(frozen=True)
class _Found:
    status: Status
    low_s: float
    counts: ColumnCounts | None = None
    high_s: float = math.inf


def _raised(search: Search, gang: int, cap: int | None, low_s: float, below_s: float) -> float:
    """Raises the lower bound `low_s` on the period of this gang's plans by relaxations with whole nodes, to `below_s`
    at most, and keeps dual prices for the nodes of the shortest period that remains possible."""
    share, high_s, nodes = search.gap, math.inf, None
    # Where another gang's plan is about as fast, perhaps this gang has none that is faster.
    tau_s = below_s if below_s < low_s * WIDER else min(low_s * (1 + share), below_s)
    while low_s <= below_s and low_s * (1 + search.gap / 2) < high_s:
        outcome = search.whole_nodes(tau_s, gang, Aim.TOKENS, cap)
        if outcome.status is Status.INFEASIBLE:
            low_s, share = tau_s * (1 + HAIR), share * WIDER
            # The solution with the most tokens allows a shorter period, perhaps the shortest of all.
            tau_s = min(low_s * (1 + share), below_s, high_s / (1 + search.gap / 2))
        elif outcome.status is Status.FEASIBLE:
            high_s, nodes = outcome.shortest_s, outcome.nodes
            tau_s = math.sqrt(low_s * high_s)
        else:
            break
    if nodes is not None:
        search.last[gang] = bounds.most_tokens(search.view, high_s, gang, cap, nodes)[1]
    return low_s


def _guess(search: Search, gang: int, cap: int | None, low_s: float, below_s: float) -> _Found:
    """Looks for a plan of this gang at periods just above its lower bound `low_s`, but at most `below_s`. Uses only the
    columns that `bounds.likely` returns, so it proves nothing."""
    for share in GUESSES:
        tau_s = min(low_s * (1 + share * search.gap), below_s)
        if math.isinf(share):
            tau_s = below_s
        outcome = search.try_gang(tau_s, gang, Aim.TOKENS, cap, search.last[gang])
        if outcome.counts is not None:
            return _Found(Status.FEASIBLE, low_s, outcome.counts, shortest_s(search.view, outcome.counts, tau_s))
        if tau_s == below_s:
            break
    return _Found(Status.UNKNOWN, low_s)


def _improve(search: Search, gang: int, cap: int | None, low_s: float, tau_s: float) -> _Found:
    """Finds a plan of this gang at a period of at most `tau_s`, or proves that there is none and raises the lower bound
    `low_s`. If the solver runs out of time, tries a shorter period, and a proof then raises the bound only to that
    period. The status is `UNKNOWN` if every try fails."""
    for _ in range(TRIES):
        outcome = search.try_gang(tau_s, gang, Aim.TOKENS, cap)
        if outcome.counts is not None:
            return _Found(Status.FEASIBLE, low_s, outcome.counts, shortest_s(search.view, outcome.counts, tau_s))
        if outcome.status is Status.UNKNOWN and search.is_late:
            break
        if outcome.status is Status.INFEASIBLE:
            # Just above `tau_s`, so that the gang is not tried again at this period.
            return _Found(Status.INFEASIBLE, max(low_s, tau_s * (1 + HAIR)))
        tau_s = math.sqrt(low_s * tau_s)
    return _Found(Status.UNKNOWN, low_s)


def cheapest_counts(
    search: Search, tau_s: float, cap: int | None, best: ColumnCounts | None, *, any_will_do: bool = False
) -> tuple[ColumnCounts | None, float]:
    """Returns the cheapest plan at this period for at most `cap` (None: any price), and a lower bound on the price. The
    bound is infinite if it is proven that there is no plan. Prices are in millionths of $/h. `best` is a plan that was
    found earlier, if any. With `any_will_do`, the first plan found is returned."""
    view = search.view
    fast = np.flatnonzero(view.period <= tau_s)
    least = np.full(len(view.gangs), np.inf)
    least[fast] = view.fixed_price + view.gang_price[fast]
    is_tight, is_whole, is_guessed, given_up = np.zeros((4, len(view.gangs)), dtype=bool)
    while True:
        below = math.inf if cap is None else cap + 1.0
        if best is not None:
            below = min(below, view.price(best) / (1 + search.gap))
        open_gangs = fast[(least[fast] < below) & ~given_up[fast]]
        if not len(open_gangs) or (best is not None and (search.is_late or any_will_do)):
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
        if not is_whole[gang]:
            is_whole[gang] = True
            bound = search.least_price(tau_s, gang, limit)
            least[gang] = max(least[gang], bound if limit is None else min(bound, limit + 1.0))
            continue
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
    search: Search, tau_s: float, cap: int, plans: Sequence[ColumnCounts], headroom: float
) -> tuple[Search, ColumnCounts] | None:
    """Looks for the cheapest plan with spare capacity at the period `tau_s`. Such a plan generates 1 + `headroom` times
    the demanded tokens, and long answers have more time by the same factor. Only the gangs (cards that train together)
    of `plans` are tried. Returns a search with the raised demand, and the plan.

    If no such plan costs at most `cap` (millionths of $/h), smaller shares of `headroom` are tried, then all shares for
    tokens only, without more time for long answers. If these fail too, the plan of `plans` that has the most spare
    tokens and costs at most `cap` is returned, or None if it has no spare tokens."""
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
        roomy = Search(view, search.gap, search.solver, until_s=search.until_s)
        found = [_roomy_counts(roomy, tau_s, cap, gang) for gang in able]
        if counts := min((one for one in found if one is not None), key=view.price, default=None):
            return roomy, counts
    return _with_its_own(search, tau_s, [plan for plan in plans if search.view.price(plan) <= cap])


def _with_its_own(search: Search, tau_s: float, plans: Sequence[ColumnCounts]) -> tuple[Search, ColumnCounts] | None:
    """Takes the plan of `plans` with the largest headroom (surplus of tokens over the demand). Returns a search with
    the demand raised by this headroom, and the plan; None if no plan has any headroom."""
    view = search.view
    best = max(plans, key=lambda plan: _headroom(view, tau_s, plan), default=None)
    if best is None or (had := _headroom(view, tau_s, best) * (1 - TIGHT)) <= 0:
        return None
    demand = view.problem.demand
    problem = replace(view.problem, demand=replace(demand, tokens=demand.tokens * (1 + had)))
    return replace(search, view=replace(view, problem=problem)), best


def _headroom(view: View, tau_s: float, plan: ColumnCounts) -> float:
    """Share by which a plan exceeds the demand for tokens."""
    return float(view.tokens(tau_s, np.array([plan.gang]))[0] @ np.array(plan.replicas)) / view.demand_tokens - 1


def _roomy_counts(roomy: Search, tau_s: float, cap: int, gang: int) -> ColumnCounts | None:
    guide = bounds.least_price(roomy.view, tau_s, gang)
    if guide is None or bounds.least_prices(roomy.view, tau_s, guide, np.array([gang]))[0] > cap:
        return None
    if roomy.whole_nodes(tau_s, gang, Aim.PRICE, cap).status is Status.INFEASIBLE:
        return None
    likely = roomy.try_gang(tau_s, gang, Aim.PRICE, cap, guide).counts
    return likely or roomy.try_gang(tau_s, gang, Aim.PRICE, cap).counts


def freshest_counts(search: Search, tau_s: float, counts: ColumnCounts) -> ColumnCounts:
    """Returns a plan with the gang of `counts`, at no higher price, with the fewest trajectories in flight. Returns
    `counts` itself if no plan with fewer trajectories is found in time."""
    view, price = search.view, search.view.price(counts)
    relaxed = bounds.least_in_flight(view, tau_s, counts.gang, price)
    fewest = search.whole_nodes(tau_s, counts.gang, Aim.IN_FLIGHT, price).bound or 0.0
    guides = (None,) if relaxed is None else (relaxed[1], None)
    for guide in guides:
        if view.in_flight(counts) <= max(fewest, 0.0 if relaxed is None else relaxed[0]) * (1 + FRESH_ENOUGH):
            break
        outcome = search.try_gang(tau_s, counts.gang, Aim.IN_FLIGHT, price, guide)
        if outcome.counts is not None and view.in_flight(outcome.counts) < view.in_flight(counts):
            assert holds(view, outcome.counts, tau_s, price)
            counts = outcome.counts
    return counts


def tidied(view: View, tau_s: float, counts: ColumnCounts) -> ColumnCounts:
    """Simplifies a plan: drops the columns (replica shapes) that generate the fewest tokens, as long as the plan stays
    valid and keeps most of its surplus of tokens."""
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


@dataclass(frozen=True)
class Result:
    """Result of a search: the plan found, if any, and its proof."""

    status: Status
    solution: Solution | None = None
    price_per_h: float = math.nan
    tokens_per_s: float = math.nan
    in_flight: int = 0
    """Number of trajectories in flight."""
    tau_lo_s: float = 0.0
    """Lower bound in seconds on the period of a plan within the budget; 0: no bound was proven."""
    certificate: Certificate | None = None
    note: str = ""
    """A remark of one line, if any."""


@dataclass(frozen=True)
class Found:
    """The fastest counts of a search, before they are made cheap and fresh."""

    search: Search
    status: Status
    counts: ColumnCounts | None
    tau_s: float
    tau_lo_s: float
    """Lower bound on the period of every plan; from `below_s` of `find` on, it says only that."""

    @property
    def solution(self) -> Solution | None:
        return None if self.counts is None else restore(self.search.view, self.counts, self.tau_s)


def find(
    problem: PlanningProblem,
    budget: float | None = None,
    gap: float = GAP,
    solver: Solver = highs,
    below_s: float = math.inf,
    until_s: float = math.inf,
) -> Found:
    """Finds the plan with the shortest period for at most `budget` ($/h), if it is shorter than `below_s` seconds.
    After `until_s` of processor time no further integer program starts, so that the gap stays wider."""
    if not problem.gangs or not problem.rollout:
        return Found(Search(view_of(problem), gap, solver), Status.INFEASIBLE, None, math.inf, math.inf)
    search = Search(view_of(problem), gap, solver, until_s=until_s)
    cap = None if budget is None else micros(budget)
    some = None
    if cap is not None and math.isinf(below_s):
        # So little money may buy nothing, however long the period is.
        some, least = cheapest_counts(search, far_s(search.view), cap, None, any_will_do=True)
        if some is None and math.isinf(least):
            return Found(search, Status.INFEASIBLE, None, math.inf, math.inf)
        search.pool.clear()
        search.last.clear()
    status, counts, tau_s, low = fastest_counts(search, cap, below_s, some)
    tau_lo_s = float(low.min(initial=math.inf))
    return Found(search, status, counts, tau_s, min(tau_lo_s, below_s if counts is None else tau_s))


def finish(found: Found, budget: float | None) -> Result:
    """Makes a plan with the period found as cheap and fresh as possible, and proves its period."""
    if found.counts is None:
        return Result(found.status, tau_lo_s=found.tau_lo_s, note=note_of(found.search.view.problem))
    search, counts, tau_s = found.search, found.counts, found.tau_s
    view, cap = search.view, None if budget is None else micros(budget)
    # The proof is for periods below the bound: at the bound, such as a gang's own period, there may be a plan.
    tau_lo_s = float(np.nextafter(min(found.tau_lo_s / (1 + 2 * HAIR), tau_s), 0.0))
    certificate = certify(view, search.pool, tau_lo_s, cap, gap=tau_s / tau_lo_s - 1)
    last = replace(search, gap=max(search.gap, PRICE_GAP), pool=[], last={}, until_s=search.until_s + FINISH_S)
    cheap, _ = cheapest_counts(last, tau_s, cap, counts)
    assert cheap is not None, "bug: the search lost a plan that it had found"
    if headroom := view.problem.demand.headroom:
        price = view.price(cheap)
        last, cheap = roomy_counts(last, tau_s, price, [cheap, counts], headroom) or (last, cheap)
    kept = tidied(view, tau_s, freshest_counts(last, tau_s, cheap))
    return _result(view, tau_s, kept, certificate, tau_lo_s)


def fastest(
    problem: PlanningProblem,
    budget: float | None = None,
    gap: float = GAP,
    solver: Solver = highs,
    until_s: float = math.inf,
) -> Result:
    """Returns the plan with the shortest period for at most `budget` ($/h). Of equally fast plans, the cheapest is
    preferred, then one that exceeds the demand for tokens, then the one with the fewest trajectories in flight."""
    return finish(find(problem, budget, gap, solver, until_s=until_s), budget)


def period_for(problem: PlanningProblem, throughput: float) -> float:
    """Seconds of a step at `throughput` tokens per second, and slightly more, against rounding."""
    return problem.demand.tokens / throughput * (1 + HAIR)


def cheapest(
    problem: PlanningProblem,
    throughput: float,
    budget: float | None = None,
    solver: Solver = highs,
    until_s: float = math.inf,
) -> Result:
    """Returns the cheapest plan with `throughput` tokens per second; of several, one with the fewest trajectories in
    flight. After `until_s` of processor time no further integer program starts."""
    if not problem.gangs or not problem.rollout:
        return Result(Status.INFEASIBLE, tau_lo_s=period_for(problem, throughput))
    return at_period(view_of(problem), period_for(problem, throughput), budget, solver, until_s)


def at_period(
    view: View, tau_s: float, budget: float | None = None, solver: Solver = highs, until_s: float = math.inf
) -> Result:
    """Returns the cheapest plan with this period for at most `budget` ($/h)."""
    search = Search(view, PRICE_GAP, solver, until_s=until_s)
    counts, least = cheapest_counts(search, tau_s, None if budget is None else micros(budget), None)
    if counts is None:
        status = Status.INFEASIBLE if least == math.inf else Status.UNKNOWN
        return Result(status, tau_lo_s=tau_s if status is Status.INFEASIBLE else 0.0, note=note_of(view.problem))
    counts = freshest_counts(search, tau_s, counts)
    certificate = certify(view, search.pool, tau_s, math.ceil(least) - 1, gap=view.price(counts) / max(least, 1.0) - 1)
    return _result(view, tau_s, counts, certificate, 0.0)


def _result(view: View, tau_s: float, counts: ColumnCounts, certificate: Certificate, tau_lo_s: float) -> Result:
    solution = restore(view, counts, tau_s)
    return Result(
        Status.FEASIBLE,
        solution,
        view.price(counts) / MICRO,
        view.demand_tokens / tau_s,
        view.in_flight(counts),
        tau_lo_s,
        certificate,
        note_of(view.problem, solution),
    )


def note_of(problem: PlanningProblem, solution: Solution | None = None) -> str:
    if problem.demand.bound:
        return ""
    own = {column.name for column in problem.rollout if column.is_home}
    if own and (solution is None or own & solution.replicas.keys()):
        return "max_staleness = 0: generation and training take turns on the training nodes, so their times add up"
    return "max_staleness = 0: generation and training take turns on separate nodes, so one of them is always idle"
