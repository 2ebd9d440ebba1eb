"""How long a gang takes for a step, by the judge's own arithmetic."""

from __future__ import annotations

from benchmarks.planner_judge.plan import Figures, Gang
from benchmarks.planner_judge.shape import all_parameters, attention_flops, body_parameters, head_parameters
from offbeat.plan.hardware import Inventory
from offbeat.plan.workload import Workload


def step_s(inventory: Inventory, workload: Workload, gang: Gang, figures: Figures) -> float:
    num_models = 2 if workload.has_critic else 1  # a critic of the policy's size is trained on the same tokens
    compute = compute_s(inventory, workload, gang, figures) * bubble(workload, gang)
    return num_models * (
        compute + _tp_s(inventory, workload, gang, figures) + _dp_s(inventory, workload, gang, figures)
    )


def flops(workload: Workload, recompute: bool) -> float:
    """Forward and backward, recomputed activations, and further forward passes."""
    model = workload.model
    passes = int(workload.recomputes_logprobs) + int(workload.has_reference) + int(recompute)
    multiplied = body_parameters(model) + head_parameters(model)
    prompt, answer = workload.prompt, workload.answer
    square = prompt.mean_square + 2 * prompt.mean * answer.mean + answer.mean_square
    squares = workload.trajectories_per_step * square
    tokens = workload.trained_tokens_per_step
    return (6 + 2 * passes) * multiplied * tokens + (3 + passes) * attention_flops(model, squares)


def must_recompute(inventory: Inventory, workload: Workload, gang: Gang, figures: Figures) -> bool:
    """Whether activations of a microbatch do not fit beside weights, gradients and optimizer."""
    model, cards = workload.model, [inventory.classes[name].accelerator for name in gang.nodes]
    sharded = {1: 4 + 12 / gang.dp, 2: 2 + 14 / gang.dp, 3: 16 / gang.dp}[gang.zero]
    states = all_parameters(model) * sharded / (gang.tp * gang.pp)
    activations = 34 * model.hidden * _microbatch_tokens(workload) * model.num_layers / gang.tp
    return states + activations > figures.memory_share * min(card.memory_bytes for card in cards)


def bubble(workload: Workload, gang: Gang) -> float:
    """What a pipeline's filling and draining makes of its time."""
    tokens = workload.trained_tokens_per_step / (gang.dp * workload.updates_per_step)
    return 1 + (gang.pp - 1) / max(1.0, tokens / _microbatch_tokens(workload))


def compute_s(inventory: Inventory, workload: Workload, gang: Gang, figures: Figures) -> float:
    """The slowest class: everybody waits for it."""
    total = flops(workload, must_recompute(inventory, workload, gang, figures))
    shares = dict(gang.batch_shares)
    if not shares and len(gang.nodes) > 1:
        shares = {name: count / sum(gang.layers) for name, count in zip(gang.nodes, gang.layers, strict=True)}
    shares = shares or dict.fromkeys(gang.nodes, 1.0)
    return max(total * share / _speed(inventory, gang, name, figures) for name, share in shares.items())


def _microbatch_tokens(workload: Workload) -> float:
    """One longest trajectory must fit."""
    return workload.prompt.longest + workload.answer.longest


def _tp_s(inventory: Inventory, workload: Workload, gang: Gang, figures: Figures) -> float:
    if gang.tp == 1:
        return 0.0
    model = workload.model
    link = min(inventory.classes[name].accelerator.link_bytes_per_s for name in gang.nodes)
    tokens = workload.trained_tokens_per_step / gang.dp
    moved = 4 * model.num_layers / gang.pp * 2 * (gang.tp - 1) / gang.tp * tokens * 2 * model.hidden
    return moved / (link * figures.network) * figures.exposed_tp


def _dp_s(inventory: Inventory, workload: Workload, gang: Gang, figures: Figures) -> float:
    """Gradients: first among the cards of a node, then between the nodes of a ring, which one link a node carries."""
    if gang.dp == 1:
        return 0.0
    stage_bytes = all_parameters(workload.model) * figures.gradient_bytes / gang.pp
    classes = [inventory.classes[name] for name in gang.nodes]
    local = min(gang.dp, max(1, min(one.per_node for one in classes) // gang.tp))
    num_nodes = -(-gang.dp // local)
    link = min(one.accelerator.link_bytes_per_s for one in classes)
    seconds = 2 * stage_bytes / gang.tp * (local - 1) / local / link
    if num_nodes > 1:
        rings = [list(gang.nodes)] if gang.batch_shares else [[name] for name in gang.nodes]
        pairs = [(one, other) for ring in rings for one in ring for other in ring]
        seconds += 2 * stage_bytes * (num_nodes - 1) / num_nodes / min(inventory.link(*p).bytes_per_s for p in pairs)
    return workload.updates_per_step * seconds / figures.network * figures.exposed_dp


def _speed(inventory: Inventory, gang: Gang, name: str, figures: Figures) -> float:
    machines = inventory.classes[name]
    reached = figures.card(machines.accelerator.name).mfu
    return gang.nodes[name] * machines.per_node * machines.accelerator.flops * reached
