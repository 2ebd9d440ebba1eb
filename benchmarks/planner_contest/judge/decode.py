"""Speed of a replica, by the judge's own roofline with two resources."""

from __future__ import annotations

from benchmarks.planner_contest.judge.plan import Figures
from benchmarks.planner_contest.judge.shape import (
    attention_flops,
    body_parameters,
    head_parameters,
    kv_bytes,
    mean_context,
    touched_parameters,
    weight_bytes,
)
from offbeat.planner.inputs.hardware import Accelerator
from offbeat.planner.inputs.workload import KvPolicy, Workload


def step_s(card: Accelerator, workload: Workload, tp: int, running: float, figures: Figures) -> float:
    """Seconds of a decode step: one token for each of `running` trajectories."""
    model, reached = workload.model, figures.card(card.name)
    multiplied = body_parameters(model) + head_parameters(model)
    compute_s = 2 * multiplied * running / (tp * card.flops * reached.gemm)
    read_s = (
        touched_parameters(model, running) * model.bytes_per_weight / (tp * card.memory_bytes_per_s * reached.memory)
    )
    context_bytes = running * mean_context(workload.prompt, workload.answer) * kv_bytes(model)
    attention_s = context_bytes / (min(tp, model.num_kv_heads) * card.memory_bytes_per_s * reached.attention)
    talk_s = 0.0
    if tp > 1:
        moved = 2 * (tp - 1) / tp * 2 * running * model.hidden
        talk_s = 2 * model.num_layers * (moved / (card.link_bytes_per_s * figures.network) + figures.all_reduce_s)
    return max(compute_s, read_s) + attention_s + talk_s + figures.step_overhead_s + running * figures.row_overhead_s


def prefill_s(card: Accelerator, workload: Workload, tp: int, tokens: float, squares: float, figures: Figures) -> float:
    """Seconds to compute keys and values of a number of tokens."""
    flops = 2 * body_parameters(workload.model) * tokens + attention_flops(workload.model, squares)
    return flops / (tp * card.flops * figures.card(card.name).prefill)


def tokens_per_s(card: Accelerator, workload: Workload, tp: int, running: float, figures: Figures) -> float:
    """Tokens per second of a replica, with prefill deducted; a group's prompt is computed once."""
    if running <= 0:
        return 0.0
    prompt = workload.prompt
    prompt_s = prefill_s(card, workload, tp, prompt.mean, prompt.mean_square, figures) / workload.group_size
    return 1 / (step_s(card, workload, tp, running, figures) / running + prompt_s / workload.answer.mean)


def refill_s(card: Accelerator, workload: Workload, tp: int, running: float, figures: Figures) -> float:
    """Seconds to compute keys and values again after a new version."""
    if workload.kv is not KvPolicy.REFILL:
        return 0.0
    context = mean_context(workload.prompt, workload.answer)
    return prefill_s(card, workload, tp, running * context, running * context**2, figures)


def room(card: Accelerator, workload: Workload, tp: int, figures: Figures) -> float:
    """Number of trajectories that a replica's memory holds; below 0 if its weights alone are too large."""
    free = figures.memory_share * card.memory_bytes - weight_bytes(workload.model) / tp
    each = kv_bytes(workload.model) / min(tp, workload.model.num_kv_heads)
    return free / (figures.kv_slack * mean_context(workload.prompt, workload.answer) * each)
