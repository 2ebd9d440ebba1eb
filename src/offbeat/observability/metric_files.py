"""Reads a run's files of JSON lines: metrics, without the rows that a resume undid, and events.

A row's `step` counts finished steps: the row of step 3 is about the third step and its weights. A row of step 0 is an
evaluation before training. After a resume from an older checkpoint, steps that are trained again are written again with
a higher `attempt`; `survivors` keeps the latest attempt at each step.

A line that is not a valid row, such as one left by a broken disk or another program, is skipped with one warning.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

Row = dict[str, Any]

FIGURES = ("reward", "seconds", "samples", "tokens", "eval_")
"""The values of all keys that begin with one of these prefixes must be numbers, because the summary and the plot use
them."""
_warned: set[tuple[Path, int]] = set()
"""Lines (file and line number) about which a warning was printed. Files are read more than once."""


def read_metrics(path: Path) -> list[Row]:
    """Returns the rows of a metrics file, one per step, without rows that a resume undid; empty without a file."""
    return survivors(read_rows(path, row_trouble))


def read_events(path: Path) -> list[Row]:
    """Returns the rows of an events file in the order of the file; empty if the file is missing."""
    return read_rows(path, _event_trouble)


def seconds_before(attempt: int, metrics: Path, events: Path) -> float:
    """Returns how many seconds the attempts before `attempt` took together, including steps that a resume undid. For a
    killed attempt, this is the time until its last event or the time of its steps, whichever is longer."""
    in_steps: Counter[int] = Counter()
    for row in read_rows(metrics, row_trouble):
        in_steps[row.get("attempt", 1)] += row.get("seconds") or 0
    took = dict(in_steps)
    for event in read_events(events):
        number = event.get("attempt", 1)
        took[number] = max(took.get(number, 0), event.get("seconds") or 0)
    return sum(seconds for number, seconds in took.items() if number < attempt)


def read_rows(path: Path, trouble: Callable[[Row], str | None]) -> list[Row]:
    """Returns the rows of a file of JSON lines. A line that is not a JSON object, or for which `trouble` returns a
    problem, is skipped with a warning."""
    if not path.is_file():
        return []
    rows = []
    lines = path.read_bytes().split(b"\n")[:-1]  # after the last newline: half a line, still being written
    for number, (row, problem) in enumerate(_parsed(lines, trouble), start=1):
        if row is not None:
            rows.append(row)
        elif (path, number) not in _warned:
            _warned.add((path, number))
            print(f"warning: {path}: line {number} is skipped: {problem}", file=sys.stderr, flush=True)
    return rows


MAX_READ_BYTES = 2 << 20
"""Most bytes that one call of `metrics_after` or `events_after` reads; a longer file takes several calls."""


def metrics_after(path: Path, offset: int) -> tuple[list[Row], int]:
    """Returns the next rows of a metrics file after byte `offset`, with those that a resume undid, and the offset to
    read on from. Lines that are no valid rows are skipped."""
    return _rows_after(path, offset, row_trouble)


def events_after(path: Path, offset: int) -> tuple[list[Row], int]:
    """Returns the next rows of an events file after byte `offset`, and the offset to read on from. Lines that are no
    valid rows are skipped."""
    return _rows_after(path, offset, _event_trouble)


def _rows_after(path: Path, offset: int, trouble: Callable[[Row], str | None]) -> tuple[list[Row], int]:
    if not path.is_file():
        return [], offset
    with open(path, "rb") as file:
        file.seek(offset)
        data = file.read(MAX_READ_BYTES)
    lines = data.split(b"\n")[:-1]
    offset += sum(len(line) + 1 for line in lines)
    return [row for row, _ in _parsed(lines, trouble) if row is not None], offset


def _parsed(lines: Iterable[bytes], trouble: Callable[[Row], str | None]) -> Iterator[tuple[Row | None, str]]:
    """Yields each line's row, or None and its problem."""
    for line in lines:
        try:
            row = json.loads(line)
            problem = trouble(row) if isinstance(row, dict) else "it is not a JSON object"
        except (ValueError, RecursionError):
            problem = "it is not JSON"
        yield (row, "") if problem is None else (None, problem)


def row_trouble(row: Row) -> str | None:
    """Returns what is wrong with a row of metrics; None if nothing is."""
    if not _is_count(row.get("step")):
        return f"its step is {row.get('step')!r}, not a whole number"
    if not _is_count(row.get("attempt", 1)):
        return f"its attempt is {row['attempt']!r}, not a whole number"
    for name, value in row.items():
        if name.startswith(FIGURES) and not isinstance(value, (int, float, type(None))):
            return f"its {name} is {value!r}, not a number"
    return None


def _event_trouble(row: Row) -> str | None:
    if not isinstance(row.get("event"), str):
        return f"its event is {row.get('event')!r}, not a name"
    wrong = [name for name in ("attempt", "step") if name in row and not _is_count(row[name])]
    if wrong:
        return f"its {wrong[0]} is {row[wrong[0]]!r}, not a whole number"
    seconds = row.get("seconds")
    return None if isinstance(seconds, (int, float, type(None))) else f"its seconds is {seconds!r}, not a number"


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def survivors(rows: Iterable[Row]) -> list[Row]:
    """Returns one row per step, sorted by step, without the rows that a later attempt (a resume of the run) undid.

    An attempt undoes the earlier attempts' rows of the first step that it trains and of all later steps. An evaluation
    may come after its step, in a separate row; it undoes nothing and is merged into the row of its step.
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
