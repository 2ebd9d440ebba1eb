"""From machines and a workload to the planning problem in numbers, by the cost model."""

from __future__ import annotations

from offbeat.plan.cost.constants import Constants
from offbeat.plan.cost.sync import relay_s
from offbeat.plan.gangs import gangs
from offbeat.plan.hardware import Inventory
from offbeat.plan.problem import Demand, Offer, Problem, RolloutColumn
from offbeat.plan.rollout import rollout_columns
from offbeat.plan.workload import Workload


def problem_of(
    inventory: Inventory, workload: Workload, constants: Constants | None = None, spare_replicas: int = 0
) -> Problem:
    """Offers, columns and demand. A model that fits nowhere is a `UserError` that says what memory would do."""
    constants = constants or Constants()
    offers = {
        name: Offer(name, machines.num_nodes, machines.per_node, machines.node_price_per_h)
        for name, machines in inventory.classes.items()
    }
    training = gangs(inventory, workload, constants)
    roots = sorted({gang.root for gang in training})
    rollout = rollout_columns(inventory, workload, constants, roots)
    reward = workload.reward
    return Problem(
        offers=offers,
        rollout=rollout,
        gangs=training,
        demand=demand_of(workload, sync_lag_s(inventory, workload, roots, rollout)),
        fixed_price_per_h=reward.num_slots * reward.price_per_slot_h if reward else 0.0,
        spare_replicas=spare_replicas,
    )


def demand_of(workload: Workload, sync_s: float = 0.0) -> Demand:
    """What a step asks for; `sync_s` is from a version's publication until machines have it."""
    reward = workload.reward
    return Demand(
        trajectories=workload.trajectories_per_step,
        tokens=workload.generated_tokens_per_step,
        bound=workload.bound,
        tail_tokens=workload.answer.tail,
        lag_s=sync_s + (reward.seconds if reward else 0.0),
        reward_rate=reward.num_slots / reward.seconds if reward and reward.seconds > 0 else None,
    )


def sync_lag_s(inventory: Inventory, workload: Workload, roots: list[str], rollout: tuple[RolloutColumn, ...]) -> float:
    """From the root that reaches all classes the soonest, until the last node of the last class has a version."""
    receivers = {column.offer for column in rollout}
    return min(
        max(relay_s(workload, inventory, root, name, inventory.classes[name].num_nodes) for name in receivers)
        for root in roots
    )
