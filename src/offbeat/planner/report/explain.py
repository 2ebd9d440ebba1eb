"""Limits of a plan, and the gain from relaxing each limit, found by solving again with one constraint relaxed."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from offbeat.planner.problem import Gang, PlanningProblem, RolloutColumn, Solution
from offbeat.planner.solve.program import Status
from offbeat.planner.solve.search import Result, at_period, cheapest, far_s, fastest
from offbeat.planner.solve.view import view_of

MORE_BUDGET = 0.1
BARELY = 1e-3
"""Largest relative gain that is reported as "nothing"; such gains are within the search's tolerance."""


@dataclass(frozen=True)
class Relaxation:
    """A problem with one constraint relaxed."""

    name: str
    """Name of the change in words, such as "one more node of h20"."""
    problem: PlanningProblem
    budget: float | None


@dataclass(frozen=True)
class Gain:
    name: str
    gain: float
    """Gain in tokens per second relative to the plan, or saving relative to its price; 0.12 is 12 %."""
    text: str

    @property
    def line(self) -> str:
        return f"{self.name}: {self.text if self.gain > BARELY else 'nothing'}"


def relaxations(problem: PlanningProblem, budget: float | None) -> Iterator[Relaxation]:
    """Yields one relaxation for each constraint that a user can relax."""
    demand = problem.demand
    if budget:
        yield Relaxation(f"budget {MORE_BUDGET:+.0%}", problem, budget * (1 + MORE_BUDGET))
    for name, offer in problem.offers.items():
        offers = {**problem.offers, name: replace(offer, num_nodes=offer.num_nodes + 1)}
        yield Relaxation(f"one more node of {name}", replace(problem, offers=offers), budget)
    yield Relaxation(f"max_staleness = {demand.bound + 1}", _demanding(problem, bound=demand.bound + 1), budget)
    if demand.tail_tokens:
        yield Relaxation("no deadline for long answers", _demanding(problem, tail_tokens=0.0), budget)
    if demand.bound:
        yield Relaxation("no limit on trajectories in flight", without_cap(problem), budget)
    if demand.reward_rate is not None:
        yield Relaxation("no limit on rewards", _demanding(problem, reward_rate=None), budget)


def _demanding(problem: PlanningProblem, **demand: Any) -> PlanningProblem:
    return replace(problem, demand=replace(problem.demand, **demand))


def without_cap(problem: PlanningProblem) -> PlanningProblem:
    """Returns the problem without its cap on trajectories in flight. `Demand.queue` lowers the cap, so a negative value
    raises it, here to at least all trajectories that the machines can hold."""
    most = sum(
        offer.num_nodes * offer.per_node * max((c.concurrency for c in problem.rollout if c.offer == name), default=0)
        for name, offer in problem.offers.items()
    )
    return _demanding(problem, queue=-float(most))


def gains_of(
    tokens_per_s: float,
    relaxed: Iterable[tuple[str, float, float]],
    rate: Callable[[float], str] = "{:,.0f}".format,
) -> list[Gain]:
    """Returns the gain over `tokens_per_s` of each relaxation, the largest first. `relaxed` holds the name, the
    tokens/s and the price of each relaxation's plan; `rate` formats tokens per second."""
    gains = []
    for name, rate_there, price_per_h in relaxed:
        gain = rate_there / tokens_per_s - 1
        gains.append(Gain(name, gain, f"{gain:+.1%}, {rate(rate_there)} tokens/s at {price_per_h:,.2f} $/h"))
    return sorted(gains, key=lambda gain: -gain.gain)


def savings_of(price_per_h: float, relaxed: Iterable[tuple[str, float, float]]) -> list[Gain]:
    """Returns the share of the price `price_per_h` that each relaxation saves at the same throughput, largest first.
    `relaxed` is that of `gains_of`."""
    found = []
    for name, _, price_there in relaxed:
        saving = 1 - price_there / price_per_h if price_per_h else 0.0
        found.append(Gain(name, saving, f"{-saving:.1%} of the price, {price_there:,.2f} $/h"))
    return sorted(found, key=lambda gain: -gain.gain)


def infeasible_because(
    problem: PlanningProblem,
    budget: float | None = None,
    throughput: float | None = None,
    until_s: float = math.inf,
) -> list[str]:
    """Explains why there is no plan: returns a line for each single change that would allow a plan, or one line if no
    single change does; empty if there is a plan. After `until_s` of processor time, no further change is tried."""
    if not problem.gangs:
        return ["hardware: these nodes cannot train this model; offer more nodes, or cards with more memory"]
    if not problem.rollout:
        return ["hardware: no node has enough memory to generate with this model; offer cards with more memory"]
    best = fastest(problem, budget, until_s=until_s)
    if best.status is Status.UNKNOWN:
        why = "the solver ran out of time before it found a plan or proved that there is none"
        return [f"unknown: {why}; try again with fewer classes of nodes"]
    if best.solution is not None and (throughput is None or best.tokens_per_s >= throughput * (1 - 1e-9)):
        return []
    lines = []
    if best.solution is not None:
        lines.append(f"throughput: {best.tokens_per_s:,.0f} tokens/s is the most; ask for that or less")
    if budget is not None:
        least = cheapest(problem, throughput) if throughput is not None else least_price(problem, until_s)
        if least.solution is not None:
            lines.append(f"budget: {budget:,.2f} $/h is too little; {least.price_per_h:,.2f} $/h suffices")
            return lines
    for each in _single_changes(problem, until_s):
        other = fastest(each.problem, budget, until_s=until_s)
        if other.solution is not None and (throughput is None or other.tokens_per_s >= throughput):
            result = f"{other.tokens_per_s:,.0f} tokens/s at {other.price_per_h:,.2f} $/h"
            lines.append(f"{each.name} would allow a plan: {result}")
    why = "no single change of budget, staleness bound or other limits allows a plan; offer more nodes"
    return lines or [f"hardware: {why}"]


def least_price(problem: PlanningProblem, until_s: float = math.inf) -> Result:
    """Finds the cheapest plan of any speed, at a period (seconds per step) so long that one replica suffices."""
    view = view_of(problem)
    return at_period(view, far_s(view), None, until_s=until_s)


def _single_changes(problem: PlanningProblem, until_s: float) -> Iterator[Relaxation]:
    demand = problem.demand
    for bound in (demand.bound + 1, demand.bound + 2, demand.bound + 4):
        if time.process_time() > until_s:
            return
        changed = Relaxation(f"staleness: max_staleness = {bound}", _demanding(problem, bound=bound), None)
        if fastest(changed.problem, until_s=until_s).solution is not None:
            yield changed
            break
    if demand.tail_tokens:
        yield Relaxation("age window: no deadline for long answers", _demanding(problem, tail_tokens=0.0), None)
    if demand.bound:
        yield Relaxation("in flight: no limit on trajectories in flight", without_cap(problem), None)


TIGHT = 0.995
"""A constraint counts as binding if at least this share of its limit is used."""
CROWDED = 0.9
"""The cap on trajectories in flight counts as binding if at least this share of it is used. It is lower than `TIGHT`,
because numbers of replicas are whole and rarely fill the cap."""


def price_per_million(price_per_h: float, tokens_per_s: float) -> float:
    return price_per_h / 3600 / tokens_per_s * 1e6


def replica_price_per_h(problem: PlanningProblem, column: RolloutColumn) -> float:
    offer = problem.offers[column.offer]
    return offer.node_price_per_h / offer.per_node * column.num_accelerators


def gang_price_per_h(problem: PlanningProblem, gang: Gang) -> float:
    return sum(problem.offers[name].node_price_per_h * num for name, num in gang.nodes.items())


def why_generates(problem: PlanningProblem, offer: str) -> str:
    """Explains why the class `offer` generates: gives its lowest price of a million generated tokens, then the lowest
    prices on up to three other classes. If no machine costs anything, gives tokens per second of a card instead of
    prices."""
    prices: dict[str, float] = {}
    rates: dict[str, float] = {}
    for column in problem.rollout:
        price = price_per_million(replica_price_per_h(problem, column), column.tokens_per_s)
        prices[column.offer] = min(prices.get(column.offer, price), price)
        rate = column.tokens_per_s / column.num_accelerators
        rates[column.offer] = max(rates.get(column.offer, rate), rate)
    if any(prices.values()):
        return _beside("$/M at best", {name: f"{price:.3g}" for name, price in prices.items()}, offer)
    return _beside("tokens/s a card", {name: f"{rate:,.0f}" for name, rate in rates.items()}, offer)


def why_trains(problem: PlanningProblem, gang: Gang, *, by_price: bool) -> str:
    """Explains why `gang` trains: gives its seconds a step, then the seconds a step of the fastest gang on one class
    alone, for up to three classes. With `by_price`, for a plan that is to be cheap, gives prices of a million trained
    tokens instead of seconds."""
    figures: dict[str, float] = {}
    for other in problem.gangs:
        if len(other.nodes) == 1:
            (name,) = other.nodes
            each = _figure(problem, other, by_price=by_price)
            figures[f"{name} alone"] = min(figures.get(f"{name} alone", each), each)
    own = f"{next(iter(gang.nodes))} alone" if len(gang.nodes) == 1 else " + ".join(gang.nodes)
    figures[own] = _figure(problem, gang, by_price=by_price)
    unit = "$/M trained" if by_price else "s a step"
    return _beside(unit, {name: f"{each:.3g}" for name, each in figures.items()}, own)


def _figure(problem: PlanningProblem, gang: Gang, *, by_price: bool) -> float:
    """Returns the price of a million tokens that `gang` trains, or its seconds a step."""
    if not by_price:
        return gang.period_s
    return price_per_million(gang_price_per_h(problem, gang), problem.demand.tokens / gang.period_s)


def _beside(unit: str, figures: Mapping[str, str], own: str) -> str:
    others = [f"{name} {figure}" for name, figure in figures.items() if name != own]
    return f"{figures[own]} {unit}" + (f"; {', '.join(others[:3])}" if others else "")


def limit(
    problem: PlanningProblem, solution: Solution, price_per_h: float, budget: float | None, throughput: float | None
) -> str:
    """Names the constraint that limits a plan, as a clause such as "the reward pool limits it". The result may depend
    on `budget` ($/h) and `throughput` (tokens/s) that the user asked for."""
    demand = problem.demand
    gang = problem.gang(solution)
    columns = {column.name: column for column in problem.rollout}
    if throughput is not None:
        return "the throughput that was asked for sets its price"
    left = "" if budget is None else " within the budget"
    if demand.reward_rate is not None and demand.trajectories >= TIGHT * demand.reward_rate * solution.tau_s:
        return "the reward pool limits it"
    if demand.bound and gang.period_s >= TIGHT * solution.tau_s:
        return f"training limits it: no other machines{left} train a step sooner"
    if not demand.bound:
        return "generation and training take turns, which limits it"
    in_flight = sum(columns[name].concurrency * count for name, count in solution.replicas.items())
    if in_flight >= CROWDED * (demand.bound * demand.trajectories - demand.queue):
        return "the staleness bound limits it, because it allows no more trajectories in flight"
    window_s = (demand.bound + 1 - demand.age_guard) * solution.tau_s - gang.period_s - demand.lag_s
    if any(demand.tail_tokens * column.token_s > window_s for column in problem.rollout):
        return "the staleness bound limits it: with more answers in flight, long ones would end too late for training"
    free = [
        offer.node_price_per_h
        for name, offer in problem.offers.items()
        if offer.num_nodes > gang.nodes.get(name, 0) + solution.nodes.get(name, 0)
    ]
    if not free:
        return "generation limits it, and every node is in use"
    if budget is not None and price_per_h + min(free) > budget:
        return "generation limits it, and the budget buys no further node"
    return "generation limits it, and further nodes would not help it"
