"""Reads metrics back: the history that survived, with one row per step.

A row's `step` counts finished steps: row 3 tells of the third step and of the weights that came of it; row 0, if there
is one, of an evaluation before training.

`metrics.jsonl` forgets nothing: after a resume from an older checkpoint the steps that are trained again are written
again, under a higher `attempt`. What counts is the latest attempt at each step; `survivors` drops what it undid.

A line that is no row, such as one that a broken disk or another program has left, is skipped and told once.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

Row = dict[str, Any]

FIGURES = ("reward", "seconds", "samples", "tokens", "eval_")
"""How the figures begin that a run's summary and its picture are made of."""
_told: set[tuple[Path, int]] = set()
"""Lines that were told of: a file is read more than once, and a line of it never changes."""


def read_metrics(path: Path) -> list[Row]:
    """The surviving rows of a metrics file, by step; none if there is no file."""
    return survivors(read_rows(path, _metrics_trouble))


def read_events(path: Path) -> list[Row]:
    """The rows of an events file, in their order; none if there is no file."""
    return read_rows(path, _event_trouble)


def read_rows(path: Path, trouble: Callable[[Row], str | None]) -> list[Row]:
    """The rows of a file of JSON lines; a line that is none, or in which there is `trouble`, is skipped with a word."""
    if not path.is_file():
        return []
    rows = []
    lines = path.read_bytes().split(b"\n")[:-1]  # what follows the last line break is half a line, still being written
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
            problem = trouble(row) if isinstance(row, dict) else "not a JSON object"
        except (ValueError, RecursionError):
            problem = "not JSON"
        if problem is None:
            rows.append(row)
        elif (path, number) not in _told:
            _told.add((path, number))
            print(f"warning: {path}: line {number} is skipped: {problem}", file=sys.stderr, flush=True)
    return rows


def _metrics_trouble(row: Row) -> str | None:
    if not _is_count(row.get("step")):
        return "it has no step"
    if not _is_count(row.get("attempt", 1)):
        return "its attempt is no number"
    for name, value in row.items():
        if name.startswith(FIGURES) and not isinstance(value, (int, float, type(None))):
            return f"its {name} is no number"
    return None


def _event_trouble(row: Row) -> str | None:
    if not isinstance(row.get("event"), str):
        return "it names no event"
    wrong = [name for name in ("attempt", "step") if name in row and not _is_count(row[name])]
    return f"its {wrong[0]} is no number" if wrong else None


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def survivors(rows: Iterable[Row]) -> list[Row]:
    """One row per step, in order, without what a later attempt went back behind.

    An attempt undoes everything from the first step that it trains; an evaluation may be told later than its step, in a
    row of its own, and undoes nothing.
    """
    kept: dict[int, Row] = {}
    begun: set[int] = set()
    for row in rows:
        attempt, step = row.get("attempt", 1), row["step"]
        if "reward" in row and attempt not in begun:
            begun.add(attempt)
            kept = {s: old for s, old in kept.items() if s < step or old.get("attempt", 1) >= attempt}
        kept[step] = {**kept.get(step, {}), **row}
    return [kept[step] for step in sorted(kept)]
