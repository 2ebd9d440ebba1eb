"""`offbeat calibrate`: measures this machine or a running server, or fits the planner's constants to such a file."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from offbeat.cli.parser import Parser
from offbeat.errors import UserError

if TYPE_CHECKING:
    from offbeat.planner.cost.constants import Constants
    from offbeat.planner.inputs.workload import ModelShape

SERVER_ALONE = ("tp", "rows", "contexts")
PACKAGES = ("offbeat", "torch", "transformers")
MEASURING_ALONE = ("quick", "accelerator", "tflops", "memory_gb", "bandwidth_tb_s")


def add_arguments(parser: Parser) -> None:
    parser.add_argument("measurements", nargs="?", metavar="MEASUREMENTS.jsonl", help="what to fit the constants to")
    parser.add_argument("--measure", action="store_true", help="measure this machine instead")
    parser.add_argument(
        "--engine", metavar="URL", help="measure a running server with OpenAI's API instead, such as vLLM's"
    )
    parser.add_argument("--tp", type=int, metavar="N", help="accelerators of the server's replica (default: 1)")
    parser.add_argument("--rows", metavar="N,N,...", help="numbers of answers at once to measure the server with")
    parser.add_argument("--contexts", metavar="N,N,...", help="contexts in tokens to measure the server with")
    parser.add_argument("--model", metavar="MODEL", required=True, help="the measured model: a name, config or folder")
    parser.add_argument("--out", metavar="FILE", required=True, help="file to write constants or measurements to")
    parser.add_argument("--quick", action="store_true", help="measure few sizes, in seconds")
    parser.add_argument("--accelerator", metavar="NAME", help="name of this GPU; without it, the name torch reports")
    parser.add_argument("--tflops", type=float, help="dense peak in TFLOP/s; without it, looked up or measured")
    parser.add_argument("--memory-gb", type=float, help="memory in GB; without it, looked up or measured")
    parser.add_argument(
        "--bandwidth-tb-s", type=float, help="memory bandwidth in TB/s; without it, looked up or measured"
    )
    parser.epilog = "The constants are for offbeat plan --constants."


def run(arguments: argparse.Namespace, overrides: list[str]) -> int:
    _check_words(arguments)
    if arguments.measure:
        return _measure(arguments)
    if arguments.engine:
        return _measure_server(arguments)
    from offbeat.planner.cost.calibrate import fit_file, read
    from offbeat.planner.cost.constants import save

    measured = read(Path(arguments.measurements))
    constants = fit_file(measured, _shape(arguments.model))
    _write(arguments.out, lambda out: save(constants, out))
    for name in constants.of_accelerator:
        print(_summary(constants, name))
    print(f"{arguments.out}: the constants, for offbeat plan --constants {arguments.out}")
    return 0


def _check_words(arguments: argparse.Namespace) -> None:
    if arguments.measure and arguments.engine:
        raise UserError(
            "give either --measure or --engine, not both; the first measures this machine, without a server"
        )
    is_measuring = bool(arguments.measure or arguments.engine)
    if is_measuring and arguments.measurements:
        word = "--measure" if arguments.measure else "--engine"
        raise UserError(f"give either the file {arguments.measurements} or {word}, not both")
    if not is_measuring and not arguments.measurements:
        raise UserError(
            "offbeat calibrate needs a file of measurements, --measure to measure this machine, or --engine to measure "
            "a server"
        )
    for name in SERVER_ALONE:
        if getattr(arguments, name) is not None and not arguments.engine:
            raise UserError(f"--{name} goes only with --engine")
    if arguments.tp is not None and arguments.tp < 1:
        raise UserError(f"--tp is {arguments.tp}; it must be 1 or more")
    if arguments.engine and not arguments.accelerator:
        raise UserError("--engine needs --accelerator, the name of the card on which the server runs, such as h200")
    for name in MEASURING_ALONE:
        value, word = getattr(arguments, name), f"--{name.replace('_', '-')}"
        if value and not is_measuring:
            raise UserError(
                f"{word} goes only with --measure or --engine; a file of measurements already describes its machine"
            )
        if isinstance(value, float) and not 0 < value < float("inf"):
            raise UserError(f"{word} is {value:g}; it must be a finite number above 0")
    if not Path(arguments.out).parent.is_dir():
        raise UserError(f"--out {arguments.out}: the folder {Path(arguments.out).parent} does not exist; create it")
    if Path(arguments.out).is_dir():
        raise UserError(f"--out {arguments.out} is a folder; give a file to write")


def _shape(model: str) -> ModelShape:
    """Returns the shape of a model, given as a known name, a config.json or a folder."""
    from offbeat.model.loading import TINY, TINY_FOLDER
    from offbeat.planner.inputs.model_shapes import known_model, read_config

    if model == TINY:
        return dataclasses.replace(read_config(TINY_FOLDER), name=TINY)
    if Path(model).exists() or model.endswith(".json"):
        return read_config(model)
    try:
        return known_model(model)
    except UserError as error:
        raise UserError(f"--model {error}") from None


def _measure(arguments: argparse.Namespace) -> int:
    from offbeat.model.devices import pick_device, pick_dtype
    from offbeat.model.loading import resolve
    from offbeat.planner.cost.calibrate import EMBEDDED, MeasuredMachine, write
    from offbeat.planner.inputs.model_shapes import read_config
    from offbeat.tools.measure import CPU_SIZES, FIGURES, GPU, QUICK, figures_of, measure

    device = pick_device()
    dtype = pick_dtype("auto", device)
    shape = dataclasses.replace(
        read_config(resolve(arguments.model)), bytes_per_weight=dtype.itemsize, bytes_per_kv=dtype.itemsize
    )
    given = {name: value for name in FIGURES if (value := getattr(arguments, name)) is not None}
    name, found = figures_of(device, arguments.accelerator, given)
    figures = {figure: float(f"{value:.4g}") for figure, value in found.items()}  # short, as in a cluster's file
    sizes = QUICK if arguments.quick else CPU_SIZES if device.type == "cpu" else GPU
    measurements = measure(arguments.model, shape, dtype, device, name, sizes)
    machine = MeasuredMachine(
        name,
        **figures,
        bytes_per_weight=dtype.itemsize,
        bytes_per_kv=dtype.itemsize,
        engine=EMBEDDED,
        model=arguments.model,
        date=datetime.now(UTC).date().isoformat(),
        versions=_versions(),
    )
    _write(arguments.out, lambda out: write(out, machine, measurements))
    print(f"{name}: {', '.join(f'{figure} = {value:g}' for figure, value in figures.items())}")
    kinds = Counter(one.kind for one in measurements)
    made = ", ".join(f"{num} {kind}" for kind, num in kinds.items())
    print(f"{arguments.out}: measurements of {arguments.model}: {made}")
    if "train" not in kinds:
        print("training did not fit into memory and was not measured, so its constants keep their defaults")
    return 0


def _measure_server(arguments: argparse.Namespace) -> int:
    from offbeat.planner.cost.calibrate import MeasuredMachine, write
    from offbeat.planner.inputs import hardware
    from offbeat.planner.inputs.hardware import GIGA, TERA
    from offbeat.tools.measure_server import CONTEXTS, QUICK_CONTEXTS, QUICK_ROWS, ROWS, measure_server

    shape, name = _shape(arguments.model), arguments.accelerator
    given = {figure: getattr(arguments, figure) for figure in ("tflops", "memory_gb", "bandwidth_tb_s")}
    if None in given.values():
        card = hardware.accelerator(name)  # an unknown name is refused with a remedy
        name = card.name
        listed = card.flops / TERA, card.memory_bytes / GIGA, card.memory_bytes_per_s / TERA
        given = {
            figure: float(f"{own:.4g}") if value is None else value
            for (figure, value), own in zip(given.items(), listed, strict=True)
        }
    rows = _numbers("--rows", arguments.rows) or (QUICK_ROWS if arguments.quick else ROWS)
    contexts = _numbers("--contexts", arguments.contexts) or (QUICK_CONTEXTS if arguments.quick else CONTEXTS)
    measurements = measure_server(arguments.engine, name, shape.vocab, arguments.tp or 1, rows, contexts)
    machine = MeasuredMachine(
        name,
        **given,
        bytes_per_weight=shape.bytes_per_weight,
        bytes_per_kv=shape.bytes_per_kv,
        engine="server",
        model=arguments.model,
        date=datetime.now(UTC).date().isoformat(),
        versions=_versions(),
    )
    _write(arguments.out, lambda out: write(out, machine, measurements))
    print(f"{arguments.out}: {len(measurements)} measurements of {arguments.model} on {name}; fit them with:")
    print(f"offbeat calibrate {arguments.out} --model {arguments.model} --out constants.json")
    return 0


def _numbers(word: str, given: str | None) -> tuple[int, ...]:
    """Returns the numbers of a list with commas, in rising order; empty if none were given."""
    if given is None:
        return ()
    parts = given.split(",")
    if not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
        raise UserError(f"{word} is {given!r}; it must be whole numbers above 0 with commas between, such as 1,16,64")
    return tuple(sorted({int(part) for part in parts}))


def _write(out: str, write: Callable[[Path], None]) -> None:
    try:
        write(Path(out))
    except OSError as error:
        raise UserError(f"--out {out} cannot be written: {error.strerror}; give another file") from None


def _versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "from a folder"
    return found


def _summary(constants: Constants, name: str) -> str:
    """Describes an accelerator's fitted constants, their errors on held-out measurements, and the constants that keep
    their defaults."""
    from offbeat.planner.cost.constants import NAMES, FigureSource

    figures = dataclasses.asdict(constants.of(name))
    fitted = [f"{one} {figures[one]:.3g}" for one in NAMES if constants.source(name, one) == FigureSource.FITTED]
    guessed = [f"{one} {figures[one]:.3g}" for one in NAMES if constants.source(name, one) == FigureSource.DEFAULT]
    lines = [f"{name}", f"  fitted    {', '.join(fitted)}"]
    for key, error in constants.errors.items():
        accelerator, _, kind = key.rpartition(".")
        if accelerator == name:
            far = f"{error.mean:.1%} on average (MAPE), {error.p95:.1%} at p95, {error.worst:.1%} at worst"
            lines.append(f"  held out  {kind}: off by {far}, of {error.num_points} predictions")
    lines.append(f"  default   {', '.join(guessed)}")
    return "\n".join(lines)
