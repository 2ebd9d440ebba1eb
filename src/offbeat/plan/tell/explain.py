"""What holds a plan back, and what would have to give: in words and numbers, by solving again with one row relaxed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from offbeat.plan.problem import Problem
from offbeat.plan.solve.program import Status
from offbeat.plan.solve.search import Result, cheapest, fastest

MORE_BUDGET = 0.1
BARELY = 1e-3
"""A gain below this is not told as one: it lies within the searches' gap."""


@dataclass(frozen=True)
class Relaxation:
    """One row that gives way."""

    name: str
    """As one would say it: "one more node of h20"."""
    problem: Problem
    budget: float | None


@dataclass(frozen=True)
class Gain:
    name: str
    tokens_per_s: float
    """With this row relaxed."""
    gain: float
    """Over the plan as it is; 0.12 is 12 % more tokens a second."""
    price_per_h: float

    @property
    def line(self) -> str:
        if self.gain <= BARELY:
            return f"{self.name}: nothing"
        return f"{self.name}: {self.gain:+.1%}, {self.tokens_per_s:,.0f} tokens/s at {self.price_per_h:,.2f} $/h"


@dataclass(frozen=True)
class Saving:
    name: str
    price_per_h: float
    """With this row relaxed, at the same throughput."""
    saving: float
    """Of the plan's price; 0.12 is 12 % less."""

    @property
    def line(self) -> str:
        if self.saving <= BARELY:
            return f"{self.name}: nothing"
        return f"{self.name}: {-self.saving:.1%} of the price, {self.price_per_h:,.2f} $/h"


def relaxations(problem: Problem, budget: float | None) -> Iterator[Relaxation]:
    """Each row that a user can move, moved once."""
    demand = problem.demand
    if budget is not None:
        yield Relaxation(f"budget {MORE_BUDGET:+.0%}", problem, budget * (1 + MORE_BUDGET))
    for name, offer in problem.offers.items():
        offers = {**problem.offers, name: replace(offer, num_nodes=offer.num_nodes + 1)}
        yield Relaxation(f"one more node of {name}", replace(problem, offers=offers), budget)
    yield Relaxation(
        f"bound {demand.bound + 1}", replace(problem, demand=replace(demand, bound=demand.bound + 1)), budget
    )
    if demand.tail_tokens:
        yield Relaxation("no age window", replace(problem, demand=replace(demand, tail_tokens=0.0)), budget)
    if demand.bound:
        yield Relaxation("no in-flight cap", without_cap(problem), budget)
    if demand.reward_rate is not None:
        yield Relaxation("no limit on rewards", replace(problem, demand=replace(demand, reward_rate=None)), budget)


def without_cap(problem: Problem) -> Problem:
    """The same with room for all trajectories that the machines hold: what a queue lacks is added to the cap."""
    most = sum(
        offer.num_nodes * offer.per_node * max((c.concurrency for c in problem.rollout if c.offer == name), default=0)
        for name, offer in problem.offers.items()
    )
    return replace(problem, demand=replace(problem.demand, queue=-float(most)))


def explain(
    problem: Problem, result: Result, budget: float | None = None, relaxed: Iterable[Relaxation] | None = None
) -> list[Gain]:
    """What each relaxation would bring to the fastest plan, the most helpful first. A row binds where that is more than
    nothing."""
    gains = []
    for each in relaxations(problem, budget) if relaxed is None else relaxed:
        other = fastest(each.problem, each.budget)
        if other.solution is not None:
            gain = other.tokens_per_s / result.tokens_per_s - 1
            gains.append(Gain(each.name, other.tokens_per_s, gain, other.price_per_h))
    return sorted(gains, key=lambda gain: -gain.gain)


def savings(throughput: float, price_per_h: float, relaxed: Iterable[Relaxation]) -> list[Saving]:
    """What each relaxation would take off the price of the cheapest plan at a throughput, the most helpful first."""
    found = []
    for each in relaxed:
        other = cheapest(each.problem, throughput)
        if other.solution is not None:
            saving = 1 - other.price_per_h / price_per_h if price_per_h else 0.0
            found.append(Saving(each.name, other.price_per_h, saving))
    return sorted(found, key=lambda saving: -saving.saving)


def infeasible_because(problem: Problem, budget: float | None = None, throughput: float | None = None) -> list[str]:
    """Why there is no plan, and the least change that makes one: a line for each that would do."""
    if not problem.gangs:
        return ["hardware: no gang can train this model on these nodes; offer more nodes or more memory"]
    if not problem.rollout:
        return ["hardware: no node can hold a replica; offer cards with more memory"]
    best = fastest(problem, budget)
    if best.status is Status.UNKNOWN:
        return ["unknown: the solver ran out of time before it found or ruled out a plan"]
    if best.solution is not None and (throughput is None or best.tokens_per_s >= throughput * (1 - 1e-9)):
        return []
    lines = []
    if best.solution is not None:
        lines.append(f"throughput: {best.tokens_per_s:,.0f} tokens/s is the most; ask for that or less")
    if budget is not None:
        least = cheapest(problem, throughput) if throughput is not None else _least_price(problem)
        if least.solution is not None:
            lines.append(f"budget: {budget:,.2f} $/h is too little; {least.price_per_h:,.2f} $/h suffices")
    for each in _single_changes(problem):
        other = fastest(each.problem, budget)
        if other.solution is not None and (throughput is None or other.tokens_per_s >= throughput):
            lines.append(f"{each.name} would do: {other.tokens_per_s:,.0f} tokens/s at {other.price_per_h:,.2f} $/h")
    return lines or [
        "hardware: no single change of budget, bound, age window or in-flight cap suffices; offer more nodes"
    ]


def _least_price(problem: Problem) -> Result:
    """The cheapest plan at any period: slow enough that one replica suffices."""
    quick = fastest(problem)
    if quick.solution is None:
        return quick
    slowest = min(column.tokens_per_s for column in problem.rollout)
    longest = max(max(gang.period_s for gang in problem.gangs), quick.solution.tau_s)
    lost = max(max(column.blocking_s.values()) for column in problem.rollout)
    return cheapest(problem, problem.demand.tokens / (2 * (longest + lost + problem.demand.tokens / slowest)))


def _single_changes(problem: Problem) -> Iterator[Relaxation]:
    demand = problem.demand
    for bound in (demand.bound + 1, demand.bound + 2, demand.bound + 4):
        changed = Relaxation(f"staleness: bound {bound}", replace(problem, demand=replace(demand, bound=bound)), None)
        if fastest(changed.problem).solution is not None:
            yield changed
            break
    if demand.tail_tokens:
        if demand.bound and demand.age_guard > 0.5:
            yield Relaxation(
                "age window: a guard of 1/2 (the mean trajectory)",
                replace(problem, demand=replace(demand, age_guard=0.5)),
                None,
            )
        yield Relaxation("age window: none", replace(problem, demand=replace(demand, tail_tokens=0.0)), None)
    if demand.bound:
        yield Relaxation("in-flight cap: none", without_cap(problem), None)
