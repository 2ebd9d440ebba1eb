"""`problem_of`: from machines and a workload to the planning problem, by the cost model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from offbeat.planner.columns.gangs import Known, gangs
from offbeat.planner.columns.replicas import home_columns, rollout_columns
from offbeat.planner.cost.constants import Constants
from offbeat.planner.cost.sync_time import relay_s
from offbeat.planner.inputs.hardware import Inventory, at_best
from offbeat.planner.inputs.workload import Workload
from offbeat.planner.problem import Demand, Offer, PlanningProblem

WORTH_A_DETOUR = 0.01
"""Share of a version's lag that a relaying class must save to be considered."""


def problem_of(
    inventory: Inventory,
    workload: Workload,
    constants: Constants | None = None,
    spare_replicas: int = 0,
    known: Known | None = None,
) -> PlanningProblem:
    """Offers, columns and demand. A model that fits nowhere raises a `UserError` with the memory it would need.

    `known` caches gangs between calls with the same workload and constants. If links between nodes were measured,
    columns assume the best of them, so a bound proven for the columns holds for every choice of nodes.
    """
    constants = constants or Constants()
    inventory = at_best(inventory)
    offers = {
        name: Offer(name, machines.num_nodes, machines.per_node, machines.node_price_per_h)
        for name, machines in inventory.classes.items()
    }
    training = gangs(inventory, workload, constants, known)
    roots = sorted({gang.root for gang in training})
    columns = rollout_columns(inventory, workload, constants, roots)
    if workload.may_share:
        columns += home_columns(inventory, workload, constants, training)
    receivers = sorted({column.offer for column in columns})
    lags_s = {name: sync_lag_s(inventory, workload, roots, name) for name in receivers}
    over_s = {name: lag_over_s(inventory, workload, lags_s[name], name) for name in receivers}
    rollout = tuple(
        replace(column, lag_s=lags_s[column.offer], lag_over_s=over_s[column.offer] if workload.bound else {})
        for column in columns
    )
    reward = workload.reward
    return PlanningProblem(
        offers=offers,
        rollout=rollout,
        gangs=training,
        demand=demand_of(workload),
        fixed_price_per_h=reward.num_slots * reward.price_per_slot_h if reward else 0.0,
        spare_replicas=spare_replicas,
    )


def demand_of(workload: Workload) -> Demand:
    """Requirements of a step."""
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


def sync_lag_s(inventory: Inventory, workload: Workload, roots: Sequence[str], name: str) -> dict[str, float]:
    """Time until the last node of the class `name` has a version, by root."""
    num_nodes = inventory.classes[name].num_nodes
    return {root: relay_s(workload, inventory, root, name, num_nodes) for root in roots}


def lag_over_s(
    inventory: Inventory, workload: Workload, direct_s: Mapping[str, float], name: str
) -> dict[str, dict[str, float]]:
    """The same by root and relaying class, if that is shorter than the direct way."""
    num_nodes = inventory.classes[name].num_nodes
    found: dict[str, dict[str, float]] = {}
    for root, seconds in direct_s.items():
        between = [over for over in inventory.classes if over not in (root, name) and inventory.classes[over].num_nodes]
        ways_s = {over: relay_s(workload, inventory, root, name, num_nodes, over) for over in between if seconds}
        if sooner := {over: way_s for over, way_s in ways_s.items() if way_s < seconds * (1 - WORTH_A_DETOUR)}:
            found[root] = sooner
    return found
