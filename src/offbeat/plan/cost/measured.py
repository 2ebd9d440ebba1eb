"""A file of measurements: one JSON object a line, each checked, each mistake told with its line.

A line is something that was timed, with `kind` and the fields of `Measurement`; or, with kind `machine`, what it was
timed on. Accelerators of the catalogue need no such line.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from offbeat.errors import UserError
from offbeat.files import write_atomic
from offbeat.plan.inputs import catalogue
from offbeat.plan.inputs.hardware import Accelerator
from offbeat.spelling import suggest

TIMED = ("decode", "prefill", "train", "link")
MACHINE = "machine"
EMBEDDED = "embedded"
"""The engine that `offbeat calibrate --measure` steps."""
TEXTS = ("kind", "accelerator", "engine", "model", "date")
TERA, GIGA = 1e12, 1e9
MOST = 1e30
"""Beyond it a number is no measurement, infinity among them."""


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


DEFAULTS = {one.name: one.default for one in fields(Measurement)}


@dataclass(frozen=True)
class Machine:
    """What was measured, and with what."""

    accelerator: str
    tflops: float
    memory_gb: float
    bandwidth_tb_s: float
    link_gb_s: float = 0
    """0 where it is not known."""
    bytes_per_weight: int = 2
    bytes_per_kv: int = 2
    engine: str = ""
    model: str = ""
    date: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Measured:
    machines: Mapping[str, Machine]
    """By accelerator."""
    measurements: Sequence[Measurement]

    def card(self, name: str) -> Accelerator:
        """As the file tells it, else as the catalogue does."""
        machine = self.machines.get(name)
        if machine is None:
            return catalogue.accelerator(name)
        return Accelerator(
            name,
            flops=machine.tflops * TERA,
            memory_bytes=machine.memory_gb * GIGA,
            memory_bytes_per_s=machine.bandwidth_tb_s * TERA,
            link_bytes_per_s=machine.link_gb_s * GIGA,
            host_bytes_per_s=0.0,  # nothing that is fitted depends on it
        )


def write(path: Path, machine: Machine, measurements: Sequence[Measurement]) -> None:
    """A file that `read` reads back; what a kind does not need is left out."""
    lines = [{"kind": MACHINE, **asdict(machine)}]
    lines += [
        {name: value for name, value in asdict(one).items() if value != DEFAULTS.get(name)} for one in measurements
    ]
    write_atomic(path, "".join(json.dumps(line) + "\n" for line in lines).encode())


def read(path: Path) -> Measured:
    """What a file holds; of several lines about one machine the last counts."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; name a file of measurements") from None
    except UnicodeDecodeError:
        raise UserError(f"{path}: is no text; name a file of measurements") from None
    machines: dict[str, Machine] = {}
    measurements: list[Measurement] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        told = _checked(f"{path}:{number}", line)
        if told["kind"] == MACHINE:
            del told["kind"]
            machines[told["accelerator"]] = Machine(**told)
        else:
            measurements.append(Measurement(**told))
    if not measurements:
        raise UserError(f"{path}: holds no measurement; offbeat calibrate --measure makes some")
    return Measured(machines, measurements)


def _checked(where: str, line: str) -> dict[str, Any]:
    try:
        told = json.loads(line)
    except ValueError as error:
        raise UserError(f"{where}: not valid JSON: {error}") from None
    if not isinstance(told, dict):
        raise UserError(f"{where}: one JSON object a line is wanted")
    if "kind" not in told:
        raise UserError(f"{where}: kind is missing")
    if told["kind"] not in (*TIMED, MACHINE):
        raise UserError(f"{where}: kind = {told['kind']!r}; {suggest(str(told['kind']), (*TIMED, MACHINE))}")
    record, positive = (
        (Machine, ("tflops", "memory_gb", "bandwidth_tb_s")) if told["kind"] == MACHINE else (Measurement, ("seconds",))
    )
    names = ["kind", *(one.name for one in fields(record) if one.name != "kind")]
    for name in told:
        if name not in names:
            raise UserError(f"{where}: unknown field {name!r}; {suggest(name, names)}")
    for name in ("accelerator", *positive):
        if name not in told:
            raise UserError(f"{where}: {name} is missing")
    for name, value in told.items():
        _check(where, name, value, is_positive=name in positive)
    return told


def _check(where: str, name: str, value: Any, is_positive: bool) -> None:
    if name == "versions":
        is_right, wanted = isinstance(value, dict), "a table"
    elif name in TEXTS:
        is_right, wanted = isinstance(value, str), "text"
    else:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        is_right = is_number and (value > 0 if is_positive else value >= 0) and value < MOST
        wanted = "numbers above 0" if is_positive else "numbers of 0 or more"
    if not is_right:
        raise UserError(f"{where}: {name} = {value!r}: allowed {wanted}")
