"""Costs of a model's shape: parameters, keys and values, FLOPs. Written for the judge alone."""

from __future__ import annotations

from offbeat.planner.inputs.workload import LengthStatistics, ModelShape


def attention_parameters(model: ModelShape) -> float:
    width = model.head_dim * (model.num_heads + 2 * model.num_kv_heads)
    return model.hidden * width + model.num_heads * model.head_dim * model.hidden


def body_parameters(model: ModelShape, experts: float | None = None) -> float:
    """Parameters of all layers. `experts` is the number of experts to count per layer; default: those of one token."""
    attention = model.num_layers * attention_parameters(model)
    if not model.num_experts:
        return attention + model.num_layers * 3 * model.hidden * model.ffn
    counted = (model.experts_per_token if experts is None else experts) + model.num_shared_experts
    sparse = (model.num_layers - model.dense_layers) * 3 * model.hidden * model.ffn * counted
    return attention + sparse + model.dense_layers * 3 * model.hidden * model.dense_ffn


def head_parameters(model: ModelShape) -> float:
    return float(model.vocab * model.hidden)


def all_parameters(model: ModelShape) -> float:
    return body_parameters(model, model.num_experts) + head_parameters(model) * (1 if model.is_tied else 2)


def weight_bytes(model: ModelShape) -> float:
    return all_parameters(model) * model.bytes_per_weight


def touched_parameters(model: ModelShape, num_tokens: float) -> float:
    """Parameters read in one step: the head, and each expert that at least one of the tokens chose."""
    if not model.num_experts:
        return body_parameters(model) + head_parameters(model)
    missed = (1 - model.experts_per_token / model.num_experts) ** num_tokens
    return body_parameters(model, model.num_experts * (1 - missed)) + head_parameters(model)


def kv_bytes(model: ModelShape) -> float:
    """Bytes of keys and values of one token, on all cards of a replica together."""
    return 2.0 * model.num_layers * model.num_kv_heads * model.head_dim * model.bytes_per_kv


def attention_flops(model: ModelShape, squares: float) -> float:
    """FLOP of causal attention in a forward pass over sequences whose squared lengths have the given sum."""
    return 2.0 * model.num_layers * model.num_heads * model.head_dim * squares


def mean_context(prompt: LengthStatistics, answer: LengthStatistics) -> float:
    """Mean context of a running trajectory at a random time. Long ones are more likely, and half done on average."""
    return prompt.mean + answer.mean_square / (2 * answer.mean)
