"""`offbeat ledger`: verifies a run's ledger, or summarises it."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from offbeat.cli.chosen_run import RUN_HELP, chosen_run
from offbeat.cli.parser import Parser
from offbeat.errors import UserError

if TYPE_CHECKING:
    from offbeat.ledger.ledger import Ledger
    from offbeat.ledger.reports import RunReport

ACTIONS = {
    "verify": "check the rules that must always hold",
    "show": "print who made what, and what the run waits for",
}


def add_arguments(parser: Parser) -> None:
    parser.add_argument(
        "action", choices=list(ACTIONS), help="; ".join(f"{name}: {text}" for name, text in ACTIONS.items())
    )
    parser.add_argument("run", metavar="RUN", nargs="?", help=RUN_HELP)
    parser.add_argument("--json", action="store_true", help="with show: one line of JSON")


def run(arguments: argparse.Namespace, overrides: list[str]) -> int:
    if arguments.json and arguments.action != "show":
        raise UserError(f"--json goes with offbeat ledger show, not with offbeat ledger {arguments.action}")
    run = chosen_run(arguments.run)
    file = run / "ledger.sqlite"
    if not file.is_file():
        raise UserError(f"{run} holds no ledger; give the folder of a run, such as runs/NAME")
    from offbeat.ledger.ledger import Ledger

    with Ledger(file, read_only=True) as ledger:
        if arguments.action == "verify":
            return _verify(ledger)
        with ledger.naming_damage():
            report = ledger.report()
    print(json.dumps(asdict(report)) if arguments.json else "\n".join(_lines(report)))
    return 0


def _verify(ledger: Ledger) -> int:
    """Prints each rule that the ledger breaks, then its counts; returns exit status 1 if a rule is broken, else 0."""
    from offbeat.ledger.records import Counts

    report = ledger.verify()
    for violation in report.violations:
        print(violation)
    if report.counts != Counts():  # all zeros: too damaged to count, so they would mislead
        for name, value in asdict(report.counts).items():
            print(f"{name:<24} {_in_words(value)}")
    print("everything holds" if report.holds else f"rules that do not hold: {len(report.violations)}")
    return 0 if report.holds else 1


def _lines(report: RunReport) -> list[str]:
    counts, tokens = report.counts, report.counts.tokens
    at = "no version yet" if report.step is None else f"step {report.step}, from version {report.version}"
    lease = report.oldest_lease
    facts = {
        "next to train": at,
        "groups": _in_words(dict(counts.groups)),
        "dropped": _in_words(dict(counts.dropped_groups)),
        "tasks": _in_words(dict(report.tasks)),
        "failed": _in_words(dict(counts.failed_tasks)),
        "trajectories": _in_words(asdict(counts.trajectories)),
        "tokens": _in_words(asdict(tokens)),
        "staleness of trained": _in_words({f"at {age}": num for age, num in report.staleness.items()}),
        "waits for": report.waits_for,
        "oldest lease": "none" if lease is None else f"task {lease.task} by {lease.worker}, for {span(lease.seconds)}",
        "partials": f"{report.num_partials} with {tokens.partial} tokens",
        "set aside": "; ".join(f"{worker} {why}" for worker, why in report.set_aside.items()) or "none",
        "suspects": _in_words({f"lost {num} times": count for num, count in report.suspects.items()}),
        "versions": f"{counts.num_versions} published, {report.num_abandoned_versions} of them abandoned",
    }
    lines = [f"{name:<21} {value}" for name, value in facts.items()]
    return [*lines, *_table(_worker_rows(report)), *_table(_version_rows(report))]


def _worker_rows(report: RunReport) -> list[tuple[str, ...]]:
    made_by = ("worker", "trajectories", "tokens", "tokens/s", "leased", "partials", "failed")
    rows: list[tuple[str, ...]] = [(*made_by, "tokens audited", "log-prob off")]
    for made in report.producers:
        rate = "-" if made.tokens_per_second is None else f"{made.tokens_per_second:,.0f}"
        rest = (made.num_leased, made.num_partials, made.num_failed, made.num_compared, made.num_off)
        rows.append(
            (made.worker, f"{made.num_trajectories:,}", f"{made.num_tokens:,}", rate, *map("{:,}".format, rest))
        )
    return rows


def _version_rows(report: RunReport) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [("version", "step", "tokens", "")]
    for made in report.versions:
        rows.append(
            (f"{made.number}", f"{made.step}", f"{made.num_tokens:,}", "abandoned" if made.is_abandoned else "")
        )
    return rows


def _table(rows: list[tuple[str, ...]]) -> list[str]:
    """Returns a blank line and the rows as aligned lines; no lines at all if there is only the first row, a header."""
    if len(rows) < 2:
        return []
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    first = max(widths[0], 21)
    lines = [""]
    for row in rows:
        cells = [f"{cell:>{width}}" for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append(f"{row[0]:<{first}} {'  '.join(cells)}".rstrip())
    return lines


def span(seconds: float) -> str:
    """Returns a time as text, such as `12 s`, `5 min` or `3.2 h`."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _in_words(value: Any) -> str:
    """Returns counts in words, such as `36 accepted, 36 trained`; nested counts are in brackets."""
    if not isinstance(value, dict):
        return str(value)
    parts = [
        f"{name} ({_in_words(part)})" if isinstance(part, dict) else f"{part} {name}" for name, part in value.items()
    ]
    return ", ".join(parts) or "none"
