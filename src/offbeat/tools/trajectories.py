"""Reads the trajectories of a run as rows with texts, also while the run goes on. Does not load torch."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import numpy as np

from offbeat.config.explain import show
from offbeat.errors import UserError
from offbeat.extras import hidden, import_extra
from offbeat.launch.run_folder import LEDGER, stored_config
from offbeat.ledger.ledger import Ledger
from offbeat.ledger.reports import EVERYTHING, TrajectoryFilter, TrajectoryRow
from offbeat.trajectory import Trajectory

Decode = Callable[[np.ndarray], str]
"""Decodes token ids to text."""
ALL = 2**62
"""Limit that is larger than the number of trajectories of any run."""
ROW_FIELDS = (
    *("task", "step", "purpose", "source", "reward", "error", "num_tokens", "worker", "ended_by"),
    *("first_version", "last_version", "parts"),
)
"""Fields of `TrajectoryRow` that `read_trajectories` returns as they are."""


def read_trajectories(
    run: Path,
    *,
    purpose: Literal["train", "eval"] | None = None,
    step: int | None = None,
    source: str | None = None,
    worker: str | None = None,
    min_reward: float | None = None,
    max_reward: float | None = None,
    failed: bool | None = None,
    limit: int | None = None,
    newest_first: bool = True,
) -> list[dict[str, Any]]:
    """Returns the trajectories of a run that meet all conditions, at most `limit`, each as a dict.

    - `task` is the task's ID, as `offbeat show RUN ID` wants it.
    - `step` is the step that trains on the trajectory, from 1; None until then. For an evaluation, it is the number of
      steps trained before.
    - `error` is why the reward failed; None if it did not. The condition `failed` selects trajectories with an error
      (True) or without one (False).
    - `answer` is the correct answer, as the task gives it.
    - `prompt` is what the model was given, including the chat template.
    - `parts` are the parts of the reward by name, before weighting.
    - `response` is None if it was deleted to save space (`ledger.keep_bodies`).
    """
    if purpose not in (None, "train", "eval"):
        raise UserError(f'purpose = {show(purpose)}: must be "train", "eval", or None for both')
    which = TrajectoryFilter(purpose, step, source, worker, min_reward, max_reward, failed)
    decode = decoder(run)
    with open_ledger(run) as ledger:
        found = ledger.list_trajectories(ALL if limit is None else limit, "latest" if newest_first else "oldest", which)
        rows = []
        for row, (prompt, problem), trajectory in _with_content(ledger, found):
            rows.append(
                {
                    **{name: getattr(row, name) for name in ROW_FIELDS},
                    "prompt": decode(prompt),
                    "response": None if trajectory is None else decode(trajectory.tokens),
                    "answer": problem["answer"],
                }
            )
    return rows


def decoder(run: Path) -> Decode:
    """Returns a function that decodes tokens with the tokenizer of a run."""
    model = stored_config(run)["model"]
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # no warning about a missing torch
    with hidden("torch"):
        from offbeat.model.loading import load_tokenizer

        tokenizer = load_tokenizer(model.get("tokenizer") or model["path"])
    return lambda tokens: str(tokenizer.decode(tokens))


@contextmanager
def open_ledger(run: Path) -> Iterator[Ledger]:
    """Opens the ledger of a run for reading; if it is damaged, the error names it."""
    if not (run / LEDGER).is_file():
        raise UserError(f"{run} holds no ledger yet, because the run has not begun; try again once it has")
    with Ledger(run / LEDGER, read_only=True) as ledger, ledger.naming_damage():
        yield ledger


SLICE = 500
"""Number of trajectories that are read from the ledger at a time."""

Content = tuple[TrajectoryRow, tuple[np.ndarray, dict[str, Any]], Trajectory | None]
"""A trajectory's row; its prompt's tokens and problem; the trajectory itself, or None if its tokens were deleted."""


def _with_content(ledger: Ledger, rows: list[TrajectoryRow]) -> Iterator[Content]:
    for start in range(0, len(rows), SLICE):
        some = rows[start : start + SLICE]
        yield from zip(some, ledger.load_problems(some), ledger.load_trajectories(some), strict=True)


def write_parquet(ledger: Ledger, file: Path, decode: Decode, which: TrajectoryFilter = EVERYTHING) -> int:
    """Writes trajectories with texts, tokens, log-probs and versions to a Parquet file, oldest first; returns their
    number. The file appears only when it is complete."""
    pyarrow = import_extra("pyarrow", "data", "--parquet")
    parquet = import_extra("pyarrow.parquet", "data", "--parquet")
    schema = _schema(pyarrow)
    if not file.parent.is_dir():
        raise UserError(f"--parquet {file}: the folder {file.parent} does not exist; create it first")
    unfinished, count = file.with_name(file.name + ".new"), 0
    found = _with_content(ledger, ledger.list_trajectories(ALL, "oldest", which))
    try:
        with parquet.ParquetWriter(unfinished, schema) as writer:
            while rows := [_parquet_row(*content, decode) for content in itertools.islice(found, SLICE)]:
                writer.write_table(pyarrow.Table.from_pylist(rows, schema=schema))
                count += len(rows)
        unfinished.replace(file)
    except OSError as error:
        raise UserError(f"--parquet {file} cannot be written: {error}") from error
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
        **dict.fromkeys(("prompt", "answer", "response"), text),
        **dict.fromkeys(("prompt_tokens", "response_tokens"), pyarrow.list_(pyarrow.int32())),
        "logprobs": pyarrow.list_(pyarrow.float32()),
        "versions": pyarrow.list_(whole),
    }
    return pyarrow.schema(columns.items())


def _parquet_row(
    row: TrajectoryRow, given: tuple[np.ndarray, dict[str, Any]], found: Trajectory | None, decode: Decode
) -> dict[str, Any]:
    prompt, problem = given
    known = {
        **asdict(row),
        "accepted_at": int(row.accepted_at * 1e6),
        "prompt": decode(prompt),
        "prompt_tokens": prompt.tolist(),
        "answer": as_text(problem["answer"]),
    }
    if found is None:
        return known
    return known | {
        "response": decode(found.tokens),
        "response_tokens": found.tokens.tolist(),
        "logprobs": found.logprobs.tolist(),
        "versions": found.versions.tolist(),
    }


def as_text(value: Any) -> str | None:
    """Returns a problem's answer, or a prompt of messages, as text; None stays None."""
    return value if value is None or isinstance(value, str) else json.dumps(value, ensure_ascii=False)
