"""What of a machine's peak is reached: efficiencies, overheads and exposed shares, each with its source.

A constant is *fitted* (measured on that accelerator), from the *catalogue* (published for its kind) or a *default* (a
guess that holds within a factor of about 1.5). A plan tells which of its numbers are guesses by `Constants.source`.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from offbeat.errors import UserError
from offbeat.files import write_atomic
from offbeat.spelling import suggest


class Source(StrEnum):
    FITTED = "fitted"
    CATALOGUE = "catalogue"
    DEFAULT = "default"


@dataclass(frozen=True)
class Figures:
    """The constants of one accelerator; shares are of its peak."""

    gemm_share: float = 0.65
    """e_F: of the FLOP/s, by the matmuls of a decode step that has rows enough."""
    weight_read_share: float = 0.80
    """e_W: of the memory's bandwidth, by reading weights."""
    kv_read_share: float = 0.70
    """e_A: the same by reading keys and values, which lie scattered in pages."""
    prefill_share: float = 0.60
    """e_P: of the FLOP/s, by prefill."""
    link_share: float = 0.70
    """e_N: of a link's bandwidth, by collectives."""
    allreduce_latency_s: float = 9e-6
    """alpha: of one all-reduce inside a node, however small."""
    step_overhead_s: float = 1.5e-3
    """o: of a decode step, whatever it computes: launches, sampling, scheduling."""
    busy_share: float = 0.90
    """Of the slots of a replica, those that hold a running answer on average."""
    training_share: float = 0.40
    """MFU of the arithmetic of a training step; its communication is modelled beside it."""
    tp_exposed_share: float = 0.50
    """Of the time of tensor-parallel collectives in training, what no arithmetic hides."""
    dp_exposed_share: float = 0.50
    """The same of gradients and sharded weights."""
    memory_share: float = 0.88
    """Of the memory, what weights, caches and activations may take; the rest is the runtime's."""
    swap_s: float = 0.2
    """From one set of weights that lies in memory to the next, between two steps."""


NAMES = tuple(one.name for one in fields(Figures))


@dataclass(frozen=True)
class HeldOut:
    """How far off predictions were for measurements that the fit had not seen, as shares of what was measured."""

    mean: float
    p95: float
    worst: float
    num_points: int


@dataclass(frozen=True)
class Constants:
    """Constants of all accelerators: the common ones, and what is known better of single ones."""

    common: Figures = Figures()
    of_accelerator: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    sources: Mapping[str, str] = field(default_factory=dict)
    """By `name`, or `accelerator.name`; what is not told is a default."""
    errors: Mapping[str, HeldOut] = field(default_factory=dict)
    """By `accelerator.kind` of measurement."""

    def of(self, accelerator: str) -> Figures:
        known = self.of_accelerator.get(accelerator)
        return replace(self.common, **known) if known else self.common

    def source(self, accelerator: str, name: str) -> str:
        """Where the constant that counts for this accelerator comes from."""
        if name in self.of_accelerator.get(accelerator, {}):
            return self.sources.get(f"{accelerator}.{name}", Source.CATALOGUE)
        return self.sources.get(name, Source.DEFAULT)

    def with_figures(self, accelerator: str, source: Source, **figures: float) -> Constants:
        """The same with constants of one accelerator replaced."""
        known = {**self.of_accelerator.get(accelerator, {}), **figures}
        told = {f"{accelerator}.{name}": str(source) for name in figures}
        return replace(
            self,
            of_accelerator={**self.of_accelerator, accelerator: known},
            sources={**self.sources, **told},
        )


def save(constants: Constants, path: Path) -> None:
    """Writes a file that `load` reads back."""
    document = {
        "common": asdict(constants.common),
        "of_accelerator": {name: dict(known) for name, known in constants.of_accelerator.items()},
        "sources": dict.fromkeys(NAMES, str(Source.DEFAULT)) | dict(constants.sources),
        "errors": {name: asdict(error) for name, error in constants.errors.items()},
    }
    write_atomic(path, (json.dumps(document, indent=2) + "\n").encode())


def load(path: Path) -> Constants:
    """Reads constants from TOML or JSON; what a file leaves out keeps its default."""
    try:
        text = path.read_text()
        document = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
    except OSError as error:
        raise UserError(
            f"{path}: {error.strerror}; name a file of constants, such as one that calibration wrote"
        ) from None
    except ValueError as error:
        raise UserError(f"{path}: not valid {'TOML' if path.suffix == '.toml' else 'JSON'}: {error}") from None
    if not isinstance(document, dict):
        raise UserError(f"{path}: a table with common, of_accelerator, sources or errors is wanted")
    common = _figures(path, "common", document.get("common", {}))
    known = {
        name: _figures(path, f"of_accelerator.{name}", table)
        for name, table in document.get("of_accelerator", {}).items()
    }
    told = dict.fromkeys(common, str(Source.CATALOGUE)) | document.get("sources", {})
    errors = {name: HeldOut(**error) for name, error in document.get("errors", {}).items()}
    return Constants(replace(Figures(), **common), known, told, errors)


def _figures(path: Path, where: str, table: Any) -> dict[str, float]:
    if not isinstance(table, dict):
        raise UserError(f"{path}: {where} = {table!r}: a table of constants is wanted")
    for name, value in table.items():
        if name not in NAMES:
            raise UserError(f"{path}: {where}.{name}: unknown constant; {suggest(name, NAMES)}")
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not _is_allowed(name, value):
            allowed = (
                f"a share above 0, up to {_largest(name):g}" if name.endswith("_share") else "seconds of 0 or more"
            )
            raise UserError(f"{path}: {where}.{name} = {value!r}: allowed {allowed}")
    return {name: float(value) for name, value in table.items()}


def _is_allowed(name: str, value: float) -> bool:
    if not name.endswith("_share"):
        return 0 <= value < float("inf")
    return (value > 0 or name.endswith("_exposed_share")) and 0 <= value <= _largest(name)


def _largest(name: str) -> float:
    """A measured card may read faster than its catalogue says; calibration trusts it up to twice."""
    return 2.0 if name.endswith("_read_share") else 1.0
