"""Writes rows that were given from Python to a file of JSON lines, which a task then reads.

So a resumed run or a later evaluation sees the same rows. Rows may come from a list, a Hugging Face dataset, a pandas
data frame or a generator. They are read once, in order, and are not held in memory together.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from offbeat.data.prompts import plain, prompt_messages, prompt_text
from offbeat.errors import UserError
from offbeat.spelling import a_kind, nearest

MAX_ROWS = 5_000_000
"""Limit on the number of rows, to detect endless iterables. It takes about two minutes to reach."""


def record(rows: Any, file: Path, task: Mapping[str, Any], label: str) -> dict[str, Any]:
    """Writes `rows` to `file` and returns the settings of a task that reads them: those in `task`, such as names of
    columns, with source and path added. `label` names the rows in errors."""
    if hasattr(rows, "iterrows") and hasattr(rows, "to_dict"):  # a pandas data frame
        rows = rows.to_dict("records")
    if isinstance(rows, Mapping):
        raise UserError(
            f"{label}: is a dict with the keys {', '.join(map(str, rows))}; give one of its splits, or a list"
        )
    if isinstance(rows, str) or not isinstance(rows, Iterable):
        raise UserError(f"{label}: {rows!r:.60} is {a_kind(rows)}; give a list of dicts or another iterable")
    settings = {**task, "source": "file", "path": str(file)}
    num_rows = 0
    with file.open("wb") as out:
        for num_rows, row in enumerate(rows, start=1):
            if num_rows > MAX_ROWS:
                raise UserError(
                    f"{label}: more than {MAX_ROWS:,} rows; for endless prompts give a function of (ordinal, seed), or "
                    "cut them with itertools.islice"
                )
            if num_rows == 1 and isinstance(row, Mapping):
                settings |= _messages(row, settings)
            out.write(msgspec.json.encode(_checked(row, settings, f"{label}: row {num_rows}")) + b"\n")
    if not num_rows:
        raise UserError(f"{label}: has no rows; give at least one, with a prompt to train on")
    return settings


def _messages(row: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the setting `messages` with the name of the prompt's column if `row`, the first row, has a list as its
    prompt and `settings` lacks `messages`. Otherwise returns an empty dict."""
    column = settings.get("prompt", "prompt")
    return {"messages": column} if "messages" not in settings and isinstance(row.get(column), list) else {}


def _checked(row: Any, settings: Mapping[str, Any], place: str) -> dict[str, Any]:
    if not isinstance(row, Mapping):
        raise UserError(f"{place} is {row!r:.60}, {a_kind(row)}; give a dict with a prompt")
    column = settings.get("messages") or settings.get("prompt", "prompt")
    if column not in row:
        names = [str(name) for name in row]
        near = nearest(column, names)
        hint = f"did you mean {near!r}?" if near else f"it has {', '.join(names)}"
        if not settings.keys() & {"messages", "prompt"} and names:  # it is only the default's name
            hint += f'; name the column of the prompts, as in task={{"rows": rows, "prompt": "{near or names[0]}"}}'
        raise UserError(f"{place} has no column {column!r}; {hint}")
    values = {str(key): plain(_python(value)) for key, value in row.items()}
    check = prompt_messages if "messages" in settings else prompt_text
    check(values[column], f"{place}: {column}")
    return values


def _python(value: Any) -> Any:
    """Converts numpy's scalars and arrays to Python's values, at any depth."""
    if isinstance(value, Mapping):
        return {key: _python(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_python(inner) for inner in value]
    return value.tolist() if hasattr(value, "tolist") and hasattr(value, "dtype") else value
