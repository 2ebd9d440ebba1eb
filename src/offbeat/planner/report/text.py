"""A plan as text: a sentence, a table, the gains from relaxed limits, and facts about its quality."""

from __future__ import annotations

import dataclasses
import io
import math
from collections.abc import Iterable, Iterator, Sequence
from functools import partial

from rich import box
from rich.console import Console
from rich.table import Table

from offbeat.errors import UserError
from offbeat.planner.columns.columns import problem_of
from offbeat.planner.columns.gangs import Known
from offbeat.planner.cost.constants import Constants
from offbeat.planner.inputs.hardware import Inventory
from offbeat.planner.inputs.what_if import changed
from offbeat.planner.inputs.workload import Workload
from offbeat.planner.place.islands import Group
from offbeat.planner.place.realised import slowed
from offbeat.planner.plan import Plan, Pool, Training
from offbeat.planner.problem import PlanningProblem
from offbeat.planner.report.explain import Relaxation, explain, relaxations, savings
from offbeat.planner.solve.program import Status
from offbeat.planner.solve.search import Result, fastest

WIDTH = 100
UNFITTED_ERROR = 1.5
"""Factor by which rates may be wrong if the constants of the cost model were never fitted."""
SMALLER_BUDGETS = (0.9, 0.7)
"""Budgets that are tried for a cheaper plan, relative to the plan's price."""
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
    nodes = [f"{num} {'node' if num == 1 else 'nodes'} of {name}" for name, num in plan.rent.items()]
    step = plan.step
    cost = f"for {step.price_per_h:,.2f} $/h" if step.price_per_h else "that cost nothing"
    each = f", {step.price_per_million_tokens:,.3g} $ per million tokens" if step.price_per_h else ""
    return (
        f"{'Rent' if step.price_per_h else 'Use'} {_and(nodes)} {cost}: {plan.model} generates and trains "
        f"{_rate(plan, step.tokens_per_s)} tokens/s{each}, a step every {step.tau_s:,.3g} s; {plan.limit}."
    )


def _rate(plan: Plan, tokens_per_s: float) -> str:
    """Tokens per second as text; rounded to two digits, with ≈, if the plan's constants were not measured."""
    if plan.certificate.held_out_error is not None:
        return f"{tokens_per_s:,.0f}"
    return f"≈{float(f'{tokens_per_s:.1e}'):,.0f}"


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
    table.add_row("trains", on, _gang_shape(train), _rate(plan, plan.step.tokens_per_s), price, train.why)
    for pool in plan.rollout:
        on = f"{pool.offer}, in turn" if pool.shares_gang else pool.offer
        shape = f"{pool.num_replicas} x tp{pool.tp}, {pool.concurrency} in flight each"
        price = _price(pool.price_per_million_tokens)
        table.add_row("generates", on, shape, _net(plan, pool), price, pool.why)
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
    word = f"; for {len(proof.by_solver)} of the gangs, this rests on the solver alone" if proof.by_solver else ""
    error = f"not fitted, so rates (≈) may be wrong by a factor of about {UNFITTED_ERROR:g}"
    if proof.held_out_error is not None:
        error = f"off by {proof.held_out_error:.1%} on held-out measurements"
    cap = f"{age.in_flight:,} of {age.in_flight_cap:,} trajectories in flight"
    when = "during" if age.bound else "before"
    facts = [
        f"Gap: {proof.gap:.2%} by {proof.solver}: {lowest}{word}.",
        f"Cost model: {proof.cost_model}; {error}.",
        f"Staleness: {age.mean_age:.2g} expected on average, {age.bound} at most; {cap}.",
        f"Weights: {plan.sync.num_bytes / 1e9:,.3g} GB reach every replica in {plan.sync.seconds:,.3g} s {when} "
        f"generation; no schedule takes less than {plan.sync.lower_bound_s:,.3g} s.",
    ]
    if placed := _placement(plan):
        facts.insert(1, placed)
    return [*facts, f"{plan.note}."] if plan.note else facts


def _placement(plan: Plan) -> str:
    """Sentence about the delays that the links of the chosen nodes cause; empty if there are none."""
    there, costs = plan.placement, []
    if plan.training.step_s > there.assumed_step_s:
        costs.append(f"training takes {plan.training.step_s:,.4g} s instead of {there.assumed_step_s:,.4g} s")
    for name, seconds in there.lags_s.items():
        if seconds > there.assumed_lags_s[name]:
            costs.append(f"{name} has a version after {seconds:,.3g} s instead of {there.assumed_lags_s[name]:,.3g} s")
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
    remarks = []
    if plan.throughput is None and plan.step.price_per_h:
        problem = _as_placed(problem_of(inventory, workload, constants), plan)
        if cheaper := _almost_as_fast(plan, problem):
            remarks.append(cheaper)
    for name, machines in inventory.classes.items():
        num_idle = machines.num_nodes - plan.rent.get(name, 0)
        if num_idle and not machines.price_per_h and plan.step.price_per_h:
            better = "cheaper" if plan.throughput is not None else "faster, or as fast for less money"
            nodes = f"{num_idle} {'node' if num_idle == 1 else 'nodes'} of {name}"
            remarks.append(f"Idle: {nodes}, although they cost nothing: no plan that uses more of them is {better}.")
    listed = [
        f"{name} {machines.price_per_h:g}"
        for name, machines in inventory.classes.items()
        if machines.has_catalogue_price
    ]
    if listed:
        what = f"from the catalogue, in $/h per card: {', '.join(listed)}"
        remarks.append(f"Prices: {what}; set price in [classes.NAME] to count your own price.")
    return remarks


def _almost_as_fast(plan: Plan, problem: PlanningProblem) -> str:
    """Returns a sentence about a much cheaper plan whose throughput differs by less than the error of the cost model;
    empty if none was found. Price and throughput of the cheaper plan are those before nodes are chosen."""
    step, error = plan.step, plan.certificate.held_out_error
    factor = UNFITTED_ERROR if error is None else 1 + error
    best = None
    for share in SMALLER_BUDGETS:
        other = fastest(problem, step.price_per_h * share)
        if other.solution is None:
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
    how much throughput or money relaxing this limit would gain; the largest gain comes first. With `nodes_alone`, the
    only limits are the numbers of nodes: one more node of each class is tried."""
    known: Known = {}
    problem = _as_placed(problem_of(inventory, workload, constants, known=known), plan)
    relaxed = [*_more_nodes(inventory, workload, plan, constants, known)]
    if not nodes_alone:
        for each in relaxations(problem, plan.budget):
            if each.problem.demand.bound and not workload.bound:  # columns for bound 0 are wrong for a higher bound
                bounded = dataclasses.replace(workload, bound=each.problem.demand.bound)
                each = dataclasses.replace(each, problem=problem_of(inventory, bounded, constants))
            if not each.name.startswith(NODE):
                relaxed.append(each)
    if plan.throughput is None:
        result = Result(Status.FEASIBLE, tokens_per_s=plan.step.tokens_per_s)
        found = explain(problem, result, plan.budget, relaxed, partial(_rate, plan))
    else:
        found = savings(plan.throughput, plan.step.price_per_h, relaxed)
    known_names = {each.name.removeprefix(NODE) for each in relaxed}
    unknown = [name for name in inventory.classes if name not in known_names]
    lines = [each.line for each in found]
    why = "unknown, because the rate between two of its nodes is not given; set links.between_nodes"
    return [*lines, *(f"{NODE}{name}: {why}" for name in unknown)]


def _more_nodes(
    inventory: Inventory, workload: Workload, plan: Plan, constants: Constants | None, known: Known
) -> Iterator[Relaxation]:
    for name in inventory.classes:
        try:
            grown = changed(inventory, add={name: 1})
        except UserError:  # a class of one node has no link to a second node
            continue
        problem = _as_placed(problem_of(grown, workload, constants, known=known), plan)
        yield Relaxation(f"{NODE}{name}", problem, plan.budget)


def _as_placed(problem: PlanningProblem, plan: Plan) -> PlanningProblem:
    """Returns a copy of the problem with the step time and version lags that the plan has on its chosen nodes, if these
    are longer than assumed. With the assumed times, relaxing any limit would seem to bring a gain."""
    for gang in problem.gangs:
        if gang.name == plan.solution.gang:
            return slowed(problem, gang, plan.training.step_s, plan.placement.lags_s)
    return problem
