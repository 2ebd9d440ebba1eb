"""`offbeat show`: prints a run's trajectories, one in full or several in a list, or writes them to a Parquet file."""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.text import Text

from offbeat.cli.parser import Parser
from offbeat.errors import UserError
from offbeat.extras import import_extra
from offbeat.ledger.errors import Unknown
from offbeat.ledger.ledger import Ledger
from offbeat.ledger.reports import TaskDetail, TokenRun, TrajectoryRow
from offbeat.trajectory import Segment, Trajectory

NUM_ROWS = 20


def add_arguments(parser: Parser) -> None:
    parser.add_argument("run", metavar="RUN", help="a run's folder")
    parser.add_argument("task", metavar="ID", nargs="?", type=int, help="a task: its answer and its history")
    parser.add_argument(
        "--last", metavar="N", type=int, help=f"the latest N trajectories (the default, with {NUM_ROWS})"
    )
    parser.add_argument("--best", metavar="N", type=int, help="the N of the highest reward")
    parser.add_argument("--worst", metavar="N", type=int, help="the N of the lowest reward")
    parser.add_argument("--step", metavar="N", type=int, help="only what was trained at this step")
    parser.add_argument("--tokens", action="store_true", help="with ID: token ids and log-probs, too")
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    parser.add_argument("--parquet", metavar="FILE", help="write all of it, with texts, to a Parquet file")


def run(arguments: argparse.Namespace, overrides: list[str]) -> int:
    folder = Path(arguments.run)
    order, limit = _chosen(arguments)
    words = _words(folder)
    if not (folder / "ledger.sqlite").is_file():
        raise UserError(f"{folder} holds no ledger yet, because the run has not begun; try again once it has")
    with Ledger(folder / "ledger.sqlite", read_only=True) as ledger, ledger.naming_damage():
        if arguments.parquet is not None:
            count = export(ledger, Path(arguments.parquet), words, arguments.step)
            print(f"{arguments.parquet}: {count} trajectories")
        elif arguments.task is not None:
            try:
                _show_one(ledger, arguments.task, words, arguments.tokens, arguments.json)
            except Unknown as error:
                raise UserError(f"{folder}: {error}") from error
        else:
            _show_list(ledger, order, limit, arguments.step, words, arguments.json)
    return 0


def _chosen(arguments: argparse.Namespace) -> tuple[str, int]:
    """Returns the list's order (latest, best or worst) and length; raises `UserError` for options that conflict."""
    given = {name: getattr(arguments, name) for name in ("last", "best", "worst")}
    asked = [name for name, value in given.items() if value is not None]
    lists = [f"--{name}" for name in asked] + (["--step"] if arguments.step is not None else [])
    if arguments.task is not None and (lists or arguments.parquet is not None):
        raise UserError(f"{(lists or ['--parquet'])[0]} and a task's ID do not go together; leave one of them out")
    if arguments.tokens and arguments.task is None:
        raise UserError("--tokens goes only with a task's ID, as in offbeat show RUN ID --tokens")
    if arguments.parquet is not None and (asked or arguments.json):
        raise UserError(f"--{(asked or ['json'])[0]} and --parquet do not go together; only --step can narrow a file")
    if len(asked) > 1:
        raise UserError(f"--{asked[0]} and --{asked[1]} do not go together; give one of --last, --best and --worst")
    name = asked[0] if asked else "last"
    count = given[name] if asked else NUM_ROWS
    if count < 1:
        raise UserError(f"--{name} is {count}; it must be at least 1")
    return "latest" if name == "last" else name, count


def _words(folder: Path) -> Words:
    """Returns a function that decodes tokens with the run's tokenizer, loaded without torch."""
    from offbeat.extras import hidden
    from offbeat.launch.run_folder import stored_config

    model = stored_config(folder)["model"]
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # no warning about a missing torch
    with hidden("torch"):
        from offbeat.model.loading import load_tokenizer

        tokenizer = load_tokenizer(model.get("tokenizer") or model["path"])
    return lambda tokens: str(tokenizer.decode(tokens))


def _show_list(ledger: Ledger, order: str, limit: int, step: int | None, words: Words, as_json: bool) -> None:
    rows = ledger.list_trajectories(limit, order, step)
    texts = [None if found is None else words(found.tokens) for found in ledger.load_trajectories(rows)]
    if as_json:
        print(json.dumps([{**asdict(row), "response": text} for row, text in zip(rows, texts, strict=True)]))
        return
    head = ("task", "group", "for", "state", "step", "reward", "tokens", "versions", "worker", "first words")
    table: list[Sequence[str]] = [head]
    for row, text in zip(rows, texts, strict=True):
        reward = "failed" if row.error else "-" if row.reward is None else f"{row.reward:g}"
        numbers = f"{row.first_version}" + (f"-{row.last_version}" if row.last_version != row.first_version else "")
        at = "-" if row.step is None else f"{row.step}"
        text = "(pruned)" if text is None else printable(" ".join(text.split()))
        who = (row.task, row.group, row.purpose, row.state, at, reward, row.num_tokens, numbers, row.worker, text)
        table.append([str(cell) for cell in who])
    nothing = "no trajectories yet" if step is None else f"no trajectories at step {step}"
    print("\n".join(_table(table)) if rows else nothing)


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Returns lines with aligned columns; the last column takes the rest of the screen."""
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]) - 1)]
    left = max(20, shutil.get_terminal_size((120, 24)).columns - sum(widths) - 2 * len(widths))
    return [
        "  ".join([*(f"{c:<{w}}" for c, w in zip(row, widths, strict=False)), row[-1][:left]]).rstrip() for row in rows
    ]


def _show_one(ledger: Ledger, task: int, words: Words, with_tokens: bool, as_json: bool) -> None:
    detail = ledger.task_detail(task)
    if as_json:
        print(json.dumps(as_data(detail, words, with_tokens)))
    else:
        console = Console(highlight=False, soft_wrap=True, markup=False)
        for line in _lines(detail, words, with_tokens):
            console.print(line)


# One task on the screen, its text coloured by version.

Words = Callable[[np.ndarray], str]
"""Decodes token ids to text."""
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
COLOURS = ("cyan", "green", "yellow", "magenta", "blue", "red")
"""Colours of the versions that generated a response, used in turn, so that successive versions differ."""


TASK_FIELDS = (
    *("task", "group", "ordinal", "member", "purpose", "source"),
    *("state", "reason", "group_state", "group_reason", "step"),
)
"""Fields of `TaskDetail` that appear in JSON as they are."""


def as_data(detail: TaskDetail, words: Words, with_tokens: bool) -> dict[str, Any]:
    """Returns the task as plain JSON data; `with_tokens` adds token ids and log-probs."""
    segments = [] if detail.trajectory is None else list(detail.trajectory.segments)
    texts = [] if detail.trajectory is None else _pieces(detail.trajectory, words)
    parts = []
    for place, stretch in enumerate(detail.segments):
        part: dict[str, Any] = asdict(stretch)
        if segments:
            part |= {"worker": segments[place].worker, "engine": segments[place].engine}
            part |= {"text": texts[place], "logprobs": _summary(segments[place].logprobs)}
        if segments and with_tokens:
            logprobs = segments[place].logprobs
            part["tokens"] = segments[place].tokens.tolist()
            part["token_logprobs"] = None if logprobs is None else logprobs.tolist()
        parts.append(part)
    return {
        **{name: getattr(detail, name) for name in TASK_FIELDS},
        "prompt": words(detail.prompt),
        "problem": detail.problem,
        "response": None if detail.trajectory is None else words(detail.trajectory.tokens),
        "is_partial": detail.trajectory is not None and detail.trajectory.is_partial,
        "is_pruned": detail.is_pruned,
        "segments": parts,
        "reward": detail.reward,
        "rewards": [
            {"name": part.name, "value": part.value, "position": part.position, "weight": part.weight}
            for part in detail.rewards
        ],
        "error": detail.error,
        "history": [{"at": event.at, "what": event.what} for event in detail.history],
    }


def printable(text: str) -> str:
    """Escapes control characters in a text, because a model may generate terminal commands."""
    return CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


def _lines(detail: TaskDetail, words: Words, with_tokens: bool) -> Iterator[Text | str]:
    state = detail.state + (f" ({detail.reason})" if detail.reason else "")
    group = detail.group_state + (f" ({detail.group_reason})" if detail.group_reason else "")
    yield f"task {detail.task}: {state}; member {detail.member} of group {detail.group}, which is {group}"
    yield f"for {detail.purpose}, from {detail.source!r}, ordinal {detail.ordinal}"
    yield from ("", _title("prompt"), printable(words(detail.prompt)), "")
    yield _title("response" if detail.trajectory is None or not detail.trajectory.is_partial else "response so far")
    yield _response(detail, words)
    yield ""
    found = [None] * len(detail.segments) if detail.trajectory is None else detail.trajectory.segments
    for stretch, segment in zip(detail.segments, found, strict=True):
        yield Text("  ").append(_about(stretch, segment), style=_style(detail, stretch))
        if with_tokens and segment is not None:
            yield f"    tokens    {segment.tokens.tolist()}"
            if segment.logprobs is not None:
                yield f"    log-probs {[round(float(value), 4) for value in segment.logprobs]}"
    yield from ("", _title("reward"))
    yield from _reward(detail)
    yield from ("", _title("history"))
    for event in detail.history:
        yield f"  {_moment(event.at):<20}{printable(event.what)}"


def _title(text: str) -> Text:
    return Text(text, style="bold")


def _response(detail: TaskDetail, words: Words) -> Text | str:
    if detail.trajectory is None:
        return "(its bytes were pruned)" if detail.is_pruned else "(none yet)"
    text = Text()
    for stretch, piece in zip(detail.segments, _pieces(detail.trajectory, words), strict=True):
        text.append(printable(piece), style=_style(detail, stretch))
    return text


def _pieces(trajectory: Trajectory, words: Words) -> list[str]:
    """Returns the text of each segment of a trajectory; a character split between two belongs to the second one."""
    pieces, before = [], ""
    for segment in trajectory.segments:
        until = words(trajectory.tokens[: segment.end])
        before = before.rstrip("\ufffd") if not until.startswith(before) else before
        pieces.append(until[len(before) :])
        before = until
    return pieces


def _style(detail: TaskDetail, stretch: TokenRun) -> str:
    numbers = sorted({s.version for s in detail.segments if s.version is not None})
    return "dim" if stretch.version is None else COLOURS[numbers.index(stretch.version) % len(COLOURS)]


def _about(stretch: TokenRun, segment: Segment | None) -> str:
    place = f"{stretch.start}-{stretch.start + stretch.num_tokens - 1}"
    if stretch.version is None:
        return f"{place}: given"
    parts = [
        f"{place}: version {stretch.version} of step {stretch.step}" + (", abandoned" if stretch.is_abandoned else "")
    ]
    if stretch.staleness is not None:
        parts.append(f"staleness {stretch.staleness}")
    if segment is not None:
        parts.append(f"by {segment.worker or 'an unnamed worker'}" + (f" ({segment.engine})" if segment.engine else ""))
        summary = _summary(segment.logprobs)
        if summary is not None:
            parts.append("log-probs mean {mean:.3f}, least {least:.3f}".format(**summary))
    return ", ".join(parts)


def _summary(logprobs: np.ndarray | None) -> dict[str, float] | None:
    if logprobs is None or not len(logprobs):
        return None
    return {"mean": float(logprobs.mean()), "least": float(logprobs.min())}


def _reward(detail: TaskDetail) -> list[str]:
    if detail.error is not None:
        return [f"  failed: {printable(detail.error)}"]
    if detail.reward is None:
        return ["  none yet"]
    parts = [
        f"    {part.value:g} {part.name}"
        + ("" if part.position < 0 else f" at {part.position}")
        + ("" if part.weight == 1 else f", counts {part.weight:g} times")
        for part in detail.rewards
    ]
    return [f"  {detail.reward:g}", *(parts if len(parts) > 1 or detail.rewards[0].weight != 1 else [])]


def _moment(at: float | None) -> str:
    return "" if at is None else f"{datetime.datetime.fromtimestamp(at):%Y-%m-%d %H:%M:%S}"


SLICE = 1000
"""Trajectories written to a Parquet file at a time."""


def export(ledger: Ledger, file: Path, words: Callable[[np.ndarray], str], step: int | None) -> int:
    """Writes the trajectories of a step (None: of all steps) to a Parquet file; returns their number. The file appears
    only when it is complete."""
    pyarrow = import_extra("pyarrow", "data", "--parquet")
    parquet = import_extra("pyarrow.parquet", "data", "--parquet")
    schema = _schema(pyarrow)
    if not file.parent.is_dir():
        raise UserError(f"--parquet {file}: the folder {file.parent} does not exist; create it first")
    unfinished, count = file.with_name(file.name + ".new"), 0
    trajectories = ledger.walk_trajectories(step)
    try:
        with parquet.ParquetWriter(unfinished, schema) as writer:
            while rows := [_row(row, found, words) for row, found in itertools.islice(trajectories, SLICE)]:
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
        **dict.fromkeys(("prompt", "response"), text),
        **dict.fromkeys(("prompt_tokens", "response_tokens"), pyarrow.list_(pyarrow.int32())),
        "logprobs": pyarrow.list_(pyarrow.float32()),
        "versions": pyarrow.list_(whole),
    }
    return pyarrow.schema(columns.items())


def _row(row: TrajectoryRow, found: Trajectory | None, words: Callable[[np.ndarray], str]) -> dict[str, Any]:
    known = {**asdict(row), "accepted_at": int(row.accepted_at * 1e6)}
    if found is None:
        return known
    return known | {
        "prompt": words(found.prompt),
        "response": words(found.tokens),
        "prompt_tokens": found.prompt.tolist(),
        "response_tokens": found.tokens.tolist(),
        "logprobs": found.logprobs.tolist(),
        "versions": found.versions.tolist(),
    }
