"""Constants of the cost model, such as efficiencies and overheads, each with its source.

A constant is *fitted* (measured on that accelerator), from the *catalogue* (published for its kind) or a *default* (a
guess, right within a factor of about 1.5). `Constants.source` shows which numbers of a plan are guesses.
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


class FigureSource(StrEnum):
    FITTED = "fitted"
    CATALOGUE = "catalogue"
    DEFAULT = "default"


@dataclass(frozen=True)
class Efficiencies:
    """Constants of the cost model for one accelerator. Unless said otherwise, a share is relative to the accelerator's
    peak."""

    gemm_share: float = 0.65
    """Share of the peak FLOP/s that matmuls of a compute-bound decode step reach."""
    weight_read_share: float = 0.80
    """Share of the memory bandwidth that reading weights reaches."""
    kv_read_share: float = 0.70
    """Share of the memory bandwidth that reading keys and values reaches; these are scattered in pages."""
    prefill_share: float = 0.60
    """Share of the peak FLOP/s that prefill reaches."""
    link_share: float = 0.70
    """Share of a link's bandwidth that collectives reach."""
    allreduce_latency_s: float = 9e-6
    """Latency of an all-reduce inside a node."""
    step_overhead_s: float = 1.5e-3
    """Overhead of a decode step: launches, scheduling."""
    row_overhead_s: float = 2.5e-5
    """Overhead of a decode step for each running answer: sampling, log-probs, detokenizing on the host. vLLM on an H200
    took 12 ms for 256 answers of a 1.5B model, of which weights, keys and values explain 3."""
    busy_share: float = 0.90
    """Mean share of a replica's slots that hold a running answer."""
    training_share: float = 0.40
    """MFU (share of the peak FLOP/s) of a training step without its communication."""
    tp_exposed_share: float = 0.50
    """Share of the time of tensor-parallel collectives in training that arithmetic does not hide."""
    dp_exposed_share: float = 0.50
    """Share of the time of exchanging gradients and sharded weights that arithmetic does not hide."""
    memory_share: float = 0.88
    """Share of a card's memory that weights, caches and activations may use; the runtime takes the rest."""
    swap_s: float = 0.2
    """Time to switch an engine between two sets of weights in memory."""


NAMES = tuple(one.name for one in fields(Efficiencies))


@dataclass(frozen=True)
class HeldOut:
    """Relative errors of predictions for measurements that the fit had not seen."""

    mean: float
    p95: float
    worst: float
    num_points: int


@dataclass(frozen=True)
class Constants:
    """Constants of all accelerators: common values, and values of single accelerators that override them."""

    common: Efficiencies = Efficiencies()
    of_accelerator: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    sources: Mapping[str, str] = field(default_factory=dict)
    """Source of each constant, keyed by `constant` or `accelerator.constant`. Without an entry, a common value is a
    default, and a value of a single accelerator is from the catalogue."""
    errors: Mapping[str, HeldOut] = field(default_factory=dict)
    """Held-out errors, keyed by `accelerator.kind`, where kind is the kind of measurement."""

    def of(self, accelerator: str) -> Efficiencies:
        known = self.of_accelerator.get(accelerator)
        return replace(self.common, **known) if known else self.common

    def source(self, accelerator: str, name: str) -> str:
        """Source of the value of the constant `name` that applies to this accelerator."""
        if name in self.of_accelerator.get(accelerator, {}):
            return self.sources.get(f"{accelerator}.{name}", FigureSource.CATALOGUE)
        return self.sources.get(name, FigureSource.DEFAULT)

    def with_figures(self, accelerator: str, source: FigureSource, **figures: float) -> Constants:
        """Returns a copy in which `figures` replace constants of one accelerator."""
        known = {**self.of_accelerator.get(accelerator, {}), **figures}
        new = {f"{accelerator}.{name}": str(source) for name in figures}
        of_accelerator = {**self.of_accelerator, accelerator: known}
        return replace(self, of_accelerator=of_accelerator, sources={**self.sources, **new})


def save(constants: Constants, path: Path) -> None:
    """Writes a JSON file that `load` reads."""
    document = {
        "common": asdict(constants.common),
        "of_accelerator": {name: dict(known) for name, known in constants.of_accelerator.items()},
        "sources": dict.fromkeys(NAMES, str(FigureSource.DEFAULT)) | dict(constants.sources),
        "errors": {name: asdict(error) for name, error in constants.errors.items()},
    }
    write_atomic(path, (json.dumps(document, indent=2) + "\n").encode())


def load(path: Path) -> Constants:
    """Reads constants from a TOML or JSON file; constants that the file does not name keep their defaults."""
    try:
        text = path.read_text()
        document = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
    except OSError as error:
        remedy = "give a file of constants, such as offbeat calibrate writes"
        raise UserError(f"{path} cannot be read: {error.strerror}; {remedy}") from None
    except ValueError as error:
        raise UserError(f"{path} is not valid {'TOML' if path.suffix == '.toml' else 'JSON'}: {error}") from None
    if not isinstance(document, dict):
        kind = type(document).__name__
        raise UserError(f"{path} holds a {kind}, not a table of constants; take a file that offbeat calibrate wrote")
    common = _figures(path, "common", document.get("common", {}))
    tables = document.get("of_accelerator", {})
    known = {name: _figures(path, f"of_accelerator.{name}", table) for name, table in tables.items()}
    sources = dict.fromkeys(common, str(FigureSource.CATALOGUE)) | document.get("sources", {})
    errors = {name: HeldOut(**error) for name, error in document.get("errors", {}).items()}
    return Constants(replace(Efficiencies(), **common), known, sources, errors)


def _figures(path: Path, where: str, table: Any) -> dict[str, float]:
    if not isinstance(table, dict):
        raise UserError(f"{path}: {where} is {table!r}; it must be a table of constants")
    for name, value in table.items():
        if name not in NAMES:
            raise UserError(f"{path}: {where}.{name}: unknown constant; {suggest(name, NAMES)}")
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not _is_allowed(name, value):
            share = f"a share above 0, up to {_largest(name):g} (only tp_exposed_share and dp_exposed_share may be 0)"
            allowed = share if name.endswith("_share") else "a number of seconds, 0 or more"
            raise UserError(f"{path}: {where}.{name} is {value!r}; it must be {allowed}")
    return {name: float(value) for name, value in table.items()}


def _is_allowed(name: str, value: float) -> bool:
    if not name.endswith("_share"):
        return 0 <= value < float("inf")
    return (value > 0 or name.endswith("_exposed_share")) and 0 <= value <= _largest(name)


def _largest(name: str) -> float:
    """Largest allowed value of the constant `name`, which is a share. It is 2 for shares of the memory bandwidth,
    because a card may read faster than its catalogue entry says, and 1 for all other shares."""
    return 2.0 if name.endswith("_read_share") else 1.0
