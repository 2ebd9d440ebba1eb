"""Our planner as a contestant: all machines are given, so none of them costs anything."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.planner_contest.rivals.answer import Answer
from offbeat.planner.columns.columns import problem_of
from offbeat.planner.inputs.hardware import Inventory
from offbeat.planner.inputs.workload import Workload
from offbeat.planner.problem import PlanningProblem
from offbeat.planner.solve.search import fastest


def problem(inventory: Inventory, workload: Workload) -> PlanningProblem:
    """The columns that every contestant chooses from."""
    return problem_of(inventory, workload)


def answer(given: PlanningProblem) -> Answer | None:
    offers = {name: replace(offer, node_price_per_h=0.0) for name, offer in given.offers.items()}
    result = fastest(replace(given, offers=offers))
    if result.solution is None:
        return None
    gang = next(gang for gang in given.gangs if gang.name == result.solution.gang)
    return Answer(gang, result.solution.replicas, result.solution.tau_s / result.tau_lo_s - 1)
