"""Constants of the cost model from measurements, with the error on what the fit has not seen.

A file of measurements has one JSON object a line, with `kind` and the fields of `Measurement`. Every constant is the
non-negative least squares solution on relative errors. The held-out error leaves out whole batch sizes and whole
contexts (decode), whole lengths (prefill), whole sizes (link) or the largest gang (train), never single points: their
neighbours would give them away.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

import numpy as np
from scipy.optimize import nnls

from offbeat.errors import UserError
from offbeat.plan.cost.constants import Constants, HeldOut, Source
from offbeat.plan.cost.prefill import prefill_flop
from offbeat.plan.cost.sizes import touched_parameters
from offbeat.plan.hardware import Accelerator
from offbeat.plan.shapes import active_matmul_parameters, kv_bytes_per_token
from offbeat.plan.workload import ModelShape
from offbeat.spelling import suggest

RIDGES = np.geomspace(0.25, 4.0, 33)
"""e_F over e_W that are tried: where matmuls turn from reading weights to computing."""
DECODE_FLOOR = (0.0, 1.0, 0.0)
"""Weights are not read faster than at the peak. Below the ridge their reading and the overhead are both constant, and
noise alone would decide between them."""
MIN_KV_SHARE, MAX_KV_SHARE = 0.5, 2.0
"""Reads of keys and values outside of this tell of preempted answers or of a wrong shape, not of a slow card."""
MAX_SHARE = 1.1
"""What is faster than the card's peak by more has the wrong card or shape; less is clock boost and noise."""


@dataclass(frozen=True)
class Measurement:
    """Seconds of one thing that was timed; what its kind does not need stays 0."""

    kind: str
    accelerator: str
    seconds: float
    rows: float = 0
    """Of a decode step."""
    context: float = 0
    """Mean tokens of its rows."""
    tokens: float = 0
    """Prefilled or trained, in all."""
    sum_square_tokens: float = 0
    """Of the sequences that were prefilled or trained, the squares of their lengths."""
    num_bytes: float = 0
    """Of an all-reduce inside a node."""
    num_accelerators: int = 1
    """Of a training gang, or those that reduce."""
    num_forwards: float = 0
    """Of a training step, those besides the trained one, recomputing among them."""
    tp: int = 1


Rows = Sequence[Measurement]
Terms = Callable[[Rows, float], np.ndarray]
"""Columns whose non-negative sum is the seconds of each measurement; the number is a ridge, where there is one."""


@dataclass(frozen=True)
class Solution:
    weights: np.ndarray
    ridge: float
    error: float
    """Root of the mean squared relative error."""


def read(path: Path) -> list[Measurement]:
    """Measurements of a file, each checked."""
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; name a file of measurements") from None
    return [_measurement(f"{path}:{number}", line) for number, line in enumerate(lines, 1) if line.strip()]


def _measurement(where: str, line: str) -> Measurement:
    names = [one.name for one in fields(Measurement)]
    try:
        told = json.loads(line)
    except ValueError as error:
        raise UserError(f"{where}: not valid JSON: {error}") from None
    if not isinstance(told, dict):
        raise UserError(f"{where}: one JSON object a line is wanted")
    for name in told:
        if name not in names:
            raise UserError(f"{where}: unknown field {name!r}; {suggest(name, names)}")
    for name in ("kind", "accelerator", "seconds"):
        if name not in told:
            raise UserError(f"{where}: {name} is missing")
    if told["kind"] not in KINDS:
        raise UserError(f"{where}: kind = {told['kind']!r}; {suggest(str(told['kind']), KINDS)}")
    for name, value in told.items():
        if name not in ("kind", "accelerator") and (not isinstance(value, int | float) or not 0 <= value < 1e30):
            raise UserError(f"{where}: {name} = {value!r}: allowed numbers of 0 or more")
    if not told["seconds"] > 0:
        raise UserError(f"{where}: seconds = {told['seconds']!r}: allowed numbers above 0")
    return Measurement(**told)


def fit(
    measurements: Iterable[Measurement],
    model: ModelShape,
    cards: Mapping[str, Accelerator],
    base: Constants | None = None,
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
        constants = constants.with_figures(name, Source.FITTED, **figures)
        constants = replace(constants, errors={**constants.errors, f"{name}.{kind}": error})
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
    solution = _solve(rows, terms, RIDGES, DECODE_FLOOR)
    overhead_s, matmul, kv = solution.weights
    kv_share = _share(kv, "kv_read_share", card)
    if not MIN_KV_SHARE <= kv_share <= MAX_KV_SHARE:
        raise UserError(
            f"decode on {card.name}: reading keys and values at {kv_share:.2f} of the memory's bandwidth: allowed "
            f"{MIN_KV_SHARE:g} to {MAX_KV_SHARE:g}; were answers preempted, or is this another model's shape?"
        )
    read_share = _share(matmul, "weight_read_share", card)
    figures = {
        "step_overhead_s": float(overhead_s),
        "weight_read_share": read_share,
        "gemm_share": min(1.0, solution.ridge * read_share),  # at 1 no batch was large enough to be bound by compute
        "kv_read_share": kv_share,
    }
    return figures, _held_out(folds, terms, RIDGES, DECODE_FLOOR)


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

    largest = max(one.num_accelerators for one in rows)
    smaller = [one for one in rows if one.num_accelerators < largest]
    if not smaller:
        raise UserError(f"train on {card.name}: one size of gang, {largest}: at least two are wanted, to hold one out")
    folds = [(smaller, [one for one in rows if one.num_accelerators == largest])]
    (slope,) = _solve(rows, terms).weights
    return {"training_share": _below_peak(_share(slope, "training_share", card), "train", card)}, _held_out(
        folds, terms
    )


def _fit_link(rows: Rows, model: ModelShape, card: Accelerator) -> Fitted:
    def terms(rows: Rows, _: float) -> np.ndarray:
        sent = [2 * (one.num_accelerators - 1) / one.num_accelerators * one.num_bytes for one in rows]
        return np.array([(1.0, one / card.link_bytes_per_s) for one in sent])

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
