"""Time of a gang's step, by the judge's own arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.planner_contest.judge.plan import Figures, Gang
from benchmarks.planner_contest.judge.shape import all_parameters, attention_flops, body_parameters, head_parameters
from offbeat.planner.inputs.hardware import Inventory
from offbeat.planner.inputs.workload import Workload


@dataclass(frozen=True)
class _Stage:
    """The work of the cards of one class: a part of the layers, or all layers on a part of the batch."""

    name: str
    tp: int
    share: float
    """Share of a replica's layers that its cards hold."""
    ring: tuple[str, ...]
    """Classes over which gradients are summed."""


def _stages(inventory: Inventory, num_layers: int, gang: Gang) -> list[_Stage]:
    """Returns the stages of a gang. If a pipeline crosses classes, each class divides its cards among the same number
    of replicas, so classes may differ in tensor parallelism."""
    if len(gang.nodes) == 1 or gang.batch_shares:
        share = -(-num_layers // gang.pp) / num_layers  # a stage holds whole layers, so the fullest has more than most
        return [_Stage(name, gang.tp, share, tuple(gang.nodes)) for name in gang.nodes]
    return [
        _Stage(name, num * inventory.classes[name].per_node // gang.dp, count / sum(gang.layers), (name,))
        for (name, num), count in zip(gang.nodes.items(), gang.layers, strict=True)
    ]


def step_s(inventory: Inventory, workload: Workload, gang: Gang, figures: Figures) -> float:
    """Seconds of a step: those of the slowest stage, for which all others wait."""
    num_models = 2 if workload.has_critic else 1  # a critic of the policy's size is trained on the same tokens
    slowest_s = max(
        compute_s(inventory, workload, gang, stage, figures) * bubble(workload, gang)
        + _tp_s(inventory, workload, gang, stage, figures)
        + _dp_s(inventory, workload, gang, stage, figures)
        for stage in _stages(inventory, workload.model.num_layers, gang)
    )
    return num_models * max(slowest_s, crossing_s(inventory, workload, gang))


def crossing_s(inventory: Inventory, workload: Workload, gang: Gang) -> float:
    """Seconds that the busiest link needs for what passes between stages on different nodes: activations one way, their
    gradients the other. A stage's replicas lie on neighbouring cards, one node after another."""
    if gang.pp == 1:
        return 0.0
    moved = 4 * workload.trained_tokens_per_step * workload.model.hidden  # bytes of 16-bit numbers, both ways
    if len(gang.nodes) > 1 and not gang.batch_shares:
        link = inventory.link(*gang.nodes)
        return moved / link.bytes_per_s / (1 if link.is_shared else min(gang.nodes.values()))
    worst_s = 0.0
    for name in gang.nodes:
        per_node = inventory.classes[name].per_node // gang.tp
        num_here = gang.nodes[name] * per_node // gang.pp
        sent: dict[int, int] = {}
        for replica in range((gang.pp - 1) * num_here):
            here, there = replica // per_node, (replica + num_here) // per_node
            if here != there:
                sent[here] = sent.get(here, 0) + 1
        if sent:
            link = inventory.link(name, name)
            busiest = max(sent.values()) if not link.is_shared else sum(sent.values()) / (gang.pp - 1)
            worst_s = max(worst_s, moved * busiest / gang.dp / link.bytes_per_s)
    return worst_s


def flops(workload: Workload, recompute: bool) -> float:
    """FLOP of a step: forward and backward pass, recomputed activations, and further forward passes."""
    model = workload.model
    passes = int(workload.recomputes_logprobs) + int(workload.has_reference) + int(recompute)
    multiplied = body_parameters(model) + head_parameters(model)
    prompt, answer = workload.prompt, workload.answer
    square = prompt.mean_square + 2 * prompt.mean * answer.mean + answer.mean_square
    squares = workload.trajectories_per_step * square
    tokens = workload.trained_tokens_per_step
    return (6 + 2 * passes) * multiplied * tokens + (3 + passes) * attention_flops(model, squares)


def must_recompute(inventory: Inventory, workload: Workload, gang: Gang, figures: Figures) -> bool:
    """Whether on some card activations do not fit beside weights, gradients and optimizer."""
    model = workload.model
    sharded = {1: 4 + 12 / gang.dp, 2: 2 + 14 / gang.dp, 3: 16 / gang.dp}[gang.zero]
    for stage in _stages(inventory, workload.model.num_layers, gang):
        states = all_parameters(model) * sharded * stage.share / stage.tp
        layers = model.num_layers * stage.share * gang.pp  # as many microbatches are under way as there are stages
        activations = 34 * model.hidden * _microbatch_tokens(workload) * layers / stage.tp
        room = figures.memory_share * inventory.classes[stage.name].accelerator.memory_bytes
        if states + activations > room:
            return True
    return False


def bubble(workload: Workload, gang: Gang) -> float:
    """Factor on a pipeline's time, because it fills and drains."""
    return 1 + (gang.pp - 1) / _microbatches(workload, gang)


def compute_s(inventory: Inventory, workload: Workload, gang: Gang, stage: _Stage, figures: Figures) -> float:
    total = flops(workload, must_recompute(inventory, workload, gang, figures))
    if len(gang.nodes) > 1 and not gang.batch_shares:
        share = stage.share  # each class has the layers of its own stage
    else:
        share = gang.batch_shares.get(stage.name, 1.0) * stage.share * gang.pp
    return total * share / _speed(inventory, gang, stage.name, figures)


def _microbatches(workload: Workload, gang: Gang) -> float:
    """Number of micro-batches of one update in each replica."""
    tokens = workload.trained_tokens_per_step / (gang.dp * workload.updates_per_step)
    return max(1.0, tokens / _microbatch_tokens(workload))


def _microbatch_tokens(workload: Workload) -> float:
    """Tokens of a micro-batch, which must hold the longest trajectory."""
    return workload.prompt.longest + workload.answer.longest


def _tp_s(inventory: Inventory, workload: Workload, gang: Gang, stage: _Stage, figures: Figures) -> float:
    if stage.tp == 1:
        return 0.0
    model = workload.model
    link = inventory.classes[stage.name].accelerator.link_bytes_per_s
    tokens = workload.trained_tokens_per_step / gang.dp
    moved = 4 * model.num_layers * stage.share * 2 * (stage.tp - 1) / stage.tp * tokens * 2 * model.hidden
    return moved / (link * figures.network) * figures.exposed_tp


def _dp_s(inventory: Inventory, workload: Workload, gang: Gang, stage: _Stage, figures: Figures) -> float:
    """Seconds of exchanging gradients: first among the cards of a node, then between the nodes of a ring, over one link
    per node.

    ZeRO-3 only scatters gradients, and gathers weights for both passes of every micro-batch."""
    if gang.dp == 1:
        return 0.0
    stage_bytes = all_parameters(workload.model) * figures.gradient_bytes * stage.share
    if gang.zero == 3:
        gathered = all_parameters(workload.model) * workload.model.bytes_per_weight * stage.share
        stage_bytes = stage_bytes / 2 + gathered * _microbatches(workload, gang)
    classes = [inventory.classes[name] for name in stage.ring]
    local = min(gang.dp, max(1, min(one.per_node for one in classes) // stage.tp))
    num_nodes = -(-gang.dp // local)
    link = min(one.accelerator.link_bytes_per_s for one in classes)
    seconds = 2 * stage_bytes / stage.tp * (local - 1) / local / link
    if num_nodes > 1:
        pairs = [(one, other) for one in stage.ring for other in stage.ring]
        seconds += 2 * stage_bytes * (num_nodes - 1) / num_nodes / min(inventory.link(*p).bytes_per_s for p in pairs)
    return workload.updates_per_step * seconds / figures.network * figures.exposed_dp


def _speed(inventory: Inventory, gang: Gang, name: str, figures: Figures) -> float:
    machines = inventory.classes[name]
    reached = figures.card(machines.accelerator.name).mfu
    return gang.nodes[name] * machines.per_node * machines.accelerator.flops * reached
