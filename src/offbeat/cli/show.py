"""`offbeat show`: the trajectories of a run as people read them, one by one or in a list, and as a Parquet file."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from offbeat.cli.parser import Parser
from offbeat.errors import UserError

if TYPE_CHECKING:
    from offbeat.cli.showing import Words
    from offbeat.ledger.ledger import Ledger

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
        raise UserError(f"{folder}: holds no ledger yet; the run has not begun")
    from offbeat.ledger.errors import Unknown
    from offbeat.ledger.ledger import Ledger

    with Ledger(folder / "ledger.sqlite", read_only=True) as ledger, ledger.naming_damage():
        if arguments.parquet is not None:
            from offbeat.cli.parquet import export

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
    """Which list is asked for, and how long."""
    given = {name: getattr(arguments, name) for name in ("last", "best", "worst")}
    asked = [name for name, value in given.items() if value is not None]
    lists = [f"--{name}" for name in asked] + (["--step"] if arguments.step is not None else [])
    if arguments.task is not None and (lists or arguments.parquet is not None):
        raise UserError(f"{(lists or ['--parquet'])[0]}: chooses among trajectories; leave it out, or the task's ID")
    if arguments.tokens and arguments.task is None:
        raise UserError("--tokens: goes with a task's ID")
    if arguments.parquet is not None and (asked or arguments.json):
        raise UserError(f"--{(asked or ['json'])[0]}: a Parquet file holds all; only --step goes with --parquet")
    if len(asked) > 1:
        raise UserError(f"--{asked[1]}: only one of --last, --best and --worst can be asked for")
    name = asked[0] if asked else "last"
    count = given[name] if asked else NUM_ROWS
    if count < 1:
        raise UserError(f"--{name} {count}: allowed 1 or more")
    return "latest" if name == "last" else name, count


def _words(folder: Path) -> Words:
    """The run's own tokenizer, as a function; torch is not needed for it."""
    from offbeat.extras import hidden
    from offbeat.launch.folder import stored_config

    model = stored_config(folder)["model"]
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # it would say that it found no torch
    with hidden("torch"):
        from offbeat.model.loading import load_tokenizer

        tokenizer = load_tokenizer(model.get("tokenizer") or model["path"])
    return lambda tokens: str(tokenizer.decode(tokens))


def _show_list(ledger: Ledger, order: str, limit: int, step: int | None, words: Words, as_json: bool) -> None:
    from dataclasses import asdict

    from offbeat.cli.showing import printable

    rows = ledger.rows(limit, order, step)
    texts = [None if found is None else words(found.tokens) for found in ledger.trajectories_of(rows)]
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
    print("\n".join(_table(table)) if rows else "no trajectories yet" if step is None else f"none at step {step}")


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns that line up; the last takes what is left of the screen."""
    import shutil

    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]) - 1)]
    left = max(20, shutil.get_terminal_size((120, 24)).columns - sum(widths) - 2 * len(widths))
    return [
        "  ".join([*(f"{c:<{w}}" for c, w in zip(row, widths, strict=False)), row[-1][:left]]).rstrip() for row in rows
    ]


def _show_one(ledger: Ledger, task: int, words: Words, with_tokens: bool, as_json: bool) -> None:
    from offbeat.cli.showing import as_data, display

    look = ledger.look(task)
    if as_json:
        print(json.dumps(as_data(look, words, with_tokens)))
    else:
        display(look, words, with_tokens)
