"""`offbeat show`: prints a run's trajectories, one in full or several in a list, or writes them to a Parquet file."""

from __future__ import annotations

import argparse
import datetime
import json
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from rich.console import Console
from rich.text import Text

from offbeat.cli.chosen_run import RUN_HELP, chosen_run, is_run, where_it_started
from offbeat.cli.parser import Parser
from offbeat.errors import UserError
from offbeat.ledger.errors import Unknown
from offbeat.ledger.ledger import Ledger
from offbeat.ledger.reports import TaskDetail, TokenRun, TrajectoryFilter, TrajectoryRow
from offbeat.tools.trajectories import Decode, as_text, decoder, open_ledger, write_parquet
from offbeat.trajectory import Segment, Trajectory

NUM_ROWS = 20


def add_arguments(parser: Parser) -> None:
    parser.add_argument("run", metavar="RUN", nargs="?", help=RUN_HELP)
    parser.add_argument("task", metavar="ID", nargs="?", help="a task: its answer and its history")
    parser.add_argument(
        "--last", metavar="N", type=int, help=f"the latest N trajectories (the default, with {NUM_ROWS})"
    )
    parser.add_argument(
        "--best", metavar="N", type=int, help="the N with the highest reward; of equal ones, different prompts first"
    )
    parser.add_argument(
        "--worst", metavar="N", type=int, help="the N with the lowest reward; of equal ones, different prompts first"
    )
    parser.add_argument("--train", action="store_true", help="training answers (the default for lists)")
    parser.add_argument("--eval", action="store_true", help="evaluation answers; with --train, both")
    parser.add_argument(
        "--step", metavar="N", type=int, help="answers that step N trained on; with --eval, made after step N"
    )
    parser.add_argument("--source", metavar="NAME", help="only of the task with this name")
    parser.add_argument("--worker", metavar="NAME", help="only what this worker handed in")
    parser.add_argument("--min-reward", metavar="X", type=float, help="only with a reward of at least X")
    parser.add_argument("--max-reward", metavar="X", type=float, help="only with a reward of at most X")
    parser.add_argument(
        "--failed", action="store_const", const=True, help="only answers whose reward failed, with the reason"
    )
    parser.add_argument("--tokens", action="store_true", help="with ID: token ids and log-probs, too")
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    parser.add_argument("--parquet", metavar="FILE", help="write all matching trajectories to a Parquet file")
    parser.epilog = "Steps count from 1, as on the console."


def run(arguments: argparse.Namespace, overrides: list[str]) -> int:
    if arguments.task is None and (arguments.run or "").isdecimal() and not is_run(arguments.run):
        arguments.run, arguments.task = None, arguments.run
    task = _task(arguments.task)
    order, limit = _chosen(arguments)
    folder = chosen_run(arguments.run)
    with where_it_started(folder) as path:
        decode = decoder(path)
    with open_ledger(folder) as ledger:
        if arguments.parquet is not None:
            count = write_parquet(ledger, Path(arguments.parquet), decode, _filter(arguments, default=None))
            print(f"{arguments.parquet}: {count} trajectories")
        elif task is not None:
            try:
                _show_one(ledger, task, decode, arguments.tokens, arguments.json)
            except Unknown as error:
                raise UserError(f"{folder}: {error}") from error
        else:
            _show_list(folder, ledger, order, limit, _filter(arguments, default="train"), decode, arguments.json)
    return 0


def _task(word: str | None) -> int | None:
    if word is not None and not word.isdecimal():
        raise UserError(f"{word!r} is not a task's ID, which is a whole number; offbeat show RUN lists the IDs")
    return None if word is None else int(word)


FILTERS = tuple(field.name for field in fields(TrajectoryFilter) if field.name != "purpose")


def _filter(arguments: argparse.Namespace, default: str | None) -> TrajectoryFilter:
    """Returns the filter that the options ask for; `default` is the purpose if neither --train nor --eval is given."""
    purpose = {(True, False): "train", (False, True): "eval", (False, False): default}
    chosen = purpose.get((arguments.train, arguments.eval))
    return TrajectoryFilter(chosen, **{name: getattr(arguments, name) for name in FILTERS})


def _chosen(arguments: argparse.Namespace) -> tuple[str, int]:
    """Returns the list's order (latest, best or worst) and length; raises `UserError` for options that conflict."""
    given = {name: getattr(arguments, name) for name in ("last", "best", "worst")}
    asked = [name for name, value in given.items() if value is not None]
    narrowed = [name for name in ("train", "eval", *FILTERS) if getattr(arguments, name) not in (None, False)]
    lists = [f"--{name.replace('_', '-')}" for name in (*asked, *narrowed)]
    if arguments.task is not None and (lists or arguments.parquet is not None):
        raise UserError(f"{(lists or ['--parquet'])[0]} and a task's ID do not go together; leave one of them out")
    if arguments.tokens and arguments.task is None:
        raise UserError("--tokens goes only with a task's ID, as in offbeat show RUN ID --tokens")
    if arguments.parquet is not None and (asked or arguments.json):
        raise UserError(
            f"--{(asked or ['json'])[0]} and --parquet do not go together; a file holds all matching answers"
        )
    if len(asked) > 1:
        raise UserError(f"--{asked[0]} and --{asked[1]} do not go together; give one of --last, --best and --worst")
    if arguments.failed and asked and asked[0] != "last":
        raise UserError(f"--{asked[0]} and --failed do not go together; an answer whose reward failed has none")
    name = asked[0] if asked else "last"
    count = given[name] if asked else NUM_ROWS
    if count < 1:
        raise UserError(f"--{name} is {count}; it must be at least 1")
    return "latest" if name == "last" else name, count


def _show_list(
    folder: Path,
    ledger: Ledger,
    order: str,
    limit: int,
    which: TrajectoryFilter,
    decode: Decode,
    as_json: bool,
) -> None:
    rows = ledger.list_trajectories(limit, order, which)
    problems = ledger.load_problems(rows)
    texts = [None if found is None else decode(found.tokens) for found in ledger.load_trajectories(rows)]
    if as_json:
        given = [{"prompt": decode(prompt), "answer": problem["answer"]} for prompt, problem in problems]
        found = zip(rows, given, texts, strict=True)
        print(json.dumps([{**asdict(row), **more, "response": text} for row, more, text in found]))
        return
    if not rows:
        print(_nothing(ledger, which))
        return
    table: list[Sequence[str]] = [(*HEAD, FAILURE) if which.failed else HEAD]
    for row, (_, problem), text in zip(rows, problems, texts, strict=True):
        response = "(pruned)" if text is None else _one_line(text)
        asked = (_one_line(_asked(problem)), _one_line(as_text(problem["answer"])))
        table.append([*_figures(row), *asked, response, *([_one_line(row.error)] if which.failed else [])])
    print("\n".join(_table(table, NUM_TEXTS + bool(which.failed))))
    print(f"offbeat show {folder} ID shows one answer in full, with its history")


HEAD = (
    *("task", "group", "for", "state", "step", "reward", "tokens", "versions", "worker"),
    *("prompt", "right answer", "response"),
)
NUM_TEXTS = 3
"""Number of columns with texts; these are the last columns of `HEAD`."""
FAILURE = "why it failed"
"""Head of the additional last column in a list of failed answers."""


def _figures(row: TrajectoryRow) -> list[str]:
    reward = "failed" if row.error else "-" if row.reward is None else f"{row.reward:g}"
    numbers = f"{row.first_version}" + (f"-{row.last_version}" if row.last_version != row.first_version else "")
    at = "-" if row.step is None else f"{row.step}"
    cells = (row.task, row.group, row.purpose, row.state, at, reward, row.num_tokens, numbers, row.worker)
    return [str(cell) for cell in cells]


def _asked(problem: dict[str, Any]) -> str | None:
    """Returns a problem's prompt without its chat template; if the prompt is a conversation, its last message."""
    prompt = problem["prompt"]
    last = prompt[-1] if isinstance(prompt, list) and prompt else prompt
    return as_text(last.get("content") if isinstance(last, dict) else last)


def _one_line(text: str | None) -> str:
    return "" if text is None else printable(" ".join(text.split()))


def _nothing(ledger: Ledger, which: TrajectoryFilter) -> str:
    """Returns a text saying that the list is empty. If the run has evaluation answers, it adds that --eval lists
    them."""
    kind = {"train": "training ", "eval": "evaluation ", None: ""}[which.purpose]
    at = "" if which.step is None else f" at step {which.step}"
    said = f"no {kind}answers{at}" + (" with these filters" if any(vars(which)[name] for name in FILTERS[1:]) else "")
    if which == TrajectoryFilter("train") and ledger.list_trajectories(1, which=TrajectoryFilter("eval")):
        return f"{said} yet; --eval lists evaluation answers"
    return said if at or which != TrajectoryFilter(which.purpose) else f"{said} yet"


def _table(rows: Sequence[Sequence[str]], num_texts: int) -> list[str]:
    """Returns aligned columns if each row fits into a line of the screen. Otherwise, a row takes several lines: first
    its figures, then one line for each of its texts, the last `num_texts` cells."""
    width = shutil.get_terminal_size((120, 24)).columns
    if sum(widths := _widths(rows)) + 2 * (len(widths) - 1) <= width:
        return [_aligned(row, widths) for row in rows]
    head, *others = rows
    names, indent = head[-num_texts:], " " * 4
    name_width = max(len(name) for name in names) + 2
    figures = [row[:-num_texts] for row in rows]
    widths = _widths(figures)
    lines = [_aligned(figures[0], widths)]
    for row, cells in zip(others, figures[1:], strict=True):
        lines.append(_aligned(cells, widths))
        texts = zip(names, row[-num_texts:], strict=True)
        lines += [f"{indent}{name:<{name_width}}{_cut(text, width - 4 - name_width)}" for name, text in texts if text]
    return lines


def _widths(rows: Sequence[Sequence[str]]) -> list[int]:
    return [max(map(len, column)) for column in zip(*rows, strict=True)]


def _aligned(cells: Sequence[str], widths: Sequence[int]) -> str:
    return "  ".join(f"{cell:<{width}}" for cell, width in zip(cells, widths, strict=True)).rstrip()


def _cut(text: str, width: int) -> str:
    """Shortens a text to `width` characters in its middle, because an answer often ends with the result."""
    if len(text) <= width:
        return text
    num_last = max((width - 3) // 2, 1)
    return f"{text[: max(width - 3 - num_last, 1)]} … {text[-num_last:]}"


def _show_one(ledger: Ledger, task: int, decode: Decode, with_tokens: bool, as_json: bool) -> None:
    detail = ledger.task_detail(task)
    if as_json:
        print(json.dumps(as_data(detail, decode, with_tokens)))
    else:
        console = Console(highlight=False, soft_wrap=True, markup=False)
        for line in _lines(detail, decode, with_tokens):
            console.print(line)


# One task on the screen, its text coloured by version.

CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
COLOURS = ("cyan", "green", "yellow", "magenta", "blue", "red")
"""Colours of the versions that generated a response, used in turn, so that successive versions differ."""


TASK_FIELDS = (
    *("task", "group", "ordinal", "member", "purpose", "source"),
    *("state", "reason", "group_state", "group_reason", "step"),
)
"""Fields of `TaskDetail` that appear in JSON as they are."""


def as_data(detail: TaskDetail, decode: Decode, with_tokens: bool) -> dict[str, Any]:
    """Returns the task as plain JSON data; `with_tokens` adds token ids and log-probs."""
    segments = [] if detail.trajectory is None else list(detail.trajectory.segments)
    texts = [] if detail.trajectory is None else _pieces(detail.trajectory, decode)
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
        "prompt": decode(detail.prompt),
        "answer": detail.problem["answer"],
        "problem": detail.problem,
        "response": None if detail.trajectory is None else decode(detail.trajectory.tokens),
        "is_partial": detail.trajectory is not None and detail.trajectory.is_partial,
        "is_pruned": detail.is_pruned,
        **_episode_data(detail.trajectory),
        "segments": parts,
        "reward": detail.reward,
        "rewards": [
            {"name": part.name, "value": part.value, "position": part.position, "weight": part.weight}
            for part in detail.rewards
        ],
        "error": detail.error,
        "history": [{"at": event.at, "what": event.what} for event in detail.history],
    }


def _episode_data(trajectory: Trajectory | None) -> dict[str, Any]:
    """Returns the notes of an episode as JSON data; empty for any other answer."""
    if trajectory is None or trajectory.episode is None:
        return {}
    return {"episode": {"ended_by": trajectory.end, **msgspec.to_builtins(trajectory.episode)}}


def printable(text: str) -> str:
    """Escapes control characters in a text, because a model may generate terminal commands."""
    return CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


def _lines(detail: TaskDetail, decode: Decode, with_tokens: bool) -> Iterator[Text | str]:
    state = detail.state + (f" ({detail.reason})" if detail.reason else "")
    group = detail.group_state + (f" ({detail.group_reason})" if detail.group_reason else "")
    yield f"task {detail.task}: {state}; member {detail.member} of group {detail.group}, which is {group}"
    yield f"for {detail.purpose}, from {detail.source!r}, ordinal {detail.ordinal}"
    yield from ("", _title("prompt"), printable(decode(detail.prompt)), "")
    if (right := as_text(detail.problem["answer"])) is not None:
        yield from (_title("right answer"), printable(right), "")
    yield _title("response" if detail.trajectory is None or not detail.trajectory.is_partial else "response so far")
    yield _response(detail, decode)
    yield ""
    found = [None] * len(detail.segments) if detail.trajectory is None else detail.trajectory.segments
    for stretch, segment in zip(detail.segments, found, strict=True):
        yield Text("  ").append(_about(stretch, segment), style=_style(detail, stretch))
        if with_tokens and segment is not None:
            yield f"    tokens    {segment.tokens.tolist()}"
            if segment.logprobs is not None:
                yield f"    log-probs {[round(float(value), 4) for value in segment.logprobs]}"
    if detail.trajectory is not None and detail.trajectory.episode is not None:
        yield from ("", _title("episode"))
        yield from _episode(detail.trajectory)
    yield from ("", _title("reward"))
    yield from _reward(detail)
    yield from ("", _title("history"))
    for event in detail.history:
        yield f"  {_moment(event.at):<20}{printable(event.what)}"


def _episode(trajectory: Trajectory) -> Iterator[str]:
    record = trajectory.episode
    assert record is not None
    end = f", ended by {trajectory.end}" if trajectory.end is not None else ""
    turns = "1 turn" if record.num_turns == 1 else f"{record.num_turns} turns"
    yield f"  {turns}{end}; waited {record.wait_ms / 1e3:.2f} s for its environment"
    for call in record.calls:
        yield f"  turn {call.turn}: {printable(call.tool) or 'a call without a name'}: {call.status}, {call.ms:.1f} ms"
    for claim in record.claims:
        at = "" if claim.position < 0 else f" at {claim.position}"
        yield f"  the environment says: {claim.value:g} {printable(claim.name)}{at}"
    if record.state:
        yield f"  state {printable(json.dumps(record.state))}"


def _title(text: str) -> Text:
    return Text(text, style="bold")


def _response(detail: TaskDetail, decode: Decode) -> Text | str:
    if detail.trajectory is None:
        return "(its bytes were pruned)" if detail.is_pruned else "(none yet)"
    text = Text()
    for stretch, piece in zip(detail.segments, _pieces(detail.trajectory, decode), strict=True):
        text.append(printable(piece), style=_style(detail, stretch))
    return text


def _pieces(trajectory: Trajectory, decode: Decode) -> list[str]:
    """Returns the text of each segment of a trajectory. A character whose tokens are in two segments belongs to the
    second segment."""
    pieces, before = [], ""
    for segment in trajectory.segments:
        until = decode(trajectory.tokens[: segment.end])
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
