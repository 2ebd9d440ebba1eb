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
    """Rows in the order of their steps, without those that a later attempt went back behind."""
    kept: list[Row] = []
    for row in rows:
        attempt, step = row.get("attempt", 1), row["step"]
        while kept and kept[-1].get("attempt", 1) < attempt and _is_undone(kept[-1], row):
            kept.pop()
        if kept and kept[-1]["step"] == step:
            kept[-1] = {**kept[-1], **row}  # one step told in two rows, such as an evaluation after it
        else:
            kept.append(row)
    return kept


def _is_undone(old: Row, new: Row) -> bool:
    """Whether a later attempt's row takes an earlier one's place: the step was trained again, or lies beyond it."""
    return old["step"] > new["step"] or (old["step"] == new["step"] and "reward" in new)
