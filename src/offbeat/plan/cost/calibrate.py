"""Constants of the cost model from measurements, with the error on what the fit has not seen.

Every constant is the non-negative least squares solution on relative errors. The held-out error leaves out whole batch
sizes and whole contexts (decode), whole lengths (prefill), whole sizes (link) or the largest gang (train; of gangs that
are alike, the most tokens), never single points: their neighbours would give them away.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import nnls

from offbeat.errors import UserError
from offbeat.plan.cost.constants import Constants, Figures, HeldOut, Source
from offbeat.plan.cost.measured import EMBEDDED, Measured, Measurement
from offbeat.plan.cost.prefill import prefill_flop
from offbeat.plan.cost.sizes import touched_parameters
from offbeat.plan.inputs.hardware import Accelerator
from offbeat.plan.inputs.shapes import active_matmul_parameters, kv_bytes_per_token
from offbeat.plan.inputs.workload import ModelShape
from offbeat.spelling import suggest

RIDGES = np.geomspace(0.25, 4.0, 33)
"""e_F over e_W that are tried: where matmuls turn from reading weights to computing."""
DECODE_FLOOR = (0.0, 1.0, 0.0)
"""Weights are not read faster than at the peak. Below the ridge their reading and the overhead are both constant, and
noise alone would decide between them."""
MIN_KV_SHARE, MAX_KV_SHARE = 0.5, 2.0
"""Reads of keys and values outside of this tell of preempted answers or of a wrong shape, not of a slow card. Where the
embedded engine was stepped by hand nothing is preempted, and its attention may be as slow as it is."""
FLAT = 1.5
"""The longest decode step over the shortest, up to which their size does not tell: the host sets the pace."""
MAX_SHARE = 1.1
"""What is faster than the card's peak by more has the wrong card or shape; less is clock boost and noise."""


Rows = Sequence[Measurement]
Terms = Callable[[Rows, float], np.ndarray]
"""Columns whose non-negative sum is the seconds of each measurement; the number is a ridge, where there is one."""


@dataclass(frozen=True)
class Solution:
    weights: np.ndarray
    ridge: float
    error: float
    """Root of the mean squared relative error."""


def fit(
    measurements: Iterable[Measurement],
    model: ModelShape,
    cards: Mapping[str, Accelerator],
    base: Constants | None = None,
    least_kv_share: float = MIN_KV_SHARE,
) -> Constants:
    """`base` with what the measurements tell of each accelerator, and how far off it was on held-out ones."""
    constants = base or Constants()
    found: dict[tuple[str, str], list[Measurement]] = {}
    for one in measurements:
        found.setdefault((one.accelerator, one.kind), []).append(one)
    for (name, kind), rows in found.items():
        if name not in cards:
            raise UserError(f"measurements of accelerator {name!r}; {suggest(name, cards)}")
        figures, error = KINDS[kind](rows, model, cards[name])
        if "kv_read_share" in figures:
            _check_kv_share(figures["kv_read_share"], least_kv_share, cards[name])
        constants = constants.with_figures(name, Source.FITTED, **figures)
        constants = replace(constants, errors={**constants.errors, f"{name}.{kind}": error})
    return constants


def fit_file(measured: Measured, model: ModelShape) -> Constants:
    """Constants of every accelerator in a file, by the name that a cluster's file gives it."""
    constants = Constants()
    for name in dict.fromkeys(one.accelerator for one in measured.measurements):
        card, machine = measured.card(name), measured.machines.get(name)
        shape = model
        if machine is not None:
            shape = replace(model, bytes_per_weight=machine.bytes_per_weight, bytes_per_kv=machine.bytes_per_kv)
        own = [replace(one, accelerator=card.name) for one in measured.measurements if one.accelerator == name]
        least = 0.0 if machine is not None and machine.engine == EMBEDDED else MIN_KV_SHARE
        constants = fit(own, shape, {card.name: card}, constants, least)
    return constants


Fitted = tuple[dict[str, float], HeldOut]


def _fit_decode(rows: Rows, model: ModelShape, card: Accelerator) -> Fitted:
    def terms(rows: Rows, ridge: float) -> np.ndarray:
        """Overhead, matmuls at the memory's peak, and reading keys and values at it."""
        table = []
        for one in rows:
            read_s = touched_parameters(model, one.rows) * model.bytes_per_weight / (one.tp * card.memory_bytes_per_s)
            compute_s = 2 * active_matmul_parameters(model) * one.rows / (one.tp * card.flops)
            kv_bytes = one.rows * one.context * kv_bytes_per_token(model) / min(one.tp, model.num_kv_heads)
            table.append((1.0, max(compute_s / ridge, read_s), kv_bytes / card.memory_bytes_per_s))
        return np.array(table)

    folds = _folds(rows, "rows", card) + _folds(rows, "context", card)
    seconds = np.array([one.seconds for one in rows])
    if max(seconds) < FLAT * min(seconds) and (terms(rows, 1.0)[:, 1:].sum(axis=1) < seconds).all():
        return _fit_overhead(rows, terms, folds)
    solution = _solve(rows, terms, RIDGES, DECODE_FLOOR)
    overhead_s, matmul, kv = solution.weights
    read_share = _share(matmul, "weight_read_share", card)
    figures = {
        "step_overhead_s": float(overhead_s),
        "weight_read_share": read_share,
        "gemm_share": min(1.0, solution.ridge * read_share),  # at 1 no batch was large enough to be bound by compute
        "kv_read_share": _share(kv, "kv_read_share", card),
    }
    return figures, _held_out(folds, terms, RIDGES, DECODE_FLOOR)


def _fit_overhead(rows: Rows, terms: Terms, folds: Sequence[tuple[Rows, Rows]]) -> Fitted:
    """The overhead alone, whatever else a step does at the default shares: a host that is slower than its card hides
    what the card does, and nothing can be told of that."""
    usual = Figures()
    ridges = (usual.gemm_share / usual.weight_read_share,)
    floor = (0.0, 1 / usual.weight_read_share, 1 / usual.kv_read_share)
    solution = _solve(rows, terms, ridges, floor)
    return {"step_overhead_s": float(solution.weights[0])}, _held_out(folds, terms, ridges, floor)


def _fit_prefill(rows: Rows, model: ModelShape, card: Accelerator) -> Fitted:
    def terms(rows: Rows, _: float) -> np.ndarray:
        flop = [prefill_flop(model, one.tokens, one.sum_square_tokens) / one.tp for one in rows]
        return np.array([(1.0, one / card.flops) for one in flop])

    folds = _folds(rows, "tokens", card)
    _, slope = _solve(rows, terms).weights
    return {"prefill_share": _below_peak(_share(slope, "prefill_share", card), "prefill", card)}, _held_out(
        folds, terms
    )


def _fit_train(rows: Rows, model: ModelShape, card: Accelerator) -> Fitted:
    def terms(rows: Rows, _: float) -> np.ndarray:
        attention = 2 * model.num_layers * model.num_heads * model.head_dim
        flop = [
            (3 + one.num_forwards)
            * (2 * active_matmul_parameters(model) * one.tokens + attention * one.sum_square_tokens)
            for one in rows
        ]
        return np.array([[one / (row.num_accelerators * card.flops)] for one, row in zip(flop, rows, strict=True)])

    def size(one: Measurement) -> float:
        return one.tokens if is_one_gang else one.num_accelerators

    is_one_gang = len({one.num_accelerators for one in rows}) == 1
    largest = max(map(size, rows))
    smaller = [one for one in rows if size(one) < largest]
    if not smaller:
        raise UserError(
            f"train on {card.name}: one gang and one number of tokens, {largest:g}: at least two are wanted of either, "
            "so that one can be held out"
        )
    folds = [(smaller, [one for one in rows if size(one) == largest])]
    (slope,) = _solve(rows, terms).weights
    return {"training_share": _below_peak(_share(slope, "training_share", card), "train", card)}, _held_out(
        folds, terms
    )


def _fit_link(rows: Rows, model: ModelShape, card: Accelerator) -> Fitted:
    def terms(rows: Rows, _: float) -> np.ndarray:
        sent = [2 * (one.num_accelerators - 1) / one.num_accelerators * one.num_bytes for one in rows]
        return np.array([(1.0, one / card.link_bytes_per_s) for one in sent])

    if not card.link_bytes_per_s:
        raise UserError(f"link on {card.name}: no link_gb_s is told for this machine, so there is no peak")
    folds = _folds(rows, "num_bytes", card)
    latency_s, slope = _solve(rows, terms).weights
    share = _below_peak(_share(slope, "link_share", card), "link", card)
    return {"link_share": share, "allreduce_latency_s": float(latency_s)}, _held_out(folds, terms)


KINDS: dict[str, Callable[[Rows, ModelShape, Accelerator], Fitted]] = {
    "decode": _fit_decode,
    "prefill": _fit_prefill,
    "train": _fit_train,
    "link": _fit_link,
}


def _solve(rows: Rows, terms: Terms, ridges: Iterable[float] = (1.0,), floor: Sequence[float] = ()) -> Solution:
    """Each equation is divided by what was measured, so that errors count in proportion; `floor` has the least that
    each weight may be, 0 where it is empty."""
    seconds = np.array([one.seconds for one in rows])
    found = []
    for ridge in ridges:
        table = terms(rows, ridge) / seconds[:, None]
        least = np.array(floor if floor else [0.0] * table.shape[1])
        weights, residual = nnls(table, 1 - table @ least)
        found.append(Solution(weights + least, float(ridge), float(residual / np.sqrt(len(rows)))))
    return min(found, key=lambda solution: solution.error)


def _folds(rows: Rows, name: str, card: Accelerator) -> list[tuple[Rows, Rows]]:
    """What remains and what is left out, for every value of a field."""
    values = sorted({getattr(one, name) for one in rows})
    if len(values) < 3:
        raise UserError(
            f"{rows[0].kind} on {card.name}: {len(values)} different {name} measured: at least 3 are wanted, "
            "so that one can be held out"
        )
    return [
        ([one for one in rows if getattr(one, name) != value], [one for one in rows if getattr(one, name) == value])
        for value in values
    ]


def _held_out(
    folds: Sequence[tuple[Rows, Rows]], terms: Terms, ridges: Iterable[float] = (1.0,), floor: Sequence[float] = ()
) -> HeldOut:
    errors: list[float] = []
    for kept, left_out in folds:
        solution = _solve(kept, terms, ridges, floor)
        predicted = terms(left_out, solution.ridge) @ solution.weights
        errors += [abs(guess / one.seconds - 1) for guess, one in zip(predicted, left_out, strict=True)]
    return HeldOut(float(np.mean(errors)), float(np.quantile(errors, 0.95)), float(max(errors)), len(errors))


def _check_kv_share(share: float, least: float, card: Accelerator) -> None:
    if not least <= share <= MAX_KV_SHARE:
        raise UserError(
            f"decode on {card.name}: reading keys and values at {share:.2f} of the memory's bandwidth: allowed "
            f"{least:g} to {MAX_KV_SHARE:g}; were answers preempted, or is this another model's shape?"
        )


def _share(slope: float, name: str, card: Accelerator) -> float:
    """Of the peak: seconds at the peak over seconds measured."""
    if not slope > 0:
        raise UserError(f"measurements on {card.name} do not tell {name}: vary what it depends on over a wider range")
    return float(1 / slope)


def _below_peak(share: float, kind: str, card: Accelerator) -> float:
    if share > MAX_SHARE:
        raise UserError(
            f"{kind} on {card.name}: {share:.2f} of the card's peak: allowed up to {MAX_SHARE:g}; "
            "is it another card, or another model's shape?"
        )
    return min(1.0, share)
