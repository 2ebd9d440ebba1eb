"""Our planner on the published machines, with the constants that the published figures decided: all of it modelled.

The planner has its own rules: an update is relayed while generation goes on, at most `bound` batches are in flight, and
the tail of the answers ends within the age window. No step waits for its longest answer: answers run on over versions
as far as the bound lets them, so that a card always has as many rows as its column says. One thing is held back: gangs
of unlike machines, because the fitted MFU holds all communication of gangs of one type, so that a mixed one would get
its slow link for nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from benchmarks.hex_replay.published import H800_PRICE_PER_H, SPEEDUPS, value
from benchmarks.hex_replay.replay import Replay, Six, inventory, workload
from offbeat.planner.columns.columns import problem_of
from offbeat.planner.problem import PlanningProblem
from offbeat.planner.solve.search import Result, cheapest, fastest

Machines = tuple[int, int]
"""H800 and H20."""
MIXED: Machines = (8, 48)
ALIKE: Machines = (24, 0)


@dataclass(frozen=True)
class Ours:
    """What a plan promises."""

    tokens_per_s: float
    price_per_h: float
    gang: str
    replicas: Mapping[str, int]
    in_flight: int


def problem(model: str, six: Six, machines: Machines = MIXED, *, has_age_window: bool = True) -> PlanningProblem:
    """Of so many H800 and H20."""
    whole = problem_of(inventory(*machines), workload(model), six.constants(model))
    demand = whole.demand if has_age_window else replace(whole.demand, tail_tokens=0.0)
    return replace(whole, demand=demand, gangs=tuple(gang for gang in whole.gangs if len(gang.nodes) == 1))


def quickest(model: str, six: Six, machines: Machines = MIXED, *, has_age_window: bool = True) -> Ours:
    """On as many of the machines as it takes."""
    found = _ours(fastest(problem(model, six, machines, has_age_window=has_age_window)))
    assert found is not None, f"{model}: no plan on {machines[0]} H800 and {machines[1]} H20"
    return found


def least(model: str, six: Six, tokens_per_s: float) -> Ours | None:
    """The least money for so many tokens a second; None where the machines cannot make them."""
    return _ours(cheapest(problem(model, six), tokens_per_s))


@dataclass(frozen=True)
class Beside:
    """Our plan beside 24 H800, by the model."""

    plan: Ours
    cheapest: Ours | None
    """At the throughput of the modelled 24 H800."""
    over_modelled: float
    """Tokens a second over those of the modelled 24 H800."""
    over_hex: float
    """Over those of the modelled Hex, times the published ratio of Hex."""
    over_published: float
    """Over those of the published 24 H800: a model beside a measurement."""
    without_age_window: float
    """As `over_modelled`, by a plan that need not keep the bound for the answers of the tail."""
    hidden_update: float
    """The same of the modelled Hex if nothing waited for its update, but its steps still for their longest answer."""
    on_h800: float
    """The same of our plan on 24 H800: what is left of the gain without other machines."""
    saving: float
    """Price of 24 H800 over that of the cheapest; 0 where no plan reaches their throughput."""
    hex_saving: float
    """The same of Hex's way to use machines, by the model."""

    @property
    def speedup(self) -> float:
        """The model errs on the published ratio, in our favour for some: the smaller counts."""
        return min(self.over_modelled, self.over_hex)


def beside(model: str, six: Six) -> Beside:
    replay, plan = Replay(model, six), quickest(model, six)
    h800_rate = replay.tuned_rate("h800", 24)
    cheapest_plan = least(model, six, h800_rate)
    return Beside(
        plan=plan,
        cheapest=cheapest_plan,
        over_modelled=plan.tokens_per_s / h800_rate,
        over_hex=SPEEDUPS[model] * plan.tokens_per_s / replay.hex_rate(MIXED[1]),
        over_published=plan.tokens_per_s / value(model, "tokens/s, 24 H800 tuned"),
        without_age_window=quickest(model, six, has_age_window=False).tokens_per_s / h800_rate,
        hidden_update=replay.hidden_rate(MIXED[1]) / h800_rate,
        on_h800=quickest(model, six, ALIKE).tokens_per_s / h800_rate,
        saving=H800_PRICE_PER_H / cheapest_plan.price_per_h if cheapest_plan else 0.0,
        hex_saving=H800_PRICE_PER_H / replay.hex_price_per_h(h800_rate),
    )


def _ours(result: Result) -> Ours | None:
    if result.solution is None:
        return None
    solution = result.solution
    return Ours(result.tokens_per_s, result.price_per_h, solution.gang, dict(solution.replicas), result.in_flight)
