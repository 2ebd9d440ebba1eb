"""Time of a gang's training step: arithmetic with its pipeline bubble, and exposed communication.

Arithmetic counts the sum of squared lengths, not the square of the mean: a few long answers cost most of the attention.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from offbeat.planner.cost.constants import Efficiencies
from offbeat.planner.cost.memory import GRADIENT_BYTES, microbatch_tokens
from offbeat.planner.cost.sizes import sum_square_tokens, trained_parameters
from offbeat.planner.inputs.model_shapes import active_matmul_parameters, num_parameters
from offbeat.planner.inputs.workload import Workload

ACTIVATION_BYTES = 2


@dataclass(frozen=True)
class GangFabric:
    """Links of a gang, in bytes per second one way."""

    card_bytes_per_s: float
    """Between two cards of a node."""
    node_bytes_per_s: float
    """From one node to the others, shared by its cards."""
    per_node: int


def step_flop(workload: Workload, *, recompute: bool) -> float:
    """FLOP of one step of the whole gang. A backward pass counts as two forwards, or one under LoRA, which needs no
    gradients of frozen weights; a critic adds a pass for its values and its own training."""
    model = workload.model
    token_flop = 2 * active_matmul_parameters(model) * workload.trained_tokens_per_step
    attention_flop = 2 * model.num_layers * model.num_heads * model.head_dim * sum_square_tokens(workload)
    trained = 1 + int(recompute)
    backward = 1 if workload.lora_rank else 2
    passes = workload.recomputes_logprobs + workload.has_reference + trained
    passes += trained + 1 if workload.has_critic else 0
    backwards = 2 if workload.has_critic else 1
    return token_flop * (passes + backwards * backward) + attention_flop * (passes + backwards * 2)


def compute_s(workload: Workload, flops: float, *, recompute: bool) -> float:
    """Arithmetic on machines that together reach `flops` FLOP/s, without a bubble."""
    return step_flop(workload, recompute=recompute) / flops


def num_microbatches(workload: Workload, dp: int) -> float:
    """Micro-batches of one optimizer update in each of `dp` pipelines."""
    tokens = workload.trained_tokens_per_step / workload.updates_per_step / dp
    return max(1.0, tokens / microbatch_tokens(workload))


def bubble(workload: Workload, pp: int, dp: int) -> float:
    """Slowdown by idle stages of a pipeline, which fills and drains once per update."""
    return 1 + (pp - 1) / num_microbatches(workload, dp)


def tp_s(workload: Workload, figures: Efficiencies, fabric: GangFabric, tp: int, pp: float, dp: int) -> float:
    """Four all-reduces of the activations a layer, forward and backward, exposed in part."""
    if tp == 1:
        return 0.0
    tokens = workload.trained_tokens_per_step / dp
    sent = 4 * workload.model.num_layers / pp * 2 * (tp - 1) / tp * tokens * ACTIVATION_BYTES * workload.model.hidden
    return sent / (fabric.card_bytes_per_s * figures.link_share) * figures.tp_exposed_share


def allreduce_s(num_bytes: float, figures: Efficiencies, fabric: GangFabric, tp: int, dp: int) -> float:
    """All-reduce of each card's part over `dp` replicas: first inside nodes, which replicas fill, then between them,
    where all cards of a node send at once."""
    inside = max(1, min(dp, fabric.per_node // tp))
    between = math.ceil(dp / inside)  # a node that holds one replica more than none sends all its gradients too
    inside_s = 2 * (inside - 1) / inside * num_bytes / fabric.card_bytes_per_s
    card_share = fabric.node_bytes_per_s / fabric.per_node
    between_s = 2 * (between - 1) / between * (num_bytes / inside) / card_share if between > 1 else 0.0
    return (inside_s + between_s) / figures.link_share


def dp_s(
    workload: Workload, figures: Efficiencies, fabric: GangFabric, tp: int, pp: float, dp: int, zero: int
) -> float:
    """Gradients once an update. An all-reduce is a scatter and a gather, so ZeRO-1 and 2 send what replicas without
    it send; ZeRO-3 scatters the gradients and gathers the weights for the forward and the backward of a microbatch."""
    if dp == 1:
        return 0.0
    gradients = trained_parameters(workload) * GRADIENT_BYTES / (tp * pp) * (2 if workload.has_critic else 1)
    sent_bytes = gradients
    if zero == 3:
        weights = num_parameters(workload.model) * workload.model.bytes_per_weight / (tp * pp)
        sent_bytes = gradients / 2 + weights * num_microbatches(workload, dp)
    time_s = allreduce_s(sent_bytes, figures, fabric, tp, dp)
    return workload.updates_per_step * time_s * figures.dp_exposed_share


def boundary_s(workload: Workload, node_bytes_per_s: float, num_links: int) -> float:
    """Activations and their gradients over the boundary of two stages, by `num_links` parallel links."""
    sent = 2 * workload.trained_tokens_per_step * ACTIVATION_BYTES * workload.model.hidden
    return sent / (node_bytes_per_s * num_links)
