"""A plan as text: a sentence, a table, the gains from relaxed limits, and facts about its quality."""

from __future__ import annotations

import dataclasses
import io
import math
import time
from collections.abc import Iterable, Sequence
from functools import partial

from rich import box
from rich.console import Console
from rich.table import Table

from offbeat.errors import UserError
from offbeat.planner.columns.columns import problem_of
from offbeat.planner.columns.gangs import Known
from offbeat.planner.cost.constants import Constants
from offbeat.planner.inputs.hardware import Inventory, with_alike_joined
from offbeat.planner.inputs.what_if import changed
from offbeat.planner.inputs.workload import Workload
from offbeat.planner.place.islands import Group
from offbeat.planner.place.placing import Placer
from offbeat.planner.plan import Plan, Pool, Training
from offbeat.planner.planning import Answer, cheapest_placed, fastest_placed
from offbeat.planner.report.explain import gains_of, relaxations, savings_of

WIDTH = 100
SHOWS = 5e-3
"""Relative difference between two times below which they are the same to a reader."""
UNFITTED_ERROR = 1.5
"""Factor by which rates may be wrong if the constants of the cost model were never fitted."""
SMALLER_BUDGETS = (0.9, 0.7)
"""Budgets that are tried for a cheaper plan, relative to the plan's price."""
WHAT_IF_S = 1.0
"""Seconds of processor time for each plan that is made for comparison."""
WORTH = 2.0
"""A cheaper plan is shown only if (share of the price saved) / (share of the throughput lost) is at least this."""


def format_plan(
    plan: Plan, gains: Sequence[str] = (), *, remarks: Sequence[str] = (), in_full: bool = False, width: int = WIDTH
) -> str:
    """Returns the text of a plan. `gains` are the lines of `what_would_help`, and `remarks` those of `remarks_on`;
    `in_full` adds assumptions and cards."""
    parts = [sentence(plan), _table(plan, width)]
    if remarks:
        parts.append("\n".join(remarks))
    if gains:
        parts.append("\n".join(["What each change would bring:", *(f"  {line}" for line in gains)]))
    parts.append("\n".join(_facts(plan)))
    if in_full:
        stages = [f"  training stage {i}: {_cards(stage)}" for i, stage in enumerate(plan.training.stages)]
        pools = [f"  {pool.column}: {_cards(pool.places)}" for pool in plan.rollout]
        parts.append("\n".join(["Places:", *stages, *pools]))
        parts.append("\n".join(["Assumed:", *(f"  {line}" for line in plan.assumptions)]))
    elif plan.assumptions:
        parts.append(f"{len(plan.assumptions)} assumptions went into this; --explain lists them.")
    return "\n\n".join(parts)


def sentence(plan: Plan) -> str:
    """One sentence: the nodes to rent, their throughput, and the limit of the plan."""
    step = plan.step
    rented, owned = (_nodes(plan, is_free) for is_free in (False, True))
    parts = [*([f"Rent {_and(rented)}"] if rented else []), *([f"use {_and(owned)}"] if owned else [])]
    cost = f"for {step.price_per_h:,.2f} $/h" if step.price_per_h else "that cost nothing"
    each = f", {step.price_per_million_tokens:,.3g} $ per million tokens" if step.price_per_h else ""
    return (
        f"{_and(parts)[:1].upper()}{_and(parts)[1:]} {cost}: {plan.model} generates and trains "
        f"{_rate(plan, step.tokens_per_s)} tokens/s ({_range(plan, step.tokens_per_s)}){each}, "
        f"a step every {step.tau_s:,.3g} s; {plan.limit}."
    )


def _nodes(plan: Plan, is_free: bool) -> list[str]:
    """Returns the nodes of a plan that cost nothing more, or the others, in words."""
    return [
        f"{num} {'node' if num == 1 else 'nodes'} of {name}"
        for name, num in plan.rent.items()
        if (name in plan.free) == is_free
    ]


def _rate(plan: Plan, tokens_per_s: float) -> str:
    """Tokens per second as text; rounded to two digits, with ≈, if the plan's constants were not measured."""
    if plan.certificate.held_out_error is not None:
        return f"{tokens_per_s:,.0f}"
    return f"≈{float(f'{tokens_per_s:.1e}'):,.0f}"


def _range(plan: Plan, tokens_per_s: float) -> str:
    """How far a rate of the whole plan may be off, in words."""
    error = plan.certificate.held_out_error
    if error is not None:
        return f"±{error:.0%}"
    low, high = (float(f"{rate:.1e}") for rate in (tokens_per_s / UNFITTED_ERROR, tokens_per_s * UNFITTED_ERROR))
    return f"{low:,.0f} to {high:,.0f}"


def _with_error(rate: str, error: float | None) -> str:
    """A rate of the table, with how far it may be off below it."""
    return f"{rate}\n" + (f"÷× {UNFITTED_ERROR:g}" if error is None else f"± {error:.0%}")


def _and(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def _table(plan: Plan, width: int) -> str:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("does", "on", "shape", "tokens/s", "$/M tokens", "why"):
        is_number = "tokens" in name
        table.add_column(name, overflow="ellipsis" if is_number else "fold", justify="right" if is_number else "left")
    train = plan.training
    on = ", ".join(f"{num} x {name}" for name, num in train.nodes.items())
    price = _price(train.price_per_million_tokens)
    trained = _with_error(_rate(plan, plan.step.tokens_per_s), train.rate_error)
    table.add_row("trains", on, _gang_shape(train), trained, price, train.why)
    for pool in plan.rollout:
        how = ", same node" if pool.beside else ", in turn" if pool.shares_gang else ""
        on = f"{pool.offer}{how}"
        shape = f"{pool.num_replicas} x tp{pool.tp}, {pool.concurrency} in flight each"
        price = _price(pool.price_per_million_tokens)
        table.add_row("generates", on, shape, _with_error(_net(plan, pool), pool.rate_error), price, pool.why)
    drawn = io.StringIO()
    Console(file=drawn, width=width, highlight=False, color_system=None, markup=False).print(table)
    return "\n".join(line.rstrip() for line in drawn.getvalue().splitlines() if line.strip())


def _price(price: float) -> str:
    return f"{price:.3g}" if price else "-"


def _net(plan: Plan, pool: Pool) -> str:
    """Tokens per second of all replicas of a pool, as text, after deducting the time lost to weight updates."""
    busy = max(plan.step.tau_s - pool.blocking_s, 0.0) / plan.step.tau_s
    return _rate(plan, pool.num_replicas * pool.tokens_per_s * busy)


def _gang_shape(train: Training) -> str:
    tps = sorted({group.size for stage in train.stages for group in stage})
    shape = f"tp{'/'.join(map(str, tps))} pp{train.pp} dp{train.dp} zero{train.zero}"
    layers = f", layers {'+'.join(map(str, train.layers))}" if len(train.nodes) > 1 and train.pp > 1 else ""
    shares = ", ".join(f"{name} {share:.0%}" for name, share in train.batch_shares.items())
    return shape + layers + (f", batch {shares}" if shares else "")


def _facts(plan: Plan) -> list[str]:
    step, proof, age = plan.step, plan.certificate, plan.staleness
    if plan.throughput is None:
        within = "" if plan.budget is None else " within the budget"
        lowest = f"no plan{within} has a step below {step.tau_lo_s:,.4g} s"
    else:
        lowest = f"no plan of this throughput costs less than {step.price_lo_per_h or 0.0:,.2f} $/h"
    open_gangs = {*proof.by_solver, *(name for part in proof.branches for name in part.by_solver)}
    word = f"; for {len(open_gangs)} of the gangs, this rests on the solver alone" if open_gangs else ""
    among = f"among {proof.num_shapes:,} shapes"
    if proof.is_complete:
        among = (
            f"over every shape that the cost model knows, in steps of 2 % of answers in flight ({proof.num_shapes:,})"
        )
    error = f"not fitted, so rates (≈) may be wrong by a factor of about {UNFITTED_ERROR:g} (÷×)"
    if proof.held_out_error is not None:
        error = f"off by {proof.held_out_error:.1%} on held-out measurements"
    cap = f"{age.in_flight:,} of {age.in_flight_cap:,} trajectories in flight"
    when = "during" if age.bound else "before"
    facts = [
        f"Gap: {proof.gap:.2%} by {proof.solver}, {among}: {lowest}{word}.",
        f"Cost model: {proof.question.cost_model if proof.question else 'unknown'}; {error}.",
        f"Staleness: {age.mean_age:.2g} expected on average, {age.bound} at most; {cap}.",
        f"Weights: {plan.sync.num_bytes / 1e9:,.3g} GB reach every replica in {plan.sync.seconds:,.3g} s {when} "
        f"generation; no schedule takes less than {plan.sync.lower_bound_s:,.3g} s.",
    ]
    if placed := _placement(plan):
        facts.insert(1, placed)
    return [*facts, f"{plan.note}."] if plan.note else facts


def _placement(plan: Plan) -> str:
    """Sentence about the delays that the links of the chosen nodes cause; empty if there are none that show."""
    there, costs = plan.placement, []
    if there.assumed_step_s * (1 + SHOWS) < plan.training.step_s:
        costs.append(f"training takes {plan.training.step_s:,.5g} s instead of {there.assumed_step_s:,.5g} s")
    for name, seconds in there.lags_s.items():
        if there.assumed_lags_s[name] * (1 + SHOWS) < seconds:
            costs.append(f"{name} has a version after {seconds:,.4g} s instead of {there.assumed_lags_s[name]:,.4g} s")
    return f"Placement: over the links of the chosen nodes, {_and(costs)}; step and gap include this." if costs else ""


def _cards(groups: Iterable[Group]) -> str:
    by_node: dict[str, list[str]] = {}
    for group in groups:
        last = group.first + group.size - 1
        by_node.setdefault(group.node, []).append(f"{group.first}-{last}" if group.size > 1 else f"{group.first}")
    return ", ".join(f"{node} cards {' '.join(cards)}" for node, cards in by_node.items())


def remarks_on(inventory: Inventory, workload: Workload, plan: Plan, constants: Constants | None = None) -> list[str]:
    """Returns a line for each thing about a plan that may surprise: a cheaper plan that is almost as fast, machines
    that cost nothing and stay idle, and prices that are not the user's own."""
    inventory = with_alike_joined(inventory)
    remarks = []
    if plan.throughput is None and plan.step.price_per_h and not plan.takes_turns:
        cheaper = _almost_as_fast(plan, _placer(inventory, workload, constants))
        remarks += [cheaper] if cheaper else []
    remarks += [line for name in inventory.classes if (line := _idle(inventory, plan, name))]
    listed = [
        f"{name} {machines.price_per_h:g}"
        for name, machines in inventory.classes.items()
        if machines.has_catalogue_price
    ]
    if listed:
        what = f"from the catalogue, in $/h per card: {', '.join(listed)}"
        remarks.append(f"Prices: {what}; set price in [classes.NAME] to count your own price.")
    return remarks


def _idle(inventory: Inventory, plan: Plan, name: str) -> str:
    """Returns a sentence about cards of a class that cost nothing and stay idle; empty if there are none."""
    machines = inventory.classes[name]
    if machines.price_per_h:
        return ""
    groups = [group for stage in plan.training.stages for group in stage]
    groups += [group for pool in plan.rollout if not pool.shares_gang or pool.beside for group in pool.places]
    used = sum(group.size for group in groups if group.node.rpartition("-")[0] == name)
    if not (idle := machines.num_accelerators - used):
        return ""
    what = f"Idle: {idle} of the {machines.num_accelerators} cards of {name}, although they cost nothing"
    if plan.throughput is not None:
        return f"{what}: no plan that uses more of them is cheaper."
    if plan.limit.startswith("training limits"):
        return f"{what}: training sets the pace, no gang that uses more of them is faster, and enough answers come."
    return f"{what}: no plan that uses more of them is faster by more than {plan.certificate.gap:.2%}."


def _placer(inventory: Inventory, workload: Workload, constants: Constants | None) -> Placer:
    constants = constants or Constants()
    return Placer(inventory, workload, constants, problem_of(inventory, workload, constants))


def _almost_as_fast(plan: Plan, placer: Placer) -> str:
    """Returns a sentence about a much cheaper plan whose throughput differs by less than the error of the cost model;
    empty if none was found."""
    step, error = plan.step, plan.certificate.held_out_error
    factor = UNFITTED_ERROR if error is None else 1 + error
    best = None
    for share in SMALLER_BUDGETS:
        other = fastest_placed(placer, step.price_per_h * share, time.process_time() + WHAT_IF_S)
        if other is None:
            continue
        saved, lost = 1 - other.price_per_h / step.price_per_h, 1 - other.tokens_per_s / step.tokens_per_s
        is_within_error = other.tokens_per_s * factor >= step.tokens_per_s
        if is_within_error and saved >= WORTH * lost and (best is None or saved - lost > best[0]):
            best = saved - lost, saved, lost, other
    if best is None:
        return ""
    _, saved, lost, other = best
    budget = math.ceil(other.price_per_h * 100) / 100
    return (
        f"Cheaper: {other.price_per_h:,.2f} $/h ({-saved:.0%}) gives {_rate(plan, other.tokens_per_s)} tokens/s "
        f"({-lost:.0%}), a difference within the error of the cost model; --budget {budget:.2f} plans that."
    )


NODE = "one more node of "


def what_would_help(
    inventory: Inventory,
    workload: Workload,
    plan: Plan,
    constants: Constants | None = None,
    *,
    nodes_alone: bool = False,
) -> list[str]:
    """Returns a line for each limit of the plan, such as the budget or the number of nodes of a class. The line says
    how much throughput or money relaxing this limit would gain, on the nodes that the other plan would use; the largest
    gain comes first. With `nodes_alone`, the only limits are the numbers of nodes: one more node of each class is
    tried."""
    inventory, constants, known = with_alike_joined(inventory), constants or Constants(), Known()
    if plan.takes_turns:
        workload = dataclasses.replace(workload, bound=0)
    tried: list[tuple[str, Placer, float | None]] = []
    unknown = []
    for name in inventory.classes:
        try:
            grown = changed(inventory, add={name: 1})
        except UserError:  # a class of one node has no link to a second node
            unknown.append(name)
            continue
        problem = problem_of(grown, workload, constants, known)
        tried.append((f"{NODE}{name}", Placer(grown, workload, constants, problem), plan.budget))
    if not nodes_alone:
        for each in relaxations(problem_of(inventory, workload, constants, known), plan.budget):
            asked, problem = workload, each.problem
            if problem.demand.bound != workload.bound:  # columns depend on whether and how long answers may wait
                asked = dataclasses.replace(workload, bound=problem.demand.bound)
                problem = problem_of(inventory, asked, constants)
            if not each.name.startswith(NODE):
                tried.append((each.name, Placer(inventory, asked, constants, problem), each.budget))
    found = []
    for name, placer, budget in tried:
        until_s = time.process_time() + WHAT_IF_S
        if plan.throughput is None:
            answer = fastest_placed(placer, budget, until_s)
        else:
            answer = _cheapest_or_none(placer, plan.throughput, until_s)
        if answer is not None:
            found.append((name, answer.tokens_per_s, answer.price_per_h))
    if plan.throughput is None:
        gains = gains_of(plan.step.tokens_per_s, found, partial(_rate, plan))
    else:
        gains = savings_of(plan.step.price_per_h, found)
    why = "unknown, because the rate between two of its nodes is not given; set links.between_nodes"
    return [*(each.line for each in gains), *(f"{NODE}{name}: {why}" for name in unknown)]


def _cheapest_or_none(placer: Placer, throughput: float, until_s: float) -> Answer | None:
    try:
        return cheapest_placed(placer, throughput, None, until_s)
    except UserError:  # no plan keeps the throughput on its nodes
        return None
