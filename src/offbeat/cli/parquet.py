"""Trajectories as a Parquet file, a slice at a time: whole when it appears under its name."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from offbeat.errors import UserError
from offbeat.extras import import_extra
from offbeat.ledger.ledger import Ledger
from offbeat.ledger.look import Row
from offbeat.trajectory import Trajectory

SLICE = 1000


def export(ledger: Ledger, file: Path, words: Callable[[np.ndarray], str], step: int | None) -> int:
    """Writes the trajectories of a step, or all; returns how many."""
    pyarrow = import_extra("pyarrow", "data", "--parquet")
    parquet = import_extra("pyarrow.parquet", "data", "--parquet")
    schema = _schema(pyarrow)
    if not file.parent.is_dir():
        raise UserError(f"--parquet {file}: no folder {file.parent}")
    unfinished, count = file.with_name(file.name + ".new"), 0
    trajectories = ledger.walk(step)
    try:
        with parquet.ParquetWriter(unfinished, schema) as writer:
            while rows := [_row(row, found, words) for row, found in itertools.islice(trajectories, SLICE)]:
                writer.write_table(pyarrow.Table.from_pylist(rows, schema=schema))
                count += len(rows)
        unfinished.replace(file)
    except OSError as error:
        raise UserError(f"--parquet {file}: cannot be written: {error}") from error
    finally:
        unfinished.unlink(missing_ok=True)
    return count


def _schema(pyarrow: Any) -> Any:
    whole, real, text = pyarrow.int64(), pyarrow.float64(), pyarrow.string()
    columns = {
        **dict.fromkeys(("seq", "task", "group", "ordinal", "member"), whole),
        **dict.fromkeys(("purpose", "source", "state"), text),
        "step": whole,
        "reward": real,
        "error": text,
        **dict.fromkeys(("num_tokens", "first_version", "last_version"), whole),
        **dict.fromkeys(("worker", "ended_by"), text),
        "accepted_at": pyarrow.timestamp("us", "UTC"),
        "is_pruned": pyarrow.bool_(),
        **dict.fromkeys(("prompt", "response"), text),
        **dict.fromkeys(("prompt_tokens", "response_tokens"), pyarrow.list_(pyarrow.int32())),
        "logprobs": pyarrow.list_(pyarrow.float32()),
        "versions": pyarrow.list_(whole),
    }
    return pyarrow.schema(columns.items())


def _row(row: Row, found: Trajectory | None, words: Callable[[np.ndarray], str]) -> dict[str, Any]:
    told = {**asdict(row), "accepted_at": int(row.accepted_at * 1e6)}
    if found is None:
        return told
    return told | {
        "prompt": words(found.prompt),
        "response": words(found.tokens),
        "prompt_tokens": found.prompt.tolist(),
        "response_tokens": found.tokens.tolist(),
        "logprobs": found.logprobs.tolist(),
        "versions": found.versions.tolist(),
    }
