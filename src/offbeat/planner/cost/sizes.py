"""Sizes that follow from workload and model: parameters that a step reads or trains, bytes of an update, contexts.

A parameter *used in matmuls* is read once and costs 2 FLOP per token. The LM head counts as such, even if it shares its
weights with the input embedding. The input embedding itself is a lookup and does not count.
"""

from __future__ import annotations

from offbeat.planner.inputs.model_shapes import matmul_parameters, num_parameters
from offbeat.planner.inputs.workload import ModelShape, Workload


def touched_parameters(model: ModelShape, rows: float) -> float:
    """Parameters that a decode step must read, because matmuls of at least one of `rows` running answers use them.
    Answers are assumed to choose experts independently. The share of experts that no answer uses is then (1 - experts
    per token / experts)^rows."""
    if not model.num_experts:
        return matmul_parameters(model)
    missed = (1 - model.experts_per_token / model.num_experts) ** rows
    routed = (model.num_layers - model.dense_layers) * model.num_experts * 3 * model.hidden * model.ffn
    return matmul_parameters(model) - missed * routed


def adapter_parameters(model: ModelShape, rank: int) -> float:
    """Parameters of LoRA adapters on every attention and feed-forward matrix: rank x (inputs + outputs) per matrix."""
    queries, keys = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    attention = 2 * (model.hidden + queries) + 2 * (model.hidden + keys)
    width = 3 * (model.hidden + model.ffn)
    if not model.num_experts:
        return rank * model.num_layers * (attention + width)
    experts = (model.num_layers - model.dense_layers) * (model.num_experts + model.num_shared_experts) * width
    dense = model.dense_layers * 3 * (model.hidden + model.dense_ffn)
    return rank * (model.num_layers * attention + experts + dense)


def trained_parameters(workload: Workload) -> float:
    """Parameters with gradient and optimizer state: the adapters under LoRA, otherwise all."""
    if workload.lora_rank:
        return adapter_parameters(workload.model, workload.lora_rank)
    return num_parameters(workload.model)


def update_bytes(workload: Workload) -> float:
    """Bytes that are sent over a link for one version: the bytes of all trained weights times `delta_density`."""
    return trained_parameters(workload) * workload.bytes_per_trained_weight * workload.delta_density


def mean_context_tokens(workload: Workload) -> float:
    """Mean context of a running answer at a random moment, in tokens; a long answer is more likely to be running."""
    return workload.prompt.mean + workload.answer.mean_square / (2 * workload.answer.mean)


def sum_square_tokens(workload: Workload) -> float:
    """Sum of the squared lengths of a step's trajectories; assumes that prompt and answer lengths are independent."""
    prompt, answer = workload.prompt, workload.answer
    mean_square = prompt.mean_square + 2 * prompt.mean * answer.mean + answer.mean_square
    return workload.trajectories_per_step * mean_square
