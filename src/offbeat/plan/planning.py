"""From machines and a workload to a plan: the one function that puts the parts together.

`plan` asks the solver; `compose` turns its answer into a record by arithmetic alone, so that whoever checks a saved
plan can do the same again and compare.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Sequence

from offbeat.errors import UserError
from offbeat.plan import reasons
from offbeat.plan.certificate import Certificate
from offbeat.plan.columns import problem_of
from offbeat.plan.cost.constants import NAMES, Constants, Source
from offbeat.plan.cost.sizes import update_bytes
from offbeat.plan.explain import infeasible_because
from offbeat.plan.hardware import Inventory
from offbeat.plan.place.islands import Placed, lay_gang, pack
from offbeat.plan.place.nodes import Fabric, fabric_of
from offbeat.plan.place.partition import split
from offbeat.plan.place.sync_tree import sync_tree
from offbeat.plan.problem import Gang, Problem
from offbeat.plan.record import Plan, Pool, Staleness, Step, Sync, Training
from offbeat.plan.search import Result, cheapest, fastest
from offbeat.plan.solution import Solution
from offbeat.plan.view import MICRO
from offbeat.plan.workload import Workload

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
    result = fastest(problem, budget) if throughput is None else cheapest(problem, throughput, budget)
    if result.solution is None or result.certificate is None:
        raise UserError(f"no plan: {_why_none(problem, result, budget, throughput)}")
    return compose(
        inventory, workload, constants, problem, result.solution, result.certificate, budget, throughput, result.note
    )


def _why_none(problem: Problem, result: Result, budget: float | None, throughput: float | None) -> str:
    lines = infeasible_because(problem, budget, throughput)
    told = "; ".join(lines[:2]) or "unknown: the solver ran out of time before it found or ruled out a plan"
    return f"{told} ({result.note})" if result.note else told


def compose(
    inventory: Inventory,
    workload: Workload,
    constants: Constants,
    problem: Problem,
    solution: Solution,
    certificate: Certificate,
    budget: float | None,
    throughput: float | None,
    note: str,
) -> Plan:
    """The record of a solution: prices, places and expectations."""
    gang = next(gang for gang in problem.gangs if gang.name == solution.gang)
    fabric = fabric_of(inventory)
    trains, rolls = split(
        fabric, gang.nodes, solution.nodes, lambda trains, rolls: _sync(fabric, workload, gang, trains, rolls).seconds
    )
    places = _places(fabric, problem, solution, trains, rolls)
    generating = frozenset(placed.group.node for placed in places)
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
        training=_training(fabric, problem, gang, trains, tokens_per_s),
        rollout=_pools(problem, gang, solution, places),
        sync=_sync(fabric, workload, gang, trains, rolls | generating),
        staleness=_staleness(workload, problem, solution),
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


def _training(fabric: Fabric, problem: Problem, gang: Gang, trains: frozenset[str], tokens_per_s: float) -> Training:
    layout = lay_gang(fabric, gang, _in_order(trains))
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
        stages=layout.stages,
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


def _places(
    fabric: Fabric, problem: Problem, solution: Solution, trains: frozenset[str], rolls: frozenset[str]
) -> list[Placed]:
    """Replicas on the nodes rented for them, or on the gang's own."""
    places: list[Placed] = []
    for offer, (is_home, among) in itertools.product(problem.offers, ((False, rolls), (True, trains))):
        columns = {one.name: one for one in problem.rollout if one.offer == offer and one.is_home == is_home}
        sizes = {name: columns[name].num_accelerators for name in solution.replicas if name in columns}
        nodes = [fabric.nodes[name] for name in _in_order(among) if fabric.nodes[name].offer == offer]
        packed = pack(sizes, {name: solution.replicas[name] for name in sizes}, nodes)
        if packed is None:
            raise UserError(f"class {offer}: the replicas of the plan do not fit its {len(nodes)} nodes")
        places += packed
    return places


def _sync(fabric: Fabric, workload: Workload, gang: Gang, trains: frozenset[str], rolls: frozenset[str]) -> Sync:
    """From the first node of the publishing class to every rollout node."""
    root = next(name for name in _in_order(trains) if fabric.nodes[name].offer == gang.root)
    num_bytes = update_bytes(workload)
    tree = sync_tree(fabric, root, rolls, num_bytes)
    return Sync(root, num_bytes, tree.hops, tree.chunk_bytes, tree.seconds, tree.lower_bound_s)


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


def _in_order(names: frozenset[str]) -> list[str]:
    return sorted(names, key=lambda name: (name.rpartition("-")[0], int(name.rpartition("-")[2])))
