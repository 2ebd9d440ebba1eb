"""What more machines, money or staleness would bring to a plan, in lines.

A further node is added to the inventory itself, so that larger gangs and other shapes come with it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from offbeat.errors import UserError
from offbeat.plan.columns.columns import problem_of
from offbeat.plan.columns.gangs import Known
from offbeat.plan.cost.constants import Constants
from offbeat.plan.inputs.hardware import Inventory
from offbeat.plan.inputs.what_if import changed
from offbeat.plan.inputs.workload import Workload
from offbeat.plan.place.realised import slowed
from offbeat.plan.problem import Problem
from offbeat.plan.record import Plan
from offbeat.plan.solve.program import Status
from offbeat.plan.solve.search import Result
from offbeat.plan.tell.explain import Gain, Relaxation, Saving, explain, relaxations, savings

NODE = "one more node of "


def what_would_help(
    inventory: Inventory,
    workload: Workload,
    plan: Plan,
    constants: Constants | None = None,
    *,
    nodes_alone: bool = False,
) -> list[str]:
    """A line for each limit that could give, the most helpful first; `nodes_alone` leaves all but machines out."""
    known: Known = {}
    problem = _as_placed(problem_of(inventory, workload, constants, known=known), plan)
    relaxed = [*_more_nodes(inventory, workload, plan, constants, known)]
    if not nodes_alone:
        for each in relaxations(problem, plan.budget):
            if each.problem.demand.bound and not workload.bound:  # columns of taking turns say nothing of not waiting
                each = dataclasses.replace(each, problem=problem_of(inventory, _with_bound(workload, each), constants))
            if not each.name.startswith(NODE):
                relaxed.append(each)
    found: list[Gain] | list[Saving]
    if plan.throughput is None:
        found = explain(problem, Result(Status.FEASIBLE, tokens_per_s=plan.step.tokens_per_s), plan.budget, relaxed)
    else:
        found = savings(plan.throughput, plan.step.price_per_h, relaxed)
    told = {each.name.removeprefix(NODE) for each in relaxed}
    unknown = [name for name in inventory.classes if name not in told]
    lines = [each.line for each in found]
    return [*lines, *(f"{NODE}{name}: unknown, the file has no link between two of its nodes" for name in unknown)]


def _with_bound(workload: Workload, relaxed: Relaxation) -> Workload:
    return dataclasses.replace(workload, bound=relaxed.problem.demand.bound)


def _more_nodes(
    inventory: Inventory, workload: Workload, plan: Plan, constants: Constants | None, known: Known
) -> Iterator[Relaxation]:
    for name in inventory.classes:
        try:
            grown = changed(inventory, add={name: 1})
        except UserError:  # a single node, and nothing says how it would reach a second
            continue
        problem = _as_placed(problem_of(grown, workload, constants, known=known), plan)
        yield Relaxation(f"{NODE}{name}", problem, plan.budget)


def _as_placed(problem: Problem, plan: Plan) -> Problem:
    """With what the plan's own places cost it: else that would be told as a gain."""
    for gang in problem.gangs:
        if gang.name == plan.solution.gang:
            return slowed(problem, gang, plan.training.step_s, plan.placement.lags_s)
    return problem
