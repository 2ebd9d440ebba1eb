"""Accelerators by name, from the catalogue beside this module: figures of their makers, and where they come from.

A price there is a range over clouds; what a record carries is its geometric mean, which is as many times above the
lowest as below the highest.
"""

from __future__ import annotations

import functools
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

from offbeat.errors import UserError
from offbeat.plan.inputs.hardware import Accelerator
from offbeat.spelling import suggest

TERA, GIGA = 1e12, 1e9


@dataclass(frozen=True)
class Entry:
    """An accelerator and the range of its price, in $/h; None where none is public."""

    accelerator: Accelerator
    price_range: tuple[float, float] | None = None


def accelerator(name: str) -> Accelerator:
    """The accelerator of a name or of an alias; case, `_` and spaces do not matter."""
    return entry(name).accelerator


def entry(name: str) -> Entry:
    plain = _plain(name)
    found = _aliases().get(plain)
    if found is None:
        raise UserError(f"accelerator {name!r}: is not in the catalogue; {suggest(plain, _aliases())}")
    return _entries()[found]


def is_known(name: str) -> bool:
    return _plain(name) in _aliases()


def names() -> list[str]:
    """Every accelerator of the catalogue, without aliases."""
    return list(_entries())


def _plain(name: str) -> str:
    return name.strip().lower().replace("_", "-").replace(" ", "-")


@functools.cache
def _tables() -> Mapping[str, Mapping[str, Any]]:
    return tomllib.loads(resources.files("offbeat.plan.inputs").joinpath("catalogue.toml").read_text("utf-8"))


@functools.cache
def _entries() -> Mapping[str, Entry]:
    return {name: _entry(name, table) for name, table in _tables().items()}


@functools.cache
def _aliases() -> Mapping[str, str]:
    """What each name and alias stands for."""
    return {alias: name for name, table in _tables().items() for alias in (name, *table.get("aliases", ()))}


def _entry(name: str, table: Mapping[str, Any]) -> Entry:
    low, high = table.get("price", (None, None))
    card = Accelerator(
        name=name,
        flops=table["tflops"] * TERA,
        memory_bytes=table["memory_gb"] * GIGA,
        memory_bytes_per_s=table["bandwidth_tb_s"] * TERA,
        link_bytes_per_s=table["link_gb_s"] * GIGA,
        host_bytes_per_s=table["host_gb_s"] * GIGA,
        price_per_h=None if low is None else round(math.sqrt(low * high), 2),
        source=table["source"],
    )
    return Entry(card, None if low is None else (low, high))
