"""Our planner as a contestant: all machines are given, so none of them costs anything."""

from __future__ import annotations

import time
from dataclasses import replace

from benchmarks.planner_contest.rivals.answer import Answer
from offbeat.planner.columns.columns import problem_of
from offbeat.planner.cost.constants import Constants
from offbeat.planner.inputs.hardware import Inventory
from offbeat.planner.inputs.workload import Workload
from offbeat.planner.place.placing import Placer
from offbeat.planner.planning import ANSWER_S, fastest_placed
from offbeat.planner.problem import PlanningProblem


def problem(inventory: Inventory, workload: Workload) -> PlanningProblem:
    """The columns that every contestant chooses from."""
    return problem_of(inventory, workload)


def answer(given: PlanningProblem, inventory: Inventory, workload: Workload) -> Answer | None:
    """Returns the plan that is fastest on the nodes on which it is placed."""
    offers = {name: replace(offer, node_price_per_h=0.0) for name, offer in given.offers.items()}
    placer = Placer(inventory, workload, Constants(), replace(given, offers=offers))
    found = fastest_placed(placer, None, time.process_time() + ANSWER_S)
    if found is None:
        return None
    return Answer(given.gang(found.solution), found.solution.replicas, found.certificate.gap)
