"""Memory on each card of a rollout replica, and of a training gang under ZeRO 1, 2 or 3."""

from __future__ import annotations

from offbeat.planner.cost.constants import Efficiencies
from offbeat.planner.cost.sizes import mean_context_tokens, trained_parameters
from offbeat.planner.inputs.hardware import Accelerator
from offbeat.planner.inputs.model_shapes import kv_bytes_per_token, num_parameters, weight_bytes
from offbeat.planner.inputs.workload import Workload

KV_HEADROOM = 1.25
"""Room for the contexts of running answers above their mean, against preemption."""
OPTIMIZER_BYTES = 12
"""Per parameter: fp32 weights and both moments of Adam."""
GRADIENT_BYTES = 2
ACTIVATION_BYTES = 34
"""Per token, layer and hidden unit, with fused attention and nothing recomputed."""
CHECKPOINT_BYTES = 2
"""The same if a layer keeps only its input."""
LOSS_CHUNK_TOKENS = 1024
"""The loss is computed in chunks of this many tokens: whole logits would be gigabytes."""
LOGIT_BYTES = 8
"""Per token and vocabulary entry of a chunk: fp32 logits and their gradient."""
MIN_MICROBATCH_TOKENS = 4096
"""Smaller ones make matmuls inefficient."""


def kv_bytes_per_row(workload: Workload, tp: int) -> float:
    """KV of one row on each card of a replica; cards beyond the KV heads hold copies."""
    kv_bytes = kv_bytes_per_token(workload.model) / min(tp, workload.model.num_kv_heads)
    return KV_HEADROOM * mean_context_tokens(workload) * kv_bytes


def usable_bytes(card: Accelerator, figures: Efficiencies) -> float:
    return figures.memory_share * card.memory_bytes


def max_rows(workload: Workload, card: Accelerator, figures: Efficiencies, tp: int) -> int:
    """Most concurrent answers in a replica's memory; 0 if the weights do not fit."""
    free_bytes = usable_bytes(card, figures) - weight_bytes(workload.model) / tp
    return max(0, int(free_bytes / kv_bytes_per_row(workload, tp)))


def spare_bytes(workload: Workload, card: Accelerator, figures: Efficiencies, tp: int, rows: int) -> float:
    """Memory left on each card beside weights and running answers."""
    taken = weight_bytes(workload.model) / tp + rows * kv_bytes_per_row(workload, tp)
    return usable_bytes(card, figures) - taken


def rollout_bytes(workload: Workload, figures: Efficiencies, tp: int) -> float:
    """Least memory of a card for a replica with one answer."""
    return (weight_bytes(workload.model) / tp + kv_bytes_per_row(workload, tp)) / figures.memory_share


def kept_bytes(workload: Workload, tp: int, pp: float, dp: int, zero: int) -> float:
    """State of a gang on each card between two training steps: without gradients."""
    gradients = GRADIENT_BYTES * trained_parameters(workload) / (tp * pp) / (dp if zero >= 2 else 1)
    return state_bytes(workload, tp, pp, dp, zero) - gradients * (2 if workload.has_critic else 1)


def state_bytes(workload: Workload, tp: int, pp: float, dp: int, zero: int) -> float:
    """Weights, gradients and optimizer on each card; `pp` may be a fraction if stages are uneven.

    ZeRO-1 shards the optimizer over `dp`, ZeRO-2 also gradients, ZeRO-3 everything. A critic is a second model of the
    same size; a reference, and the frozen model under LoRA, have weights only.
    """
    model, split = workload.model, tp * pp
    sharded = dp if zero == 3 else 1
    frozen = num_parameters(model) * model.bytes_per_weight / split / sharded
    per_parameter = OPTIMIZER_BYTES / dp + GRADIENT_BYTES / (dp if zero >= 2 else 1)
    trained = trained_parameters(workload) * per_parameter / split
    policy = frozen + trained + (trained_parameters(workload) * 2 / split / sharded if workload.lora_rank else 0.0)
    return policy * (2 if workload.has_critic else 1) + (frozen if workload.has_reference else 0.0)


def microbatch_tokens(workload: Workload) -> float:
    """Tokens of one forward and backward pass: the longest trajectory must fit."""
    return max(MIN_MICROBATCH_TOKENS, workload.prompt.longest + workload.answer.longest)


def activation_bytes(workload: Workload, tp: int, pp: int, layers: float, *, recompute: bool) -> float:
    """Activations on a card of the first stage, which holds one microbatch per stage, plus the last stage's loss."""
    model, tokens = workload.model, microbatch_tokens(workload)
    unit = model.hidden * tokens / tp
    logits = LOGIT_BYTES * model.vocab * LOSS_CHUNK_TOKENS / tp
    if not recompute:
        return ACTIVATION_BYTES * unit * layers * pp + logits
    return CHECKPOINT_BYTES * unit * layers * pp + ACTIVATION_BYTES * unit + logits


def training_bytes(
    workload: Workload, tp: int, pp: int, dp: int, zero: int, *, recompute: bool, layer_share: float | None = None
) -> float:
    """Memory of the fullest card of a gang; `layer_share` is the stage's share of unevenly split layers."""
    share = 1 / pp if layer_share is None else layer_share
    activations = activation_bytes(workload, tp, pp, share * workload.model.num_layers, recompute=recompute)
    return state_bytes(workload, tp, 1 / share, dp, zero) + activations
