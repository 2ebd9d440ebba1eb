"""What a workload makes of a model's shape: parameters that a step touches or trains, bytes of an update, contexts.

A parameter *used in matmuls* is read once and costs 2 FLOP per token; the input embedding is a lookup and is not one,
the LM head is, also where both share their weights.
"""

from __future__ import annotations

from offbeat.plan.inputs.shapes import matmul_parameters, num_parameters
from offbeat.plan.inputs.workload import ModelShape, Workload


def touched_parameters(model: ModelShape, rows: float) -> float:
    """Used in matmuls by at least one of so many rows: what a decode step must read.

    Rows choose experts independently, so that a share of (1 - k/E)^rows of them is left out.
    """
    if not model.num_experts:
        return matmul_parameters(model)
    missed = (1 - model.experts_per_token / model.num_experts) ** rows
    routed = (model.num_layers - model.dense_layers) * model.num_experts * 3 * model.hidden * model.ffn
    return matmul_parameters(model) - missed * routed


def adapter_parameters(model: ModelShape, rank: int) -> float:
    """Of LoRA on every matrix of the attention and feed-forward parts: rank x (inputs + outputs) each."""
    queries, keys = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    attention = 2 * (model.hidden + queries) + 2 * (model.hidden + keys)
    width = 3 * (model.hidden + model.ffn)
    if not model.num_experts:
        return rank * model.num_layers * (attention + width)
    experts = (model.num_layers - model.dense_layers) * (model.num_experts + model.num_shared_experts) * width
    dense = model.dense_layers * 3 * (model.hidden + model.dense_ffn)
    return rank * (model.num_layers * attention + experts + dense)


def trained_parameters(workload: Workload) -> float:
    """With gradient and optimizer state: the adapters of LoRA, or everything."""
    if workload.lora_rank:
        return adapter_parameters(workload.model, workload.lora_rank)
    return num_parameters(workload.model)


def update_bytes(workload: Workload) -> float:
    """What one version sends over a link: trained weights, thinned by the density of deltas."""
    return trained_parameters(workload) * workload.model.bytes_per_weight * workload.delta_density


def mean_context_tokens(workload: Workload) -> float:
    """Of a running answer at a moment picked at random: long answers run longer, so their square counts."""
    return workload.prompt.mean + workload.answer.mean_square / (2 * workload.answer.mean)


def sum_square_tokens(workload: Workload) -> float:
    """Of all trajectories of a step, the squares of their lengths; prompts and answers are independent."""
    prompt, answer = workload.prompt, workload.answer
    mean_square = prompt.mean_square + 2 * prompt.mean * answer.mean + answer.mean_square
    return workload.trajectories_per_step * mean_square
