"""Seconds of a rollout that starts a whole batch at once and waits for its longest answer, on cards of one kind.

Every card is a replica and takes an even share of the answers. Lengths are exponential, cut at the longest: after k
tokens a share of exp(-k / mean) still runs, but at least one answer on each card. A token takes one step of
`offbeat.planner.cost.rollout_time` with the rows and the context of that moment. The integral of the steps over k has a
closed form, so that a fit can compute it a hundred thousand times.
"""

from __future__ import annotations

import math

from offbeat.planner.cost.constants import Efficiencies
from offbeat.planner.cost.rollout_time import attention_s, matmul_s
from offbeat.planner.inputs.hardware import Accelerator
from offbeat.planner.inputs.workload import Workload


def drain_s(workload: Workload, card: Accelerator, figures: Efficiencies, num_cards: int) -> float:
    """Seconds from the first token of the batch to the last token of its longest answer."""
    model, answer = workload.model, workload.answer
    rows = max(1.0, workload.trajectories_per_step / num_cards)
    alone = _fallen_to(1.0, rows, answer.mean, answer.longest)
    after = answer.longest - alone
    row_tokens = rows * _left(answer.mean, alone) + after
    contexts = rows * _left_behind(answer.mean, alone) + after * (alone + answer.longest) / 2
    reading_s = attention_s(model, card, figures, 1, 1, workload.prompt.mean * row_tokens + contexts)

    ridge = max(1.0, ridge_rows(card, figures, model.bytes_per_weight))
    bound = _fallen_to(ridge, rows, answer.mean, answer.longest)
    computed_s = matmul_s(model, card, figures, 1, ridge) / ridge * rows * _left(answer.mean, bound)
    matmuls_s = computed_s + matmul_s(model, card, figures, 1, 1) * (answer.longest - bound)
    return matmuls_s + reading_s + figures.step_overhead_s * answer.longest + figures.row_overhead_s * row_tokens


def ridge_rows(card: Accelerator, figures: Efficiencies, bytes_per_weight: int) -> float:
    """Number of rows (answers decoded together) above which the matmuls of a dense model are compute-bound."""
    bytes_per_s = card.memory_bytes_per_s * figures.weight_read_share
    return card.flops * figures.gemm_share * bytes_per_weight / (2 * bytes_per_s)


def _fallen_to(level: float, rows: float, mean: float, longest: float) -> float:
    """Number of tokens after which only `level` rows of a card are left."""
    return min(longest, max(0.0, mean * math.log(rows / level)))


def _left(mean: float, tokens: float) -> float:
    """Integral of the share of answers that still run, over the first `tokens` tokens."""
    return mean * (1 - math.exp(-tokens / mean))


def _left_behind(mean: float, tokens: float) -> float:
    """Same as `_left`, but with each token weighted by the number of tokens before it."""
    return mean * (mean - (tokens + mean) * math.exp(-tokens / mean))
