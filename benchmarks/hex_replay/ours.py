"""Our planner on the published machines, with the constants fitted to the published figures; all of it is modelled.

The planner keeps its own rules: an update is relayed during generation, at most `bound` batches are in flight, and long
answers end within the age window. No step waits for its longest answer: answers continue over versions within the
bound, so a card always has as many rows as its column says. Gangs of two types of machines are left out. The fitted MFU
includes all communication inside one type, so a mixed gang would get its slow link at no cost.
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
"""Numbers of H800 and H20."""
MIXED: Machines = (8, 48)
ALIKE: Machines = (24, 0)


@dataclass(frozen=True)
class Ours:
    """Figures of a plan."""

    tokens_per_s: float
    price_per_h: float
    gang: str
    replicas: Mapping[str, int]
    in_flight: int


def problem(model: str, six: Six, machines: Machines = MIXED, *, has_age_window: bool = True) -> PlanningProblem:
    """Returns the planning problem on these numbers of H800 and H20."""
    whole = problem_of(inventory(*machines), workload(model), six.constants(model))
    demand = whole.demand if has_age_window else replace(whole.demand, tail_tokens=0.0)
    return replace(whole, demand=demand, gangs=tuple(gang for gang in whole.gangs if len(gang.nodes) == 1))


def quickest(model: str, six: Six, machines: Machines = MIXED, *, has_age_window: bool = True) -> Ours:
    """Returns the fastest plan, on as many of the machines as it needs."""
    found = _ours(fastest(problem(model, six, machines, has_age_window=has_age_window)))
    assert found is not None, f"{model}: no plan on {machines[0]} H800 and {machines[1]} H20"
    return found


def least(model: str, six: Six, tokens_per_s: float) -> Ours | None:
    """Returns the cheapest plan with this throughput; None if the machines cannot reach it."""
    return _ours(cheapest(problem(model, six), tokens_per_s))


@dataclass(frozen=True)
class Beside:
    """Our plan compared with 24 H800, by the cost model."""

    plan: Ours
    cheapest: Ours | None
    """Cheapest plan with the throughput of the modelled 24 H800."""
    over_modelled: float
    """Our tokens per second over those of the modelled 24 H800."""
    over_hex: float
    """Our tokens per second over those of the modelled Hex, times Hex's published speed-up over 24 H800."""
    over_published: float
    """Our tokens per second over those published for 24 H800, so a model is compared with a measurement."""
    without_age_window: float
    """Same as `over_modelled`, for a plan without the age window for long answers."""
    hidden_update: float
    """Same as `over_modelled`, for the modelled Hex if nothing waited for its update. Steps still wait for their
    longest answer."""
    on_h800: float
    """Same as `over_modelled`, for our plan on 24 H800: the part of the gain that needs no other machines."""
    saving: float
    """Price of 24 H800 over that of the cheapest plan; 0 if no plan reaches their throughput."""
    hex_saving: float
    """Price of 24 H800 over that of machines that reach their throughput when used as Hex does, by the model."""

    @property
    def speedup(self) -> float:
        """The smaller of `over_modelled` and `over_hex`, because for some models the cost model errs in our favour."""
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
