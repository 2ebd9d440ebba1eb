"""Time of a gang's training step: arithmetic with its pipeline bubble, and communication that arithmetic does not hide.

Arithmetic counts the sum of squared lengths, not the square of the mean, because a few long answers cost most of the
attention.
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
    """Rates of the links of a training gang (nodes that train together), one way."""

    card_bytes_per_s: float
    """Rate between two cards of a node."""
    node_bytes_per_s: float
    """Rate from one node to the others, shared by the cards of the node."""
    per_node: int


def step_flop(workload: Workload, *, recompute: bool) -> float:
    """FLOP of one step of the whole gang. A backward pass counts as two forward passes, or as one under LoRA, which
    needs no gradients of frozen weights. A critic adds a forward pass for its values and its own training."""
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
    """Time of a step's arithmetic on machines that together reach `flops` FLOP/s, without pipeline bubbles."""
    return step_flop(workload, recompute=recompute) / flops


def num_microbatches(workload: Workload, dp: int) -> float:
    """Number of micro-batches that each of `dp` data-parallel pipelines processes in one optimizer update."""
    tokens = workload.trained_tokens_per_step / workload.updates_per_step / dp
    return max(1.0, tokens / microbatch_tokens(workload))


def bubble(workload: Workload, pp: int, dp: int) -> float:
    """Factor by which idle stages slow a pipeline, which fills and drains once per update."""
    return 1 + (pp - 1) / num_microbatches(workload, dp)


def tp_s(workload: Workload, figures: Efficiencies, fabric: GangFabric, tp: int, pp: float, dp: int) -> float:
    """Seconds of tensor-parallel communication in a step that arithmetic does not hide: four all-reduces of the
    activations per layer, in the forward and backward pass together."""
    if tp == 1:
        return 0.0
    tokens = workload.trained_tokens_per_step / dp
    sent = 4 * workload.model.num_layers / pp * 2 * (tp - 1) / tp * tokens * ACTIVATION_BYTES * workload.model.hidden
    return sent / (fabric.card_bytes_per_s * figures.link_share) * figures.tp_exposed_share


def allreduce_s(num_bytes: float, figures: Efficiencies, fabric: GangFabric, tp: int, dp: int) -> float:
    """Time of an all-reduce of each card's `num_bytes` over `dp` replicas: first among the replicas inside a node, then
    between nodes, where all cards of a node send at once."""
    inside = max(1, min(dp, fabric.per_node // tp))
    between = math.ceil(dp / inside)  # a node with fewer replicas also sends all its gradients
    inside_s = 2 * (inside - 1) / inside * num_bytes / fabric.card_bytes_per_s
    card_share = fabric.node_bytes_per_s / fabric.per_node
    between_s = 2 * (between - 1) / between * (num_bytes / inside) / card_share if between > 1 else 0.0
    return (inside_s + between_s) / figures.link_share


def dp_s(
    workload: Workload, figures: Efficiencies, fabric: GangFabric, tp: int, pp: float, dp: int, zero: int
) -> float:
    """Seconds of data-parallel communication that arithmetic does not hide: gradients, once per optimizer update.

    An all-reduce is a scatter and a gather, so ZeRO-1 and ZeRO-2 send as much as unsharded replicas. ZeRO-3 scatters
    the gradients, and gathers the weights for the forward and for the backward pass of every micro-batch."""
    if dp == 1:
        return 0.0
    gradients = trained_parameters(workload) * GRADIENT_BYTES / (tp * pp) * (2 if workload.has_critic else 1)
    sent_bytes = gradients
    if zero == 3:
        weights = num_parameters(workload.model) * workload.bytes_per_trained_weight / (tp * pp)
        sent_bytes = gradients / 2 + weights * num_microbatches(workload, dp)
    time_s = allreduce_s(sent_bytes, figures, fabric, tp, dp)
    return workload.updates_per_step * time_s * figures.dp_exposed_share


def boundary_s(workload: Workload, node_bytes_per_s: float, num_links: int) -> float:
    """Time to send activations and their gradients across the boundary of two stages over `num_links` parallel
    links."""
    sent = 2 * workload.trained_tokens_per_step * ACTIVATION_BYTES * workload.model.hidden
    return sent / (node_bytes_per_s * num_links)
