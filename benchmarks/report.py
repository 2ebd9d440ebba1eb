"""The output of every benchmark: a table for people, then one line of JSON.

The JSON holds `bars`, a map from a name to `{value, target, holds, spread}`, the benchmark's raw figures, the commit,
and the machine's cores and accelerator. `holds` is false for a missed target, and null if the few repetitions of a
quick run lie too near the target to decide.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

REPOSITORY = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Bar:
    """A figure and the target that it should reach."""

    value: float
    target: float
    holds: bool | None
    spread: tuple[float, float]
    """Smallest and largest of the repetitions."""


@dataclass(frozen=True)
class Unmeasured:
    """A target without a figure, because this machine lacks something that the measurement needs."""

    target: float
    value: None = None
    holds: None = None
    spread: None = None


QUICK_FACTOR = 1.6
"""Factor by which all repetitions of a quick run must exceed or miss the target to decide. On busy cores, two quick
runs gave 9.2 and 5.8 for the same ratio."""


def at_least(target: float, values: Sequence[float], *, quick: bool) -> Bar:
    """Compares the median of repeated runs with a lower bound."""
    holds = bool(statistics.median(values) >= target)  # numpy's own are not JSON
    return _bar(target, values, _decided(target, values, holds, quick))


def at_most(target: float, values: Sequence[float], *, quick: bool) -> Bar:
    """Compares the median of repeated runs with an upper bound."""
    holds = bool(statistics.median(values) <= target)
    return _bar(target, values, _decided(target, values, holds, quick))


def _decided(target: float, values: Sequence[float], holds: bool, quick: bool) -> bool | None:
    clear = min(values) >= target * QUICK_FACTOR or max(values) <= target / QUICK_FACTOR
    return holds if clear or not quick else None


def _bar(target: float, values: Sequence[float], holds: bool | None) -> Bar:
    least, middle, most = (round(float(value), 3) for value in (min(values), statistics.median(values), max(values)))
    return Bar(middle, target, holds, (least, most))


def machine() -> dict[str, Any]:
    """Describes the machine and the commit that produced the figures."""
    return {
        "commit": _commit(),
        "cores": os.cpu_count(),
        "processor": _processor(),
        "accelerator": _accelerator(),
        "python": platform.python_version(),
    }


def show(
    name: str,
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    bars: Mapping[str, Bar | Unmeasured],
    **raw: Any,
) -> None:
    """Prints the table and the bars, then everything as one line of JSON."""
    console = Console()
    table = Table(title=name, title_justify="left")
    for column, title in enumerate(header):
        table.add_column(title, justify="left" if column == 0 else "right")
    for row in rows:
        table.add_row(*row)
    console.print(table)
    for bar_name, bar in bars.items():
        if isinstance(bar, Unmeasured):
            console.print(f"{bar_name}: not measured, target {bar.target:g}", highlight=False)
            continue
        verdict = {True: "holds", False: "missed", None: "undecided"}[bar.holds]
        low, high = bar.spread
        console.print(
            f"{bar_name}: {bar.value:g} ({low:g} to {high:g}), target {bar.target:g}: {verdict}", highlight=False
        )
    line = {"benchmark": name, **machine(), "bars": {key: asdict(bar) for key, bar in bars.items()}, **raw}
    print(json.dumps(line))


def say(name: str, text: str) -> None:
    """Prints a benchmark's progress on stderr."""
    print(f"{name}: {text}", file=sys.stderr, flush=True)


@contextmanager
def scratch(name: str) -> Iterator[Path]:
    """Makes a temporary folder on the repository's disk. `/tmp` may be memory, where writing and syncing cost
    nothing."""
    cache = REPOSITORY / ".cache"
    cache.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache, prefix=f"{name}-") as folder:
        yield Path(folder)


def _commit() -> str | None:
    """Returns the current commit, with a "+" if tracked files differ from it; None outside a checkout."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(REPOSITORY), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()

    try:
        return git("rev-parse", "--short=12", "HEAD") + ("+" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _accelerator() -> str | None:
    import torch

    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return "mps" if torch.backends.mps.is_available() else None
