"""Memory on each card of a rollout replica, and of a training gang under ZeRO 1, 2 or 3."""

from __future__ import annotations

from offbeat.planner.cost.constants import Efficiencies
from offbeat.planner.cost.sizes import mean_context_tokens, trained_parameters
from offbeat.planner.inputs.hardware import Accelerator
from offbeat.planner.inputs.model_shapes import kv_bytes_per_token, num_parameters, weight_bytes
from offbeat.planner.inputs.workload import Workload

KV_HEADROOM = 1.25
"""Memory is reserved for this multiple of the mean context of running answers, so that longer contexts do not preempt
answers."""
OPTIMIZER_BYTES = 12
"""Bytes per parameter: fp32 weights and both moments of Adam."""
GRADIENT_BYTES = 2
ACTIVATION_BYTES = 34
"""Bytes per token, layer and hidden unit, with fused attention and without recomputing."""
CHECKPOINT_BYTES = 2
"""Bytes per token, layer and hidden unit with recomputing, where a layer keeps only its input."""
LOSS_CHUNK_TOKENS = 1024
"""Tokens of one chunk of the loss, which is computed in chunks because the whole logits would take gigabytes."""
LOGIT_BYTES = 8
"""Bytes per token and vocabulary entry of a chunk: fp32 logits and their gradient."""
MIN_MICROBATCH_TOKENS = 4096
"""Smallest micro-batch, in tokens; smaller ones make matmuls inefficient."""


def kv_bytes_per_row(workload: Workload, tp: int) -> float:
    """Bytes of KV cache for one running answer (row) on each card of a replica. If `tp` exceeds the number of KV heads,
    several cards hold the same head."""
    kv_bytes = kv_bytes_per_token(workload.model) / min(tp, workload.model.num_kv_heads)
    return KV_HEADROOM * mean_context_tokens(workload) * kv_bytes


def usable_bytes(card: Accelerator, figures: Efficiencies) -> float:
    return figures.memory_share * card.memory_bytes


def max_rows(workload: Workload, card: Accelerator, figures: Efficiencies, tp: int) -> int:
    """Largest number of concurrent answers that fits into a replica's memory; 0 if the weights do not fit."""
    free_bytes = usable_bytes(card, figures) - weight_bytes(workload.model) / tp
    return max(0, int(free_bytes / kv_bytes_per_row(workload, tp)))


def spare_bytes(workload: Workload, card: Accelerator, figures: Efficiencies, tp: int, rows: int) -> float:
    """Bytes left on each card besides the weights and `rows` running answers."""
    taken = weight_bytes(workload.model) / tp + rows * kv_bytes_per_row(workload, tp)
    return usable_bytes(card, figures) - taken


def rollout_bytes(workload: Workload, figures: Efficiencies, tp: int) -> float:
    """Bytes of memory that a card needs at least to hold its part of a replica with one answer."""
    return (weight_bytes(workload.model) / tp + kv_bytes_per_row(workload, tp)) / figures.memory_share


def kept_bytes(workload: Workload, tp: int, pp: float, dp: int, zero: int) -> float:
    """Bytes of training state on each card between two training steps: `state_bytes` without gradients."""
    gradients = GRADIENT_BYTES * trained_parameters(workload) / (tp * pp) / (dp if zero >= 2 else 1)
    return state_bytes(workload, tp, pp, dp, zero) - gradients * (2 if workload.has_critic else 1)


def state_bytes(workload: Workload, tp: int, pp: float, dp: int, zero: int) -> float:
    """Weights, gradients and optimizer state on each card; `pp` may be a fraction if stages are uneven.

    ZeRO-1 shards the optimizer over `dp`, ZeRO-2 also the gradients, ZeRO-3 everything. A critic is a second model of
    the same size; a reference, and the frozen model under LoRA, have weights only."""
    model, split = workload.model, tp * pp
    sharded = dp if zero == 3 else 1
    frozen = num_parameters(model) * workload.bytes_per_trained_weight / split / sharded
    per_parameter = OPTIMIZER_BYTES / dp + GRADIENT_BYTES / (dp if zero >= 2 else 1)
    trained = trained_parameters(workload) * per_parameter / split
    policy = frozen + trained + (trained_parameters(workload) * 2 / split / sharded if workload.lora_rank else 0.0)
    return policy * (2 if workload.has_critic else 1) + (frozen if workload.has_reference else 0.0)


def microbatch_tokens(workload: Workload) -> float:
    """Tokens of one micro-batch (one forward and backward pass), large enough for the longest trajectory."""
    return max(MIN_MICROBATCH_TOKENS, workload.prompt.longest + workload.answer.longest)


def activation_bytes(workload: Workload, tp: int, pp: int, layers: float, *, recompute: bool) -> float:
    """Bytes of activations on a card with `layers` layers. Assumes the worst case of every pipeline stage at once: `pp`
    micro-batches in flight, as in the first stage, and the logits, which only the last stage has."""
    model, tokens = workload.model, microbatch_tokens(workload)
    unit = model.hidden * tokens / tp
    logits = LOGIT_BYTES * model.vocab * LOSS_CHUNK_TOKENS / tp
    if not recompute:
        return ACTIVATION_BYTES * unit * layers * pp + logits
    return CHECKPOINT_BYTES * unit * layers * pp + ACTIVATION_BYTES * unit + logits


def training_bytes(
    workload: Workload, tp: int, pp: int, dp: int, zero: int, *, recompute: bool, layer_share: float | None = None
) -> float:
    """Bytes on each card of a pipeline stage in training: state and activations. `layer_share` is the stage's share of
    all layers (None: an equal share)."""
    share = 1 / pp if layer_share is None else layer_share
    activations = activation_bytes(workload, tp, pp, share * workload.model.num_layers, recompute=recompute)
    return state_bytes(workload, tp, 1 / share, dp, zero) + activations
