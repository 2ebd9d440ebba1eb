"""Builds the planning problem from machines and a workload (`problem_of`), with times from the cost model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from offbeat.planner.columns.gangs import Known, gangs, is_complete
from offbeat.planner.columns.replicas import FINE_GROWTH, ROWS_GROWTH, home_columns, rollout_columns
from offbeat.planner.cost.constants import Constants
from offbeat.planner.cost.sync_time import least_s
from offbeat.planner.inputs.hardware import Inventory, at_best
from offbeat.planner.inputs.workload import Workload
from offbeat.planner.problem import Demand, Offer, PlanningProblem

WORTH_A_DETOUR = 0.01
"""A relay through a third class of nodes is considered only if it shortens a version's transfer by more than this
share."""


def problem_of(
    inventory: Inventory,
    workload: Workload,
    constants: Constants | None = None,
    known: Known | None = None,
) -> PlanningProblem:
    """Builds the planning problem: nodes on offer, columns (candidate gangs and replica shapes) and demand. Raises a
    `UserError` with the memory needed if the model fits nowhere.

    `constants` are those of the cost model (None: the defaults). `known` caches gangs between calls with the same
    workload and constants. Columns assume the best measured links. A lower bound on period or price that is proven for
    them therefore holds for every choice of nodes."""
    constants = constants or Constants()
    inventory = at_best(inventory)
    offers = {
        name: Offer(name, machines.num_nodes, machines.per_node, machines.node_price_per_h)
        for name, machines in inventory.classes.items()
    }
    training = gangs(inventory, workload, constants, known)
    roots = sorted({gang.root for gang in training})
    growth = FINE_GROWTH if is_complete(inventory) else ROWS_GROWTH
    columns = rollout_columns(inventory, workload, constants, roots, growth)
    if workload.may_share or any(gang.home_cards for gang in training):
        columns += home_columns(inventory, workload, constants, training, growth)
    lags: dict[tuple[str, bool], dict[str, Any]] = {}
    for name, is_home in sorted({(column.offer, column.is_home) for column in columns}):
        # At best, a single node of the class has to be reached, and a gang's own nodes need no transfer.
        lag_s = {root: least_s(workload, inventory, root, name) for root in roots}
        lag_s |= {name: 0.0} if is_home and name in lag_s else {}
        over_s = lag_over_s(inventory, workload, lag_s, name)
        if not workload.bound:  # whoever relays is part of every wait, so the best way counts at once
            lag_s = {root: min([seconds, *over_s.get(root, {}).values()]) for root, seconds in lag_s.items()}
            over_s = {}
        lags[name, is_home] = {"lag_s": lag_s, "lag_over_s": over_s}
    reward = workload.reward
    return PlanningProblem(
        offers=offers,
        rollout=tuple(replace(column, **lags[column.offer, column.is_home]) for column in columns),
        gangs=training,
        demand=demand_of(workload),
        fixed_price_per_h=reward.num_slots * reward.price_per_slot_h if reward else 0.0,
    )


def demand_of(workload: Workload) -> Demand:
    """Returns the requirements of one training step of this workload, such as tokens, staleness bound and rewards."""
    reward = workload.reward
    return Demand(
        trajectories=workload.trajectories_per_step,
        tokens=workload.generated_tokens_per_step,
        bound=workload.bound,
        tail_tokens=workload.answer.tail,
        lag_s=reward.seconds if reward else 0.0,
        reward_rate=reward.num_slots / reward.seconds if reward and reward.seconds > 0 else None,
        headroom=workload.headroom if workload.bound else 0.0,  # with bound 0 no answer may wait for a later step
    )


def lag_over_s(
    inventory: Inventory, workload: Workload, direct_s: Mapping[str, float], name: str
) -> dict[str, dict[str, float]]:
    """Returns the seconds from a version's publication until the class `name` has it, if a third class relays it. Keys
    are the publishing class, then the relaying class. Holds only times clearly shorter than the direct ones in
    `direct_s`, which is keyed by publishing class."""
    found: dict[str, dict[str, float]] = {}
    for root, seconds in direct_s.items():
        between = [over for over in inventory.classes if over not in (root, name) and inventory.classes[over].num_nodes]
        ways_s = {over: least_s(workload, inventory, root, name, over) for over in between if seconds}
        if sooner := {over: way_s for over, way_s in ways_s.items() if way_s < seconds * (1 - WORTH_A_DETOUR)}:
            found[root] = sooner
    return found
