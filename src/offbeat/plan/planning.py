"""From machines and a workload to a plan: the one function that puts the parts together.

`plan` asks the solver, again where the places turn out slower than assumed; `compose` turns a placed answer into a
record by arithmetic alone, so that whoever checks a saved plan can do the same again and compare.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Sequence

from offbeat.errors import UserError
from offbeat.plan.columns.columns import problem_of
from offbeat.plan.correcting import Round, cheapest_round, fastest_round, rounds
from offbeat.plan.cost.constants import NAMES, Constants, Source
from offbeat.plan.cost.sizes import update_bytes
from offbeat.plan.inputs.hardware import Inventory
from offbeat.plan.inputs.workload import Workload
from offbeat.plan.place.islands import Placed
from offbeat.plan.place.placing import Placer, Placing
from offbeat.plan.place.realised import ROUNDING
from offbeat.plan.problem import Gang, Problem
from offbeat.plan.record import Placement, Plan, Pool, Staleness, Step, Sync, Training
from offbeat.plan.solution import Solution
from offbeat.plan.solve.certificate import Certificate, distance
from offbeat.plan.solve.search import Result, cheapest, fastest
from offbeat.plan.solve.view import MICRO
from offbeat.plan.tell import reasons
from offbeat.plan.tell.explain import infeasible_because

COST_MODEL = "roofline with KV reads, 2"
"""Its version goes up whenever a formula changes: a certificate speaks of one."""


def plan(
    inventory: Inventory,
    workload: Workload,
    *,
    constants: Constants | None = None,
    budget: float | None = None,
    throughput: float | None = None,
) -> Plan:
    """The fastest plan for a budget ($/h; without one, of all machines), or the cheapest at a throughput (tokens/s).

    Where there is none, a `UserError` says why and what would have to give.
    """
    for name, value in (("budget", budget), ("throughput", throughput)):
        if value is not None and not (0 < value < math.inf):
            raise UserError(f"{name} = {value:g}: allowed more than 0")
    constants = constants or Constants()
    problem = problem_of(inventory, workload, constants)

    def solve(problem: Problem) -> Result:
        return fastest(problem, budget) if throughput is None else cheapest(problem, throughput, budget)

    result = solve(problem)
    if result.solution is None or result.certificate is None:
        raise UserError(f"no plan: {_why_none(problem, result, budget, throughput)}")
    placer = Placer(inventory, workload, constants, problem)
    best = _best_placed(placer, result, solve, throughput)
    solution = dataclasses.replace(best.solution, tau_s=best.placing.tau_s)
    gap = distance(result.certificate, solution.tau_s, best.price_per_h, is_for_price=throughput is not None)
    # What the first solve proved holds for all: it went by the best links. Only the plan may be farther from it.
    certificate = dataclasses.replace(result.certificate, gap=max(result.certificate.gap, gap))
    return compose(inventory, workload, constants, best.placing, solution, certificate, budget, throughput, result.note)


def _best_placed(placer: Placer, first: Result, solve: Callable[[Problem], Result], throughput: float | None) -> Round:
    """Of all rounds. A throughput that was asked for allows no tolerance."""
    if throughput is None:
        return fastest_round(rounds(placer, first, solve))
    found = rounds(placer, first, solve, ROUNDING)
    kept = cheapest_round(found)
    if kept is None:
        most = placer.problem.demand.tokens / min(each.placing.tau_s for each in found)
        raise UserError(
            f"no plan: throughput: on the links between their nodes the plans found make {most:,.0f} tokens/s "
            f"at most; ask for that or less"
        )
    return kept


def _why_none(problem: Problem, result: Result, budget: float | None, throughput: float | None) -> str:
    lines = infeasible_because(problem, budget, throughput)
    told = "; ".join(lines[:2]) or "unknown: the solver ran out of time before it found or ruled out a plan"
    return f"{told} ({result.note})" if result.note else told


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
    """The record of a solution: prices, places and expectations, all of them as placed."""
    problem = placing.problem
    gang = next(gang for gang in problem.gangs if gang.name == solution.gang)
    solution = dataclasses.replace(solution, tau_s=placing.tau_s)
    rent = Counter(gang.nodes) + Counter(solution.nodes)
    price_per_h = problem.fixed_price_per_h + sum(problem.offers[name].node_price_per_h * rent[name] for name in rent)
    tokens_per_s = problem.demand.tokens / solution.tau_s
    least = None if certificate.price_cap is None else (certificate.price_cap + 1) / MICRO
    return Plan(
        model=workload.model.name,
        budget=budget,
        throughput=throughput,
        rent=dict(rent),
        limit=reasons.limit(problem, solution, price_per_h, budget, throughput),
        step=Step(
            tau_s=solution.tau_s,
            tau_lo_s=certificate.tau_lo_s if throughput is None else None,
            tokens_per_s=tokens_per_s,
            price_per_h=price_per_h,
            price_lo_per_h=None if throughput is None else least,
            price_per_million_tokens=reasons.price_per_million(price_per_h, tokens_per_s),
        ),
        training=_training(problem, gang, placing, tokens_per_s),
        rollout=_pools(problem, gang, solution, placing.places),
        sync=_sync(workload, placing),
        staleness=_staleness(workload, problem, solution),
        placement=_placement(placing, gang, solution, certificate.tau_lo_s if throughput is None else None),
        solution=solution,
        certificate=dataclasses.replace(
            certificate, cost_model=COST_MODEL, held_out_error=held_out_error(inventory, constants)
        ),
        assumptions=(*_assumptions(inventory, workload, constants), *_sharing(problem, gang, solution)),
        note=note,
    )


def held_out_error(inventory: Inventory, constants: Constants) -> float | None:
    """The largest mean error of any accelerator on offer; None where one of them was never measured."""
    errors = []
    for name in {machines.accelerator.name for machines in inventory.classes.values()}:
        known = [error.mean for key, error in constants.errors.items() if key.rpartition(".")[0] == name]
        if not known:
            return None
        errors += known
    return max(errors)


def _training(problem: Problem, gang: Gang, placing: Placing, tokens_per_s: float) -> Training:
    price = reasons.gang_price_per_h(problem, gang)
    return Training(
        nodes=dict(gang.nodes),
        root=gang.root,
        tp=gang.tp,
        pp=gang.pp,
        dp=gang.dp,
        layers=gang.layers,
        batch_shares=dict(gang.batch_shares),
        zero=gang.zero,
        step_s=gang.step_s,
        publish_s=gang.publish_s,
        stages=placing.layout.stages,
        price_per_million_tokens=reasons.price_per_million(price, tokens_per_s),
        why=reasons.why_trains(problem, gang),
    )


def _pools(problem: Problem, gang: Gang, solution: Solution, places: Sequence[Placed]) -> tuple[Pool, ...]:
    columns = {column.name: column for column in problem.rollout}
    all_tokens_per_s = sum(columns[name].tokens_per_s * count for name, count in solution.replicas.items())
    pools = []
    for name, count in solution.replicas.items():
        column = columns[name]
        blocking_s = column.blocking_s[gang.root]
        if not problem.demand.bound:  # generation waits for training and for the new version, too
            blocking_s += gang.period_s + problem.demand.lag_s + column.lag_from_s(gang.root)
        net = column.tokens_per_s * max(solution.tau_s - blocking_s, 0.0) / solution.tau_s
        price = 0.0 if column.is_home else reasons.replica_price_per_h(problem, column)
        pools.append(
            Pool(
                column=name,
                offer=column.offer,
                num_replicas=count,
                tp=column.tp,
                pp=column.pp,
                concurrency=column.concurrency,
                weight=column.tokens_per_s / all_tokens_per_s,
                kv=column.kv,
                tokens_per_s=column.tokens_per_s,
                token_s=column.token_s,
                blocking_s=blocking_s,
                places=tuple(placed.group for placed in places if placed.column == name),
                price_per_million_tokens=reasons.price_per_million(price, net),
                why=reasons.why_generates(problem, column.offer),
                shares_gang=column.is_home,
            )
        )
    return tuple(pools)


def _sync(workload: Workload, placing: Placing) -> Sync:
    """From a node of the publishing class to every rollout node."""
    tree = placing.tree
    return Sync(tree.root, update_bytes(workload), tree.hops, tree.chunk_bytes, tree.seconds, tree.lower_bound_s)


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


def _staleness(workload: Workload, problem: Problem, solution: Solution) -> Staleness:
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
    told = [
        f"answers: {answer.mean:,.0f} tokens on average, {answer.tail:,.0f} at the quantile that must fit the age "
        f"window, {answer.longest:,.0f} at most",
        f"waste: {workload.waste_share:.0%} of what is generated is not trained on",
    ]
    for name in sorted({machines.accelerator.name for machines in inventory.classes.values()}):
        sources = Counter(constants.source(name, constant) for constant in NAMES)
        if guessed := sources[Source.DEFAULT]:
            told.append(f"{name}: {guessed} of {len(NAMES)} constants of the cost model are defaults, never measured")
    return (*inventory.assumptions, *workload.assumptions, *told)


def _sharing(problem: Problem, gang: Gang, solution: Solution) -> list[str]:
    """What cards that train and generate by turns are taken to hold, and what their turns cost."""
    own = [column for column in problem.rollout if column.is_home and column.name in solution.replicas]
    told = []
    for offer in {column.offer: None for column in own}:
        wake_s = max(column.blocking_s[gang.root] for column in own if column.offer == offer)
        kept = f"{gang.kept_bytes[offer] / 1e9:.1f} GB of weights and optimizer stay on each while it generates"
        woken = f"engines hold nothing while it trains and load their weights again in {wake_s:.2g} s"
        told.append(f"{offer} cards that take turns: {kept}; {woken}")
    return told
