"""Why a class does what it does, and what keeps a plan from being better: by comparison of prices and of rows."""

from __future__ import annotations

from collections.abc import Mapping

from offbeat.plan.problem import Gang, Problem, RolloutColumn
from offbeat.plan.solution import Solution

TIGHT = 0.995
"""A row that is used to this share leaves no room worth naming."""
CROWDED = 0.9
"""Replicas come whole, so a cap on what they have in flight is reached before it is full."""


def price_per_million(price_per_h: float, tokens_per_s: float) -> float:
    return price_per_h / 3600 / tokens_per_s * 1e6


def replica_price_per_h(problem: Problem, column: RolloutColumn) -> float:
    offer = problem.offers[column.offer]
    return offer.node_price_per_h / offer.per_node * column.num_accelerators


def gang_price_per_h(problem: Problem, gang: Gang) -> float:
    return sum(problem.offers[name].node_price_per_h * num for name, num in gang.nodes.items())


def why_generates(problem: Problem, offer: str) -> str:
    """The class's best price of a token, beside those of the others; its rate where nothing costs anything."""
    prices: dict[str, float] = {}
    rates: dict[str, float] = {}
    for column in problem.rollout:
        price = price_per_million(replica_price_per_h(problem, column), column.tokens_per_s)
        prices[column.offer] = min(prices.get(column.offer, price), price)
        rate = column.tokens_per_s / column.num_accelerators
        rates[column.offer] = max(rates.get(column.offer, rate), rate)
    if any(prices.values()):
        return _beside("$/M generated", {name: f"{price:.3g}" for name, price in prices.items()}, offer)
    return _beside("tokens/s a card", {name: f"{rate:,.0f}" for name, rate in rates.items()}, offer)


def why_trains(problem: Problem, gang: Gang) -> str:
    """What a trained token costs on this gang, beside the cheapest gang of each single class; seconds where all is
    free."""
    cost: dict[str, float] = {}
    seconds: dict[str, float] = {}
    for other in problem.gangs:
        if len(other.nodes) == 1:
            (name,) = other.nodes
            each = price_per_million(gang_price_per_h(problem, other), problem.demand.tokens / other.period_s)
            cost[name] = min(cost.get(name, each), each)
            seconds[name] = min(seconds.get(name, other.period_s), other.period_s)
    own = " + ".join(gang.nodes)
    cost[own] = price_per_million(gang_price_per_h(problem, gang), problem.demand.tokens / gang.period_s)
    seconds[own] = gang.period_s
    if any(cost.values()):
        return _beside("$/M trained", {name: f"{each:.3g}" for name, each in cost.items()}, own)
    return _beside("s a step", {name: f"{each:.3g}" for name, each in seconds.items()}, own)


def _beside(unit: str, figures: Mapping[str, str], own: str) -> str:
    others = [f"{name} {figure}" for name, figure in figures.items() if name != own]
    return f"{figures[own]} {unit}" + (f"; {', '.join(others[:3])}" if others else "")


def limit(
    problem: Problem, solution: Solution, price_per_h: float, budget: float | None, throughput: float | None
) -> str:
    """What keeps the plan from being better, in a few words that end a sentence."""
    demand = problem.demand
    gang = next(gang for gang in problem.gangs if gang.name == solution.gang)
    columns = {column.name: column for column in problem.rollout}
    if throughput is not None:
        return "the throughput that was asked for sets its price"
    left = "" if budget is None else " within the budget"
    if demand.reward_rate is not None and demand.trajectories >= TIGHT * demand.reward_rate * solution.tau_s:
        return "the reward pool limits it"
    if demand.bound and gang.period_s >= TIGHT * solution.tau_s:
        return f"training limits it: no gang{left} has a shorter step"
    if not demand.bound:
        return "generation and training take turns, which limits it"
    in_flight = sum(columns[name].concurrency * count for name, count in solution.replicas.items())
    if in_flight >= CROWDED * (demand.bound * demand.trajectories - demand.queue):
        return "the in-flight cap of the staleness bound limits it"
    window_s = (demand.bound + 1 - demand.age_guard) * solution.tau_s - gang.period_s - demand.lag_s
    if any(demand.tail_tokens * column.token_s > window_s for column in problem.rollout):
        return "the age window limits it: shapes with more in flight would finish long answers too late"
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
