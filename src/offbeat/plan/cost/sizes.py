"""How many parameters and bytes a model's shape comes to. Norms and biases are left out: less than 0.1 %.

A parameter *used in matmuls* is read once and costs 2 FLOP per token; the input embedding is a lookup and is not one,
the LM head is, also where both share their weights.
"""

from __future__ import annotations

from functools import lru_cache

from offbeat.plan.workload import ModelShape, Workload


def kv_bytes_per_token(model: ModelShape) -> float:
    """Keys and values of all layers, before any split over accelerators."""
    return 2 * model.num_layers * model.num_kv_heads * model.head_dim * model.bytes_per_kv


def attention_parameters(model: ModelShape) -> float:
    """Of one layer: queries, keys, values and output."""
    return model.hidden * model.head_dim * (2 * model.num_heads + 2 * model.num_kv_heads)


def expert_parameters(model: ModelShape) -> float:
    """Of one expert, or of the feed-forward part of a dense layer: gate, up and down."""
    return 3 * model.hidden * model.ffn


def head_parameters(model: ModelShape) -> float:
    return model.vocab * model.hidden


def num_expert_layers(model: ModelShape) -> int:
    return model.num_layers - model.dense_layers if model.num_experts else 0


@lru_cache(maxsize=64)
def _common_parameters(model: ModelShape) -> float:
    """What every token uses in the body: attention, dense layers, routers and shared experts."""
    common = model.num_layers * attention_parameters(model)
    if not model.num_experts:
        return common + model.num_layers * expert_parameters(model)
    per_layer = model.hidden * model.num_experts + model.num_shared_experts * expert_parameters(model)
    dense = model.dense_layers * 3 * model.hidden * model.dense_ffn
    return common + dense + num_expert_layers(model) * per_layer


def touched_parameters(model: ModelShape, rows: float) -> float:
    """Used in matmuls by at least one of so many rows: what a decode step must read.

    Rows choose experts independently, so that a share of 1 - (1 - k/E)^rows of them is touched.
    """
    touched = _common_parameters(model) + head_parameters(model)
    if model.num_experts:
        share = 1 - (1 - model.experts_per_token / model.num_experts) ** rows
        touched += num_expert_layers(model) * model.num_experts * share * expert_parameters(model)
    return touched


def active_body_parameters(model: ModelShape) -> float:
    """Used in matmuls by one token, without the LM head."""
    return _common_parameters(model) + num_expert_layers(model) * model.experts_per_token * expert_parameters(model)


def active_parameters(model: ModelShape) -> float:
    """Used in matmuls by one token, with the LM head: 2 FLOP each."""
    return active_body_parameters(model) + head_parameters(model)


def body_parameters(model: ModelShape) -> float:
    """All that the layers hold."""
    return _common_parameters(model) + num_expert_layers(model) * model.num_experts * expert_parameters(model)


@lru_cache(maxsize=64)
def total_parameters(model: ModelShape) -> float:
    """All that memory holds and a full update sends: an untied model has its embedding and its LM head."""
    return body_parameters(model) + head_parameters(model) * (1 if model.is_tied else 2)


def weight_bytes(model: ModelShape) -> float:
    return total_parameters(model) * model.bytes_per_weight


def adapter_parameters(model: ModelShape, rank: int) -> float:
    """Of LoRA on every matrix of the attention and feed-forward parts: rank x (inputs + outputs) each."""
    queries, keys = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    attention = 2 * (model.hidden + queries) + 2 * (model.hidden + keys)
    width = 3 * (model.hidden + model.ffn)
    if not model.num_experts:
        return rank * model.num_layers * (attention + width)
    experts = num_expert_layers(model) * (model.num_experts + model.num_shared_experts) * width
    dense = model.dense_layers * 3 * (model.hidden + model.dense_ffn)
    return rank * (model.num_layers * attention + experts + dense)


def trained_parameters(workload: Workload) -> float:
    """With gradient and optimizer state: the adapters of LoRA, or everything."""
    if workload.lora_rank:
        return adapter_parameters(workload.model, workload.lora_rank)
    return total_parameters(workload.model)


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
