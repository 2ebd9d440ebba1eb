"""Whether counts are a plan, and how short its period may be: in exact arithmetic, whatever a solver said.

Figures are taken as the fractions that they are, so nothing here has a tolerance.
"""

from __future__ import annotations

from fractions import Fraction

import numpy as np

from offbeat.plan.solve.view import Counts, View


def holds(view: View, counts: Counts, tau_s: float, budget: int | None = None) -> bool:
    """Whether counts satisfy every row, in exact arithmetic."""
    demand, gang = view.problem.demand, view.gangs[counts.gang]
    tau = Fraction(tau_s)
    used = [j for j, count in enumerate(counts.replicas) if count]
    relays = {*gang.nodes, *(view.columns[j][0].offer for j in used)} if demand.bound else set[str]()
    lag = {j: Fraction(demand.lag_s) + Fraction(view.columns[j][0].lag_from_s(gang.root, relays)) for j in used}
    lost = {j: Fraction(view.columns[j][0].blocking_s[gang.root]) for j in used}
    if view.is_synchronous:
        lost = {j: seconds + Fraction(gang.period_s) + lag[j] for j, seconds in lost.items()}
    if demand.tail_tokens:
        tails = {j: Fraction(demand.tail_tokens) * Fraction(view.columns[j][0].token_s) for j in used}
        window = (demand.bound + 1 - Fraction(demand.age_guard)) * tau - Fraction(gang.period_s)
        room = {j: tau - lost[j] if view.is_synchronous else window - lag[j] for j in used}
        if any(tails[j] > room[j] for j in used):
            return False
    if not all(view.columns[j][0].fits_beside(gang) for j in used):
        return False
    return (
        Fraction(gang.period_s) <= tau
        and (demand.reward_rate is None or demand.trajectories <= Fraction(demand.reward_rate) * tau)
        and _tokens(view, counts, {j: tau - lost[j] for j in used}) >= Fraction(demand.tokens)
        and view.in_flight(counts) <= Fraction(view.in_flight_cap)
        and bool((view.nodes(counts) <= view.free_nodes[counts.gang]).all())
        and (budget is None or view.price(counts) <= budget)
    )


def shortest_s(view: View, counts: Counts, tau_s: float) -> float:
    """The shortest period at which a plan that holds at `tau_s` still holds: a closed form, rounded up to a float."""
    s, used = counts.gang, np.flatnonzero(counts.replicas)
    opening_s = view.opening_s(counts)
    opens_s = max(float(view.period[s]), *(float(opening_s[j]) for j in used))  # not before the program sees them
    if view.problem.spare_replicas:
        low_s = opens_s  # which replicas are the fastest may change with the period: bisect
        if holds(view, counts, low_s):
            return low_s
        for _ in range(40):
            middle_s = (low_s * tau_s) ** 0.5
            low_s, tau_s = (low_s, middle_s) if holds(view, counts, middle_s) else (middle_s, tau_s)
        return tau_s
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


def _tokens(view: View, counts: Counts, seconds: dict[int, Fraction]) -> Fraction:
    """Generated in a period by all replicas but the spare ones, which are taken to be the most productive."""
    yields = sorted(
        ((Fraction(view.rate[j]) * max(left, Fraction(0)), counts.replicas[j]) for j, left in seconds.items()),
        reverse=True,
    )
    spare, total = view.problem.spare_replicas, Fraction(0)
    for tokens, count in yields:
        total += tokens * max(0, count - spare)
        spare = max(0, spare - count)
    return total
