"""`offbeat ledger`: checks that a run's ledger holds what it promises."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

from offbeat.cli.parser import Parser
from offbeat.errors import UserError


def add_arguments(parser: Parser) -> None:
    parser.add_argument("action", choices=["verify"], help="verify: everything that must always hold does hold")
    parser.add_argument("run", metavar="RUN", help="a run's folder")


def run(arguments: argparse.Namespace, overrides: list[str]) -> int:
    """Status 1 if something does not hold; each broken rule is a line."""
    file = Path(arguments.run) / "ledger.sqlite"
    if not file.is_file():
        raise UserError(f"{arguments.run}: holds no ledger; give a run's folder")
    from offbeat.ledger.ledger import Ledger
    from offbeat.ledger.records import Counts

    with Ledger(file, read_only=True) as ledger:
        report = ledger.verify()
    for violation in report.violations:
        print(violation)
    if report.counts != Counts():  # a file too damaged to count in says nothing, and its zeros would mislead
        for name, value in asdict(report.counts).items():
            print(f"{name:<24} {_told(value)}")
    print("everything holds" if report.holds else f"{len(report.violations)} things do not hold")
    return 0 if report.holds else 1


def _told(value: Any) -> str:
    """Counts in words, such as `36 accepted, 36 trained`; what is inside another count stands in brackets."""
    if not isinstance(value, dict):
        return str(value)
    parts = [f"{name} ({_told(part)})" if isinstance(part, dict) else f"{part} {name}" for name, part in value.items()]
    return ", ".join(parts) or "none"
