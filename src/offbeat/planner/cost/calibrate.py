"""Fits the constants of the cost model to measurements, and computes the error on held-out measurements.

The fit is a non-negative least-squares fit of relative errors. To compute the error, all measurements of one size are
left out of a fit together, because a single one would be easy to predict from the others of its size. The size is the
batch size or the context (decode), the number of tokens (prefill), or the number of bytes (link). For training, the
largest gang is left out or, if all gangs have the same size, the largest number of tokens.

A file of measurements has one JSON object per line: `kind` and the fields of `Measurement`, or the kind `machine` and
the fields of `MeasuredMachine`. Accelerators of the catalogue need no `machine` line.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import nnls

from offbeat.errors import UserError
from offbeat.files import write_atomic
from offbeat.planner.cost.constants import Constants, Efficiencies, FigureSource, HeldOut
from offbeat.planner.cost.rollout_time import matmul_flops, prefill_flop
from offbeat.planner.cost.sizes import touched_parameters
from offbeat.planner.inputs import hardware
from offbeat.planner.inputs.hardware import GIGA, TERA, Accelerator
from offbeat.planner.inputs.model_shapes import active_matmul_parameters, kv_bytes_per_token
from offbeat.planner.inputs.workload import ModelShape
from offbeat.spelling import suggest

TIMED = ("decode", "prefill", "train", "link")
MACHINE = "machine"
EMBEDDED = "embedded"
"""Name of Offbeat's own engine, whose single decode steps `offbeat calibrate --measure` can time."""
TEXTS = ("kind", "accelerator", "engine", "model", "date")
MOST = 1e30
"""Upper limit of every number in a file of measurements, to exclude infinity."""


@dataclass(frozen=True)
class Measurement:
    """One measured time. `kind` is decode, prefill, train or link; fields that this kind does not need keep their
    defaults."""

    kind: str
    accelerator: str
    seconds: float
    rows: float = 0
    """Number of answers that a decode step extends by one token."""
    context: float = 0
    """Mean context of the answers of a decode step, in tokens."""
    tokens: float = 0
    """Number of tokens prefilled or trained."""
    sum_square_tokens: float = 0
    """Sum of the squared lengths of the sequences prefilled or trained."""
    num_bytes: float = 0
    """Size in bytes of an all-reduce inside a node."""
    num_accelerators: int = 1
    """Number of accelerators in a training gang or an all-reduce."""
    num_forwards: float = 0
    """Number of forward passes of a training step in addition to the one that precedes the backward pass; recomputing
    activations counts as one."""
    tp: int = 1


DEFAULTS = {one.name: one.default for one in fields(Measurement)}


@dataclass(frozen=True)
class MeasuredMachine:
    """The accelerator on which measurements were made, with the figures of its data sheet, and the software used."""

    accelerator: str
    tflops: float
    memory_gb: float
    bandwidth_tb_s: float
    link_gb_s: float = 0
    """Rate between two cards of a node; 0: unknown."""
    bytes_per_weight: int = 2
    bytes_per_kv: int = 2
    engine: str = ""
    model: str = ""
    date: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Measured:
    machines: Mapping[str, MeasuredMachine]
    """Machines by the name of their accelerator."""
    measurements: Sequence[Measurement]

    def card(self, name: str) -> Accelerator:
        """Accelerator as described by its `machine` line, or by the catalogue if there is no such line."""
        machine = self.machines.get(name)
        if machine is None:
            return hardware.accelerator(name)
        return Accelerator(
            name,
            flops=machine.tflops * TERA,
            memory_bytes=machine.memory_gb * GIGA,
            memory_bytes_per_s=machine.bandwidth_tb_s * TERA,
            link_bytes_per_s=machine.link_gb_s * GIGA,
            host_bytes_per_s=0.0,  # nothing that is fitted depends on it
        )


def write(path: Path, machine: MeasuredMachine, measurements: Sequence[Measurement]) -> None:
    """Writes a file that `read` reads; fields with default values are left out."""
    lines = [{"kind": MACHINE, **asdict(machine)}]
    for one in measurements:
        lines.append({name: value for name, value in asdict(one).items() if value != DEFAULTS.get(name)})
    write_atomic(path, "".join(json.dumps(line) + "\n" for line in lines).encode())


def read(path: Path) -> Measured:
    """Reads a file of measurements. The last of several lines about one machine counts."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}; give a file of measurements") from None
    except UnicodeDecodeError:
        raise UserError(f"{path} is not UTF-8 text; give a file of measurements, one JSON object per line") from None
    machines: dict[str, MeasuredMachine] = {}
    measurements: list[Measurement] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        values = _checked(f"{path}:{number}", line)
        if values["kind"] == MACHINE:
            del values["kind"]
            machines[values["accelerator"]] = MeasuredMachine(**values)
        else:
            measurements.append(Measurement(**values))
    if not measurements:
        raise UserError(f"{path} has no measurements; make some with offbeat calibrate --measure")
    return Measured(machines, measurements)


def _checked(where: str, line: str) -> dict[str, Any]:
    try:
        values = json.loads(line)
    except ValueError as error:
        raise UserError(f"{where}: the line is not valid JSON: {error}") from None
    if not isinstance(values, dict):
        raise UserError(f'{where}: the line is not a JSON object, such as {{"kind": "decode", ...}}')
    if "kind" not in values:
        raise UserError(f"{where}: the field kind is missing; allowed {', '.join((*TIMED, MACHINE))}")
    if values["kind"] not in (*TIMED, MACHINE):
        raise UserError(f"{where}: unknown kind {values['kind']!r}; {suggest(str(values['kind']), (*TIMED, MACHINE))}")
    is_machine = values["kind"] == MACHINE
    positive = ("tflops", "memory_gb", "bandwidth_tb_s") if is_machine else ("seconds",)
    known = fields(MeasuredMachine if is_machine else Measurement)
    names = ["kind", *(one.name for one in known if one.name != "kind")]
    for name in values:
        if name not in names:
            raise UserError(f"{where}: unknown field {name!r}; {suggest(name, names)}")
    for name in ("accelerator", *positive):
        if name not in values:
            raise UserError(f"{where}: the field {name} is missing; lines of kind {values['kind']} need it")
    for name, value in values.items():
        _check(where, name, value, is_positive=name in positive)
    return values


def _check(where: str, name: str, value: Any, is_positive: bool) -> None:
    if name == "versions":
        is_right, wanted = isinstance(value, dict), "a JSON object"
    elif name in TEXTS:
        is_right, wanted = isinstance(value, str), "text"
    else:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        is_right = is_number and (value > 0 if is_positive else value >= 0) and value < MOST
        wanted = "a finite number above 0" if is_positive else "a finite number, 0 or more"
    if not is_right:
        raise UserError(f"{where}: {name} is {value!r}; it must be {wanted}")


RIDGES = np.geomspace(0.25, 4.0, 33)
"""Ratios `gemm_share` / `weight_read_share` that the fit tries. The ratio determines from which batch size on matmuls
are compute-bound."""
DECODE_FLOOR = (0.0, 0.0, 1.0, 0.0)
"""Smallest allowed coefficients of the decode terms (overhead, rows, matmuls, KV reads). The 1 means that weights are
never read faster than the memory's peak. In small batches the time to read weights is as constant as the overhead, so
measurements alone cannot tell the two apart."""
LEAST_SIZES = 3
"""Smallest number of sizes of which one can be held out."""
MIN_KV_SHARE, MAX_KV_SHARE = 0.5, 2.0
"""Allowed range of the KV read share. A share outside the range means preempted answers or a wrong model shape, not a
slow card. The embedded engine never preempts while it is measured, so the lower limit does not apply to it."""
FLAT = 1.5
"""If the longest decode step takes less than this multiple of the shortest, a slow host may be limiting all of them."""
MAX_SHARE = 1.1
"""Largest accepted share of a card's peak. A larger share means a wrong card or model shape; a share from 1 to this
limit is due to clock boost and noise."""


Rows = Sequence[Measurement]
Terms = Callable[[Rows, float], np.ndarray]
"""Computes a row of terms for each measurement. A sum of these terms, each times a coefficient of 0 or more, predicts
the seconds. The second argument is a ratio of `RIDGES`, which only decode uses."""


@dataclass(frozen=True)
class FittedConstants:
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
    """Returns a copy of `base` (None: the defaults) in which the constants of each measured accelerator are fitted to
    its measurements, and which holds the held-out errors of the fits. `model` is the shape of the measured model, and
    `cards` holds the accelerators by name. `least_kv_share` is the lower limit of the KV read share."""
    constants = base or Constants()
    found: dict[tuple[str, str], list[Measurement]] = {}
    for one in measurements:
        found.setdefault((one.accelerator, one.kind), []).append(one)
    for (name, kind), rows in found.items():
        if name not in cards:
            raise UserError(f"the measurements name an unknown accelerator {name!r}; {suggest(name, cards)}")
        figures, error = KINDS[kind](rows, model, cards[name])
        if "kv_read_share" in figures:
            _check_kv_share(figures["kv_read_share"], least_kv_share, cards[name])
        constants = constants.with_figures(name, FigureSource.FITTED, **figures)
        constants = replace(constants, errors={**constants.errors, f"{name}.{kind}": error})
    return constants


def fit_file(measured: Measured, model: ModelShape) -> Constants:
    """Returns constants fitted to the measurements of every accelerator in a file. They are keyed by the name in the
    catalogue or, for an accelerator with a `machine` line, by the name in that line."""
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
        """Returns one row per measured decode step: 1 (for the overhead), rows, seconds of matmuls with weights read at
        the memory's peak, seconds of KV reads at that peak. `ridge` is the ratio `gemm_share` / `weight_read_share`."""
        table = []
        for one in rows:
            read_s = touched_parameters(model, one.rows) * model.bytes_per_weight / (one.tp * card.memory_bytes_per_s)
            compute_s = 2 * active_matmul_parameters(model) * one.rows / (one.tp * matmul_flops(model, card))
            kv_bytes = one.rows * one.context * kv_bytes_per_token(model) / min(one.tp, model.num_kv_heads)
            table.append((1.0, one.rows, max(compute_s / ridge, read_s), kv_bytes / card.memory_bytes_per_s))
        return np.array(table)

    folds = _folds(rows, "rows", card)
    has_contexts = len({one.context for one in rows}) >= LEAST_SIZES
    folds += _folds(rows, "context", card) if has_contexts else []
    seconds = np.array([one.seconds for one in rows])
    could_read = bool((terms(rows, 1.0)[:, 2:].sum(axis=1) < seconds).all())
    if max(seconds) < FLAT * min(seconds) and could_read:
        return _fit_overhead(rows, terms, folds)
    floor = DECODE_FLOOR
    solution = _solve(rows, terms, RIDGES, floor)
    # At one context, keys and values grow with the rows as the host's overhead does; and where the host is slow,
    # contexts may make no difference that shows. Then the share of reading them stays the default.
    has_contexts = has_contexts and not (solution.weights[3] == 0 and could_read)
    if not has_contexts:
        floor = (*DECODE_FLOOR[:3], 1 / Efficiencies().kv_read_share)
        solution = _solve(rows, terms, RIDGES, floor)
    kv_floor = floor[3]
    overhead_s, row_s, matmul, kv = solution.weights
    read_share = _share(matmul, "weight_read_share", card)
    figures = {
        "step_overhead_s": float(overhead_s),
        "row_overhead_s": float(row_s),
        "weight_read_share": read_share,
        "gemm_share": min(1.0, solution.ridge * read_share),  # 1 if no batch was large enough to be compute-bound
    }
    if has_contexts:
        figures["kv_read_share"] = _share(kv, "kv_read_share", card)
    else:
        each_s = [kv_s / one.rows for one, kv_s in zip(rows, terms(rows, 1.0)[:, 3], strict=True)]
        figures["row_overhead_s"] += float((kv - kv_floor) * np.mean(each_s))
    return figures, _held_out(folds, terms, RIDGES, floor)


def _fit_overhead(rows: Rows, terms: Terms, folds: Sequence[tuple[Rows, Rows]]) -> Fitted:
    """Fits only the overheads of a decode step and of its rows. Other constants keep their defaults, because a slow
    host hides the card's speed."""
    usual = Efficiencies()
    ridges = (usual.gemm_share / usual.weight_read_share,)
    floor = (0.0, 0.0, 1 / usual.weight_read_share, 1 / usual.kv_read_share)
    solution = _solve(rows, terms, ridges, floor)
    figures = {"step_overhead_s": float(solution.weights[0]), "row_overhead_s": float(solution.weights[1])}
    return figures, _held_out(folds, terms, ridges, floor)


def _fit_prefill(rows: Rows, model: ModelShape, card: Accelerator) -> Fitted:
    def terms(rows: Rows, _: float) -> np.ndarray:
        flop = [prefill_flop(model, one.tokens, one.sum_square_tokens) / one.tp for one in rows]
        return np.array([(1.0, one / matmul_flops(model, card)) for one in flop])

    folds = _folds(rows, "tokens", card)
    _, slope = _solve(rows, terms).weights
    share = _below_peak(_share(slope, "prefill_share", card), "prefill", card)
    return {"prefill_share": share}, _held_out(folds, terms)


def _fit_train(rows: Rows, model: ModelShape, card: Accelerator) -> Fitted:
    def terms(rows: Rows, _: float) -> np.ndarray:
        attention = 2 * model.num_layers * model.num_heads * model.head_dim
        table = []
        for one in rows:
            flop = 2 * active_matmul_parameters(model) * one.tokens + attention * one.sum_square_tokens
            table.append([(3 + one.num_forwards) * flop / (one.num_accelerators * card.flops)])
        return np.array(table)

    def size(one: Measurement) -> float:
        return one.tokens if is_one_gang else one.num_accelerators

    is_one_gang = len({one.num_accelerators for one in rows}) == 1
    largest = max(map(size, rows))
    smaller = [one for one in rows if size(one) < largest]
    if not smaller:
        why = "measure two or more sizes or numbers of tokens, so that one can be held out"
        raise UserError(
            f"train on {card.name}: all measured gangs have the same size and the same number of tokens; {why}"
        )
    folds = [(smaller, [one for one in rows if size(one) == largest])]
    (slope,) = _solve(rows, terms).weights
    share = _below_peak(_share(slope, "training_share", card), "train", card)
    return {"training_share": share}, _held_out(folds, terms)


def _fit_link(rows: Rows, model: ModelShape, card: Accelerator) -> Fitted:
    def terms(rows: Rows, _: float) -> np.ndarray:
        sent = [2 * (one.num_accelerators - 1) / one.num_accelerators * one.num_bytes for one in rows]
        return np.array([(1.0, one / card.link_bytes_per_s) for one in sent])

    if not card.link_bytes_per_s:
        raise UserError(f"link on {card.name}: link_gb_s is unknown; add it to the {MACHINE} line of this accelerator")
    folds = _folds(rows, "num_bytes", card)
    latency_s, slope = _solve(rows, terms).weights
    share = _below_peak(_share(slope, "link_share", card), "link", card)
    return {"link_share": share, "allreduce_latency_s": float(latency_s)}, _held_out(folds, terms)


KINDS: dict[str, Callable[[Rows, ModelShape, Accelerator], Fitted]]
KINDS = {"decode": _fit_decode, "prefill": _fit_prefill, "train": _fit_train, "link": _fit_link}


def _solve(rows: Rows, terms: Terms, ridges: Iterable[float] = (1.0,), floor: Sequence[float] = ()) -> FittedConstants:
    """Fits the coefficients of `terms` to the measured seconds by least relative error, once for each value of
    `ridges` (the ratios in `RIDGES`, of a roofline; this is no ridge regression), and returns the best fit. `floor`
    holds the smallest allowed coefficients; empty: all 0."""
    seconds = np.array([one.seconds for one in rows])
    found = []
    for ridge in ridges:
        table = terms(rows, ridge) / seconds[:, None]
        least = np.array(floor if floor else [0.0] * table.shape[1])
        weights, residual = nnls(table, 1 - table @ least)
        found.append(FittedConstants(weights + least, float(ridge), float(residual / np.sqrt(len(rows)))))
    return min(found, key=lambda solution: solution.error)


def _folds(rows: Rows, name: str, card: Accelerator) -> list[tuple[Rows, Rows]]:
    """Splits measurements to compute held-out errors. Returns one pair for each value of the field `name`:
    (measurements with other values, held-out measurements with this value). Raises a `UserError`, which names `card`,
    if there are fewer than 3 values."""
    values = sorted({getattr(one, name) for one in rows})
    if len(values) < LEAST_SIZES:
        why = f"measure 3 or more different values of {name}, not {len(values)}, so that one can be held out"
        raise UserError(f"{rows[0].kind} on {card.name}: {why}")
    at = attrgetter(name)
    return [([one for one in rows if at(one) != value], [one for one in rows if at(one) == value]) for value in values]


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
            f"decode on {card.name}: keys and values were read at {share:.2f} times the memory's bandwidth "
            f"(accepted: {least:g} to {MAX_KV_SHARE:g} times); check that --model is right and that no "
            "answers were preempted"
        )


def _share(slope: float, name: str, card: Accelerator) -> float:
    """Returns the fraction of a card's peak speed that was reached: 1 / `slope`, where `slope` is the measured time
    divided by the time at peak speed. `name` names the fitted constant in errors."""
    if not slope > 0:
        raise UserError(f"the measurements on {card.name} do not determine {name}; measure a wider range of sizes")
    return float(1 / slope)


def _below_peak(share: float, kind: str, card: Accelerator) -> float:
    if share > MAX_SHARE:
        raise UserError(
            f"{kind} on {card.name}: the measured speed is {share:.2f} times the peak (accepted up to {MAX_SHARE:g}); "
            f"check {'the given rate of the link' if kind == 'link' else 'the name of the accelerator and --model'}"
        )
    return min(1.0, share)
