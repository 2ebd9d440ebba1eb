"""Seconds of a decode step of a rollout replica: one token for each of its rows.

Two resources: matmuls take the longer of their FLOP and of reading their weights; attention reads keys and values and
is always bound by memory. Tensor parallelism adds two all-reduces a layer; a step has an overhead of its own.
"""

from __future__ import annotations

from offbeat.plan.cost.constants import Figures
from offbeat.plan.cost.sizes import touched_parameters
from offbeat.plan.inputs.hardware import Accelerator
from offbeat.plan.inputs.shapes import active_matmul_parameters, kv_bytes_per_token
from offbeat.plan.inputs.workload import ModelShape

ACTIVATION_BYTES = 2


def matmul_s(model: ModelShape, card: Accelerator, figures: Figures, tp: int, rows: float) -> float:
    """The longer of computing with the weights and of reading those that some row touches."""
    compute_s = 2 * active_matmul_parameters(model) * rows / (tp * card.flops * figures.gemm_share)
    read_bytes = touched_parameters(model, rows) * model.bytes_per_weight
    return max(compute_s, read_bytes / (tp * card.memory_bytes_per_s * figures.weight_read_share))


def attention_s(
    model: ModelShape, card: Accelerator, figures: Figures, tp: int, rows: float, context_tokens: float
) -> float:
    """Reading keys and values. More cards than KV heads hold copies, so each still reads a whole head."""
    read_bytes = rows * context_tokens * kv_bytes_per_token(model) / min(tp, model.num_kv_heads)
    return read_bytes / (card.memory_bytes_per_s * figures.kv_read_share)


def allreduce_s(num_bytes: float, card: Accelerator, figures: Figures, tp: int) -> float:
    """Over the cards of one node; nothing for one card."""
    if tp == 1:
        return 0.0
    sent = 2 * (tp - 1) / tp * num_bytes
    return sent / (card.link_bytes_per_s * figures.link_share) + figures.allreduce_latency_s


def decode_step_s(
    model: ModelShape, card: Accelerator, figures: Figures, tp: int, rows: float, context_tokens: float
) -> float:
    """One token for each of `rows` answers with so many tokens of context each on average."""
    exchanged_bytes = ACTIVATION_BYTES * rows * model.hidden
    return (
        matmul_s(model, card, figures, tp, rows)
        + attention_s(model, card, figures, tp, rows, context_tokens)
        + 2 * model.num_layers * allreduce_s(exchanged_bytes, card, figures, tp)
        + figures.step_overhead_s
    )


def ridge_rows(card: Accelerator, figures: Figures, bytes_per_weight: int = 2) -> float:
    """Rows above which the matmuls of a dense model are bound by compute."""
    bytes_per_s = card.memory_bytes_per_s * figures.weight_read_share
    return card.flops * figures.gemm_share * bytes_per_weight / (2 * bytes_per_s)
