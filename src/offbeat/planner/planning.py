"""Finds the best plan for machines and a workload (`plan`).

If the chosen nodes turn out slower than assumed, the problem is solved again (`rounds`). `compose` builds the plan from
a solution and its nodes by arithmetic alone, so that `verifying` can build it again and compare.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from offbeat.errors import UserError
from offbeat.planner.columns.columns import problem_of
from offbeat.planner.cost.constants import NAMES, Constants, FigureSource
from offbeat.planner.cost.sizes import update_bytes
from offbeat.planner.cost.sync_time import CHUNK_BYTES
from offbeat.planner.inputs.hardware import Inventory
from offbeat.planner.inputs.workload import Workload
from offbeat.planner.place.islands import Placed
from offbeat.planner.place.placing import Placer, Placing
from offbeat.planner.place.realised import ROUNDING, slowed
from offbeat.planner.plan import Placement, Plan, PlanStep, Pool, Staleness, Sync, Training
from offbeat.planner.problem import Gang, PlanningProblem, RolloutColumn, Solution
from offbeat.planner.report import explain
from offbeat.planner.report.explain import infeasible_because
from offbeat.planner.solve.certificate import Certificate, distance
from offbeat.planner.solve.search import Result, cheapest, fastest
from offbeat.planner.solve.view import MICRO

MAX_ROUNDS = 3
"""Largest number of times that the problem is solved again because the chosen nodes are slower than assumed."""
TOLERANCE = 0.02
"""Relative accuracy of the cost model. In the search for the fastest plan, the problem is solved again only if the
chosen nodes lengthen the period by more than this share."""


@dataclass(frozen=True)
class Round:
    """Result of one round of solving and placing: a solution, its price and the nodes chosen for it."""

    solution: Solution
    price_per_h: float
    placing: Placing


Solve = Callable[[PlanningProblem], Result]


def rounds(placer: Placer, first: Result, solve: Solve, by: float = TOLERANCE) -> list[Round]:
    """Chooses nodes for the solution of `first`. As long as the chosen nodes are slower than assumed, solves the
    problem again with their times. Returns all solutions, each with its nodes.

    At first, columns (candidate gangs and replica shapes) assume the best links. If the chosen nodes lengthen the
    period by more than the share `by`, the next round assumes their step time and their lags (times until a class has a
    new version). If links were measured, the next round also changes every gang whose assumed period is shorter than
    the period on the chosen nodes: it gets its step time on the best nodes for it. Times only grow from round to round,
    so the lower bound of the first round always holds."""
    problem, result, found = placer.problem, first, list[Round]()
    while result.solution is not None:
        placing = placer.place(result.solution)
        found.append(Round(result.solution, result.price_per_h, placing))
        slower = slowed(problem, placing.assumed, placing.step_s, placing.lags_s, by)
        stands = placing.tau_s <= result.solution.tau_s * (1 + by)
        if stands or slower is problem or len(found) > MAX_ROUNDS:
            break
        problem = _rivals_slowed(placer, slower, placing.tau_s, by)
        result = solve(problem)
    return found


def _rivals_slowed(placer: Placer, problem: PlanningProblem, tau_s: float, by: float) -> PlanningProblem:
    """Returns the problem with longer steps for all gangs whose assumed period is below `tau_s`: each gets its step
    time on the best nodes for it. Otherwise each round would try a similar gang that needs the same slow links. Changes
    nothing if no links were measured."""
    if not placer.inventory.measured:
        return problem
    for gang in problem.gangs:
        if gang.period_s < tau_s:
            problem = slowed(problem, gang, placer.best_step_s(gang), {}, by)
    return problem


def fastest_round(found: list[Round]) -> Round:
    """Returns the round with the shortest period on its chosen nodes; if several are equally short, the cheapest."""
    return min(found, key=lambda each: (each.placing.tau_s, each.price_per_h))


COST_MODEL = "roofline with KV reads, version 2"
"""Name of the cost model in certificates; its number rises with every change of a formula."""


def plan(
    inventory: Inventory,
    workload: Workload,
    *,
    constants: Constants | None = None,
    budget: float | None = None,
    throughput: float | None = None,
) -> Plan:
    """Returns the fastest plan or, if `throughput` (tokens/s) is given, the cheapest plan with at least that
    throughput; in both cases within `budget` ($/h; None: any price). `constants` are those of the cost model (None: the
    defaults). If no plan exists, raises a `UserError` with the reason and a remedy."""
    if budget is not None and not (0 <= budget < math.inf):
        raise UserError(f"budget is {budget:g}; it must be a finite number, 0 or more (0: only machines that are free)")
    if throughput is not None and not (0 < throughput < math.inf):
        raise UserError(f"throughput is {throughput:g}; it must be a finite number above 0")
    constants = constants or Constants()
    problem = problem_of(inventory, workload, constants)

    def solve(problem: PlanningProblem) -> Result:
        return fastest(problem, budget) if throughput is None else cheapest(problem, throughput, budget)

    result = solve(problem)
    if result.solution is None or result.certificate is None:
        in_turn = dataclasses.replace(workload, bound=0)
        other = problem_of(inventory, in_turn, constants) if workload.bound and in_turn.may_share else None
        raise UserError(f"no plan: {_why_none(problem, result, budget, throughput, other)}")
    placer = Placer(inventory, workload, constants, problem)
    best = _best_placed(placer, result, solve, throughput)
    solution = dataclasses.replace(best.solution, tau_s=best.placing.tau_s)
    gap = distance(result.certificate, solution.tau_s, best.price_per_h, is_for_price=throughput is not None)
    # The first solve's bound holds for all rounds, because it assumed the best links. Only the gap may be larger.
    certificate = dataclasses.replace(result.certificate, gap=max(result.certificate.gap, gap))
    return compose(inventory, workload, constants, best.placing, solution, certificate, budget, throughput, result.note)


def _best_placed(placer: Placer, first: Result, solve: Solve, throughput: float | None) -> Round:
    """Returns the fastest of the `rounds` (solutions with their nodes). If the user asked for a throughput, returns the
    cheapest round whose nodes are as fast as its solution assumed; raises a `UserError` if there is none."""
    if throughput is None:
        return fastest_round(rounds(placer, first, solve))
    found = rounds(placer, first, solve, ROUNDING)
    kept = [each for each in found if each.placing.tau_s <= each.solution.tau_s * (1 + ROUNDING)]
    if not kept:
        most = placer.problem.demand.tokens / min(each.placing.tau_s for each in found)
        raise UserError(
            f"no plan reaches {throughput:,.0f} tokens/s: over the links between the chosen nodes, the plans found "
            f"reach {most:,.0f} at most; ask for that or less"
        )
    return min(kept, key=lambda each: each.price_per_h)


def _why_none(
    problem: PlanningProblem,
    result: Result,
    budget: float | None,
    throughput: float | None,
    in_turn: PlanningProblem | None,
) -> str:
    lines = infeasible_because(problem, budget, throughput, in_turn)
    why = "; ".join(lines[:2]) or (
        "unknown: the solver ran out of time before it found a plan or proved that there is none; try again with fewer "
        "classes of nodes"
    )
    return f"{why} ({result.note})" if result.note else why


def compose(
    inventory: Inventory,
    workload: Workload,
    constants: Constants,
    placing: Placing,
    solution: Solution,
    certificate: Certificate,
    budget: float | None,
    throughput: float | None,
    note: str,
) -> Plan:
    """Builds the plan of `solution` on the nodes chosen in `placing`, and computes prices, cards and expected
    staleness."""
    problem, tree = placing.problem, placing.tree
    gang = problem.gang(solution)
    solution = dataclasses.replace(solution, tau_s=placing.tau_s)
    rent = Counter(gang.nodes) + Counter(solution.nodes)
    price_per_h = problem.fixed_price_per_h + sum(problem.offers[name].node_price_per_h * rent[name] for name in rent)
    tokens_per_s = problem.demand.tokens / solution.tau_s
    error = held_out_error(inventory, constants)
    least = None if certificate.price_cap is None else (certificate.price_cap + 1) / MICRO
    return Plan(
        model=workload.model.name,
        budget=budget,
        throughput=throughput,
        rent=dict(rent),
        limit=explain.limit(problem, solution, price_per_h, budget, throughput),
        step=PlanStep(
            tau_s=solution.tau_s,
            tau_lo_s=certificate.tau_lo_s if throughput is None else None,
            tokens_per_s=tokens_per_s,
            price_per_h=price_per_h,
            price_lo_per_h=None if throughput is None else least,
            price_per_million_tokens=explain.price_per_million(price_per_h, tokens_per_s),
        ),
        training=_training(problem, gang, placing, tokens_per_s, by_price=throughput is not None),
        rollout=_pools(problem, gang, solution, placing.places),
        sync=Sync(tree.root, update_bytes(workload), tree.hops, CHUNK_BYTES, tree.seconds, tree.lower_bound_s),
        staleness=_staleness(workload, problem, solution),
        placement=_placement(placing, gang, solution, certificate.tau_lo_s if throughput is None else None),
        solution=solution,
        certificate=dataclasses.replace(certificate, cost_model=COST_MODEL, held_out_error=error),
        assumptions=(*_assumptions(inventory, workload, constants), *_sharing(problem, gang, solution)),
        note=note,
    )


def held_out_error(inventory: Inventory, constants: Constants) -> float | None:
    """Largest mean relative error of the cost model on held-out measurements, over the accelerators on offer; None if
    one of them was never measured."""
    errors = []
    for name in {machines.accelerator.name for machines in inventory.classes.values()}:
        known = [error.mean for key, error in constants.errors.items() if key.rpartition(".")[0] == name]
        if not known:
            return None
        errors += known
    return max(errors)


def _common(column: Gang | RolloutColumn, record: type[Training | Pool]) -> dict[str, Any]:
    """Returns the values of those attributes of `column` that are also fields of `record`, a dataclass of the plan."""
    return {each.name: getattr(column, each.name) for each in dataclasses.fields(record) if hasattr(column, each.name)}


def _training(
    problem: PlanningProblem, gang: Gang, placing: Placing, tokens_per_s: float, *, by_price: bool
) -> Training:
    price = explain.gang_price_per_h(problem, gang)
    return Training(
        **_common(gang, Training),
        stages=placing.stages,
        price_per_million_tokens=explain.price_per_million(price, tokens_per_s),
        why=explain.why_trains(problem, gang, by_price=by_price),
    )


def _pools(problem: PlanningProblem, gang: Gang, solution: Solution, places: Sequence[Placed]) -> tuple[Pool, ...]:
    columns = {column.name: column for column in problem.rollout}
    all_tokens_per_s = sum(columns[name].tokens_per_s * count for name, count in solution.replicas.items())
    pools = []
    for name, count in solution.replicas.items():
        column = columns[name]
        blocking_s = column.blocking_s[gang.root]
        if not problem.demand.bound:  # generation also waits for training and for the new version
            blocking_s += gang.period_s + problem.demand.lag_s + column.lag_from_s(gang.root)
        net = column.tokens_per_s * max(solution.tau_s - blocking_s, 0.0) / solution.tau_s
        price = 0.0 if column.is_home else explain.replica_price_per_h(problem, column)
        pools.append(
            Pool(
                **{**_common(column, Pool), "blocking_s": blocking_s},
                column=name,
                num_replicas=count,
                weight=column.tokens_per_s / all_tokens_per_s,
                places=tuple(placed.group for placed in places if placed.column == name),
                price_per_million_tokens=explain.price_per_million(price, net),
                why=explain.why_generates(problem, column.offer),
                shares_gang=column.is_home,
            )
        )
    return tuple(pools)


def _placement(placing: Placing, gang: Gang, solution: Solution, tau_lo_s: float | None) -> Placement:
    relays = {*gang.nodes, *placing.lags_s} if placing.problem.demand.bound else ()
    assumed = {column.offer: column.lag_from_s(gang.root, relays) for column in placing.columns}
    placed = {column.offer: column.lag_from_s(gang.root, relays) for column in placing.problem.rollout}
    return Placement(
        assumed_step_s=placing.assumed.step_s,
        assumed_lags_s={name: assumed[name] for name in placing.lags_s},
        lags_s={name: placed[name] for name in placing.lags_s},
        gap=None if tau_lo_s is None else (solution.tau_s - tau_lo_s) / tau_lo_s,
    )


def _staleness(workload: Workload, problem: PlanningProblem, solution: Solution) -> Staleness:
    demand, columns = problem.demand, {column.name: column for column in problem.rollout}
    in_flight = sum(columns[name].concurrency * count for name, count in solution.replicas.items())
    return Staleness(
        bound=demand.bound,
        age_guard=demand.age_guard,
        in_flight=in_flight,
        in_flight_cap=max(demand.bound, 1) * demand.trajectories,
        mean_age=(in_flight + demand.queue) / demand.trajectories if demand.bound else 0.0,
        tail_tokens=demand.tail_tokens,
        tail_share=workload.answer.tail_share,
    )


def _assumptions(inventory: Inventory, workload: Workload, constants: Constants) -> tuple[str, ...]:
    answer = workload.answer
    lines = [
        f"answers: {answer.mean:,.0f} tokens on average, {answer.longest:,.0f} at most; answers of up to "
        f"{answer.tail:,.0f} tokens must end in time to be trained on within the staleness bound",
        f"waste: {workload.waste_share:.0%} of what is generated is not trained on",
    ]
    for name in sorted({machines.accelerator.name for machines in inventory.classes.values()}):
        sources = Counter(constants.source(name, constant) for constant in NAMES)
        if guessed := sources[FigureSource.DEFAULT]:
            lines.append(f"{name}: {guessed} of {len(NAMES)} constants of the cost model are defaults, never measured")
    return (*inventory.assumptions, *workload.assumptions, *lines)


def _sharing(problem: PlanningProblem, gang: Gang, solution: Solution) -> list[str]:
    """Returns one line of text for each class whose cards take turns between training and generation. The line gives
    the training state that stays on the cards, and the time to load the engine's weights again."""
    own = [column for column in problem.rollout if column.is_home and column.name in solution.replicas]
    lines = []
    for offer in {column.offer: None for column in own}:
        wake_s = max(column.blocking_s[gang.root] for column in own if column.offer == offer)
        kept = f"{gang.kept_bytes[offer] / 1e9:.1f} GB of weights and optimizer stay on each while it generates"
        woken = f"engines hold nothing while it trains and load their weights again in {wake_s:.2g} s"
        lines.append(f"{offer} cards that take turns: {kept}; {woken}")
    return lines
