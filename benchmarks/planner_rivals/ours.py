"""Our planner as a contestant: all machines, no budget."""

from __future__ import annotations

from benchmarks.planner_rivals.answer import Answer
from offbeat.plan.columns import problem_of
from offbeat.plan.hardware import Inventory
from offbeat.plan.problem import Problem
from offbeat.plan.search import fastest
from offbeat.plan.workload import Workload


def problem(inventory: Inventory, workload: Workload) -> Problem:
    """The columns that every contestant chooses from."""
    return problem_of(inventory, workload)


def answer(given: Problem) -> Answer | None:
    result = fastest(given)
    if result.solution is None:
        return None
    gang = next(gang for gang in given.gangs if gang.name == result.solution.gang)
    return Answer(gang, result.solution.replicas, result.solution.tau_s / result.tau_lo_s - 1)
