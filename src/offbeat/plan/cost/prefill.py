"""Seconds of prefill: of new prompts, which a group shares, and of running answers whose KV was dropped."""

from __future__ import annotations

from offbeat.plan.cost.constants import Figures
from offbeat.plan.cost.sizes import mean_context_tokens
from offbeat.plan.inputs.hardware import Accelerator
from offbeat.plan.inputs.shapes import active_body_parameters
from offbeat.plan.inputs.workload import KvPolicy, ModelShape, Workload


def prefill_flop(model: ModelShape, tokens: float, sum_square_tokens: float) -> float:
    """Matmuls of the body, and causal attention; logits are wanted of the last token alone."""
    attention = 2 * model.num_layers * model.num_heads * model.head_dim * sum_square_tokens
    return 2 * active_body_parameters(model) * tokens + attention


def prefill_s(flop: float, card: Accelerator, figures: Figures, tp: int) -> float:
    return flop / (tp * card.flops * figures.prefill_share)


def prompt_s(workload: Workload, card: Accelerator, figures: Figures, tp: int) -> float:
    """Of one answer: its prompt is computed once for its group."""
    flop = prefill_flop(workload.model, workload.prompt.mean, workload.prompt.mean_square)
    return prefill_s(flop, card, figures, tp) / workload.group_size


def refill_s(workload: Workload, card: Accelerator, figures: Figures, tp: int, rows: float) -> float:
    """Of all running answers of a replica, after a version whose weights their keys and values do not know."""
    context = mean_context_tokens(workload)
    return prefill_s(prefill_flop(workload.model, rows * context, rows * context**2), card, figures, tp)


def drain_s(workload: Workload, token_s: float) -> float:
    """Seconds' worth of tokens that are lost while old answers end and no new one may start.

    The last takes the tail of all lengths, a slot is idle from its own end on; what remains of an answer at a random
    moment is as long as what it has behind it. Steps with fewer rows are faster, so this is an upper estimate.
    """
    remaining = workload.answer.mean_square / (2 * workload.answer.mean)
    return token_s * max(0.0, workload.answer.tail - remaining)


def update_s(workload: Workload, card: Accelerator, figures: Figures, tp: int, rows: float, token_s: float) -> float:
    """What the KV policy costs a replica per version, beside the weights' own way."""
    if workload.kv is KvPolicy.REFILL:
        return refill_s(workload, card, figures, tp, rows)
    return drain_s(workload, token_s) if workload.kv is KvPolicy.FINISH else 0.0
