"""`offbeat export`: writes the model that a run has trained as a Hugging Face folder."""

from __future__ import annotations

import argparse
from pathlib import Path

from offbeat.cli.parser import Parser


def add_arguments(parser: Parser) -> None:
    parser.add_argument("run", metavar="RUN", help="a run's folder")
    parser.add_argument("folder", metavar="DIR", help="where to write; must not hold anything yet")


def run(arguments: argparse.Namespace, overrides: list[str]) -> int:
    from offbeat.launch.folder import stored_config

    stored_config(Path(arguments.run))
    from offbeat.launch.export import export_run

    step = export_run(Path(arguments.run), Path(arguments.folder))
    print(f"{arguments.folder}: the model of {arguments.run} after {step} steps; try offbeat eval {arguments.folder}")
    return 0
