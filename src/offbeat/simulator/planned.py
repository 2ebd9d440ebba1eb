"""The fleet and the trainer of a plan, with times from the planner's cost functions."""

from __future__ import annotations

import math

from offbeat.errors import UserError
from offbeat.planner.cost import memory, rollout_time, sync_time
from offbeat.planner.cost.constants import Constants
from offbeat.planner.cost.sizes import mean_context_tokens
from offbeat.planner.inputs.hardware import Inventory
from offbeat.planner.inputs.model_shapes import active_body_parameters, kv_bytes_per_token, weight_bytes
from offbeat.planner.inputs.workload import Workload
from offbeat.planner.plan import Plan, Pool
from offbeat.simulator.fleet import WorkerClass
from offbeat.simulator.replica import EngineSpeed
from offbeat.simulator.simulation import TrainerModel


def planned_fleet(
    plan: Plan, inventory: Inventory, workload: Workload, constants: Constants
) -> tuple[WorkerClass, ...]:
    """Returns the replicas of a plan."""
    return tuple(_kind(pool, plan, inventory, workload, constants) for pool in plan.rollout)


def _kind(pool: Pool, plan: Plan, inventory: Inventory, workload: Workload, constants: Constants) -> WorkerClass:
    if pool.offer not in inventory.classes:
        raise UserError(
            f"the plan uses the class {pool.offer!r}, which the cluster does not have; give the plan's cluster"
        )
    machines = inventory.classes[pool.offer]
    card, figures, model = machines.accelerator, constants.of(machines.accelerator.name), workload.model
    context = mean_context_tokens(workload)
    rows = pool.concurrency
    planned_s = rollout_time.decode_step_s(model, card, figures, pool.tp, rows, context)
    # The plan's time of a token counts what a shape adds, such as a slower link between its cards.
    factor = pool.token_s / planned_s if pool.token_s > 0 else 1.0
    per_token_s = rollout_time.attention_s(model, card, figures, pool.tp, 1, 1.0)
    step_s = [
        rollout_time.decode_step_s(model, card, figures, pool.tp, max(count, 1), 0.0) for count in range(rows + 2)
    ]
    flop_s = pool.tp * card.flops * figures.prefill_share
    room_bytes = memory.usable_bytes(card, figures) - weight_bytes(model) / pool.tp
    kv_bytes = kv_bytes_per_token(model) / min(pool.tp, model.num_kv_heads)
    spare_bytes = memory.spare_bytes(workload, card, figures, pool.tp, rows)
    speed = EngineSpeed(
        tuple(factor * seconds for seconds in step_s),
        factor * per_token_s,
        2 * active_body_parameters(model) / flop_s,
        2 * model.num_layers * model.num_heads * model.head_dim / flop_s,
        load_s=sync_time.swap_s(workload, card, figures, pool.tp, spare_bytes),
    )
    lag_s = plan.placement.lags_s.get(pool.offer, plan.sync.seconds)
    return WorkerClass(
        pool.column,
        pool.num_replicas,
        rows,
        speed,
        kv_tokens=room_bytes / kv_bytes if room_bytes > 0 else math.inf,
        accelerators=pool.tp * pool.pp,
        price_per_h=0.0 if pool.shares_gang else machines.price_per_h,
        fetch_s=lag_s,
    )


def planned_trainer(plan: Plan, inventory: Inventory, workload: Workload) -> TrainerModel:
    """Returns the plan's training gang: a step's time grows with its tokens."""
    training = plan.training
    cards = {name: nodes * inventory.classes[name].per_node for name, nodes in training.nodes.items()}
    price = sum(count * inventory.classes[name].price_per_h for name, count in cards.items())
    num_cards = sum(cards.values())
    return TrainerModel(
        token_s=training.step_s / workload.trained_tokens_per_step,
        publish_s=training.publish_s,
        accelerators=num_cards,
        price_per_h=price / num_cards if num_cards else 0.0,
    )
