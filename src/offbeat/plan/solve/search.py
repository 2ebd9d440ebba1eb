"""From a problem to a plan with a proof: the fastest for a budget, the cheapest at a throughput, and what lies between.

The search itself goes gang by gang (see `gang_search`); here questions are put to it and answers made of it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from offbeat.plan.problem import Problem
from offbeat.plan.solution import Solution
from offbeat.plan.solve.certificate import Certificate, certify
from offbeat.plan.solve.gang_search import (
    HAIR,
    Search,
    cheapest_counts,
    far_s,
    fastest_counts,
    freshest_counts,
    roomy_counts,
    tidied,
)
from offbeat.plan.solve.program import Solver, Status, highs
from offbeat.plan.solve.view import MICRO, Counts, View, micros, restore, view_of

GAP = 1e-4
PRICE_GAP = 1e-3
"""Of a price: it comes in whole nodes, and a nearer proof takes several times as long."""
WITHIN_S = 5.0


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


def fastest(
    problem: Problem,
    budget: float | None = None,
    gap: float = GAP,
    within_s: float = WITHIN_S,
    solver: Solver = highs,
) -> Result:
    """The shortest period for at most `budget` ($/h); of its plans the cheapest, of those one with least in flight.

    Before that comes the demand's headroom, or as much of it as that period and price leave. `within_s` limits each
    integer program, not the whole.
    """
    search = Search(view_of(problem), gap, within_s, solver)
    cap = None if budget is None else micros(budget)
    status, counts, tau_s, low = fastest_counts(search, cap)
    tau_lo_s = float(low.min(initial=math.inf))
    if counts is None:
        return Result(status, tau_lo_s=tau_lo_s, note=_note(problem))
    # Proven is what lies below: at the bound itself, such as a gang's own period, there may be a plan.
    tau_lo_s = float(np.nextafter(min(tau_lo_s / (1 + 2 * HAIR), tau_s), 0.0))
    certificate = certify(search.view, search.pool, tau_lo_s, cap, gap=tau_s / tau_lo_s - 1)
    last = Search(search.view, max(gap, PRICE_GAP), within_s, solver)
    cheap, least = cheapest_counts(last, tau_s, cap, counts)
    assert cheap is not None, "the plan that was there is gone"
    if headroom := problem.demand.headroom:
        price = search.view.price(cheap)
        last, cheap = roomy_counts(last, tau_s, price, [cheap, counts], headroom) or (last, cheap)
    kept = tidied(search.view, tau_s, freshest_counts(last, tau_s, cheap))
    return _result(search.view, tau_s, kept, certificate, tau_lo_s, least)


def cheapest(
    problem: Problem,
    throughput: float,
    budget: float | None = None,
    gap: float = PRICE_GAP,
    within_s: float = WITHIN_S,
    solver: Solver = highs,
) -> Result:
    """The least price at which a step's tokens come at `throughput` tokens a second; of its plans one with least in
    flight."""
    return _at(view_of(problem), _period(problem, throughput), budget, gap, within_s, solver)


def frontier(
    problem: Problem, num: int = 20, gap: float = PRICE_GAP, within_s: float = WITHIN_S, solver: Solver = highs
) -> list[Result]:
    """The cheapest plans from the fastest period to the one where money can no longer be saved; each cheaper than the
    last."""
    quick = fastest(problem, None, gap, within_s, solver)
    if quick.solution is None:
        return []
    view = view_of(problem)
    far = _at(view, far_s(view), None, gap, within_s, solver)
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
    search = Search(view, gap, within_s, solver)
    counts, least = cheapest_counts(search, tau_s, None if budget is None else micros(budget), None)
    if counts is None:
        status = Status.INFEASIBLE if least == math.inf else Status.UNKNOWN
        return Result(status, tau_lo_s=tau_s if status is Status.INFEASIBLE else 0.0, note=_note(view.problem))
    counts = freshest_counts(search, tau_s, counts)
    certificate = certify(view, search.pool, tau_s, math.ceil(least) - 1, gap=view.price(counts) / max(least, 1.0) - 1)
    return _result(view, tau_s, counts, certificate, 0.0, least)


def _period(problem: Problem, throughput: float) -> float:
    """Throughput and period are each other's quotient; a plan that meets one to a hair meets the other."""
    return problem.demand.tokens / throughput * (1 + HAIR)


def _result(
    view: View, tau_s: float, counts: Counts, certificate: Certificate, tau_lo_s: float, least: float
) -> Result:
    demand, in_flight = view.problem.demand, view.in_flight(counts)
    price, solution = view.price(counts), restore(view, counts, tau_s)
    return Result(
        Status.FEASIBLE,
        solution,
        price / MICRO,
        demand.tokens / tau_s,
        in_flight,
        (in_flight + demand.queue) / demand.trajectories if demand.bound else 0.0,
        tau_lo_s,
        min(view.next_price(least), price) / MICRO,
        certificate,
        _note(view.problem, solution),
    )


def _note(problem: Problem, solution: Solution | None = None) -> str:
    if problem.demand.bound:
        return ""
    own = {column.name for column in problem.rollout if column.is_home}
    if own and (solution is None or own & solution.replicas.keys()):
        return "S = 0: generation and training take turns on the gang's nodes, so their times add up"
    return "S = 0 with disjoint pools: each waits while the other works, so their times add up and one of them is idle"
