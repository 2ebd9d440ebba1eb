"""Reads metrics back: the history that survived, with one row per step.

A row's `step` counts finished steps: row 3 tells of the third step and of the weights that came of it; row 0, if there
is one, of an evaluation before training.

`metrics.jsonl` forgets nothing: after a resume from an older checkpoint the steps that are trained again are written
again, under a higher `attempt`. What counts is the latest attempt at each step; `survivors` drops what it undid.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def read_metrics(path: Path) -> list[Row]:
    """The surviving rows of a metrics file, by step; none if there is no file."""
    if not path.is_file():
        return []
    lines = path.read_bytes().split(b"\n")[:-1]  # what follows the last line break is half a line, still being written
    return survivors(json.loads(line) for line in lines)


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
