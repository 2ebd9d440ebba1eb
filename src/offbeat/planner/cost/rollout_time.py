"""Times of decode steps and prefills of a rollout replica.

In a decode step, matmuls take the longer of two times: computing, and reading the weights. Attention reads keys and
values and is always memory-bound. Tensor parallelism adds two all-reduces per layer. The host adds an overhead for
each step, and one for each running answer.
"""

from __future__ import annotations

from offbeat.planner.cost.constants import Efficiencies
from offbeat.planner.cost.sizes import mean_context_tokens, touched_parameters
from offbeat.planner.inputs.hardware import Accelerator
from offbeat.planner.inputs.model_shapes import active_body_parameters, active_matmul_parameters, kv_bytes_per_token
from offbeat.planner.inputs.workload import KvPolicy, ModelShape, Workload

ACTIVATION_BYTES = 2


def matmul_flops(model: ModelShape, card: Accelerator) -> float:
    """Peak FLOP/s of an engine's matmuls: those in 8-bit floats if the weights are such and the card has them."""
    return card.fp8_flops if model.bytes_per_weight == 1 and card.fp8_flops else card.flops


def matmul_s(model: ModelShape, card: Accelerator, figures: Efficiencies, tp: int, rows: float) -> float:
    """Seconds of a decode step's matmuls: the time to compute or the time to read the weights, whichever is longer. A
    weight is read only if at least one of the `rows` running answers uses it."""
    compute_s = 2 * active_matmul_parameters(model) * rows / (tp * matmul_flops(model, card) * figures.gemm_share)
    read_bytes = touched_parameters(model, rows) * model.bytes_per_weight
    return max(compute_s, read_bytes / (tp * card.memory_bytes_per_s * figures.weight_read_share))


def attention_s(
    model: ModelShape, card: Accelerator, figures: Efficiencies, tp: int, rows: float, context_tokens: float
) -> float:
    """Time of a decode step's attention: reading keys and values. If `tp` exceeds the number of KV heads, heads are
    copied, so each card reads a whole head."""
    read_bytes = rows * context_tokens * kv_bytes_per_token(model) / min(tp, model.num_kv_heads)
    return read_bytes / (card.memory_bytes_per_s * figures.kv_read_share)


def allreduce_s(num_bytes: float, card: Accelerator, figures: Efficiencies, tp: int) -> float:
    """Time of an all-reduce of `num_bytes` over `tp` cards of one node; 0 for one card."""
    if tp == 1:
        return 0.0
    sent = 2 * (tp - 1) / tp * num_bytes
    return sent / (card.link_bytes_per_s * figures.link_share) + figures.allreduce_latency_s


def decode_step_s(
    model: ModelShape, card: Accelerator, figures: Efficiencies, tp: int, rows: float, context_tokens: float
) -> float:
    """Time to generate one token for each of `rows` answers, with `context_tokens` of context on average."""
    exchanged_bytes = ACTIVATION_BYTES * rows * model.hidden
    return (
        matmul_s(model, card, figures, tp, rows)
        + attention_s(model, card, figures, tp, rows, context_tokens)
        + 2 * model.num_layers * allreduce_s(exchanged_bytes, card, figures, tp)
        + figures.step_overhead_s
        + rows * figures.row_overhead_s
    )


def prefill_flop(model: ModelShape, tokens: float, sum_square_tokens: float) -> float:
    """FLOP of a prefill: matmuls of the body and causal attention. The head is left out: only the last token needs
    logits."""
    attention = 2 * model.num_layers * model.num_heads * model.head_dim * sum_square_tokens
    return 2 * active_body_parameters(model) * tokens + attention


def prefill_s(flop: float, model: ModelShape, card: Accelerator, figures: Efficiencies, tp: int) -> float:
    return flop / (tp * matmul_flops(model, card) * figures.prefill_share)


def prompt_s(workload: Workload, card: Accelerator, figures: Efficiencies, tp: int) -> float:
    """Prefill time of a prompt, divided by the number of its answers, because the prompt is prefilled once for all of
    them."""
    flop = prefill_flop(workload.model, workload.prompt.mean, workload.prompt.mean_square)
    return prefill_s(flop, workload.model, card, figures, tp) / workload.group_size


def refill_s(workload: Workload, card: Accelerator, figures: Efficiencies, tp: int, rows: float) -> float:
    """Time to prefill all `rows` running answers of a replica again after a new version."""
    context = mean_context_tokens(workload)
    flop = prefill_flop(workload.model, rows * context, rows * context**2)
    return prefill_s(flop, workload.model, card, figures, tp)


def drain_s(workload: Workload, token_s: float) -> float:
    """Upper estimate of the seconds of generation that a slot loses while running answers end on old weights and no new
    answer starts.

    The last answer to end is assumed to have the whole length `answer.tail` still ahead. Every slot is idle from the
    end of its own answer until this last one ends. At a random moment, a running answer has on average as many tokens
    ahead as behind."""
    remaining = workload.answer.mean_square / (2 * workload.answer.mean)
    return token_s * max(0.0, workload.answer.tail - remaining)


def tail_s(workload: Workload, card: Accelerator, figures: Efficiencies, tp: int, token_s: float) -> float:
    """Seconds of generation that a slot loses in each step with staleness bound 0, between the end of its last answer
    and the end of the longest. Answers run faster the fewer are left, so a token takes the mean of its time in a full
    replica, `token_s`, and alone."""
    alone_s = decode_step_s(workload.model, card, figures, tp, 1.0, workload.prompt.mean + workload.answer.tail)
    return drain_s(workload, (token_s + min(alone_s, token_s)) / 2)


def update_s(
    workload: Workload, card: Accelerator, figures: Efficiencies, tp: int, rows: float, token_s: float
) -> float:
    """Seconds of generation that a replica loses at a new version because its KV cache was computed with old weights.
    Depends on the KV policy: `refill_s` for refill, `drain_s` for finish, 0 for stale."""
    if workload.kv is KvPolicy.REFILL:
        return refill_s(workload, card, figures, tp, rows)
    return drain_s(workload, token_s) if workload.kv is KvPolicy.FINISH else 0.0
