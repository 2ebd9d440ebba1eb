"""`offbeat eval`: scores a model on the held-out prompts of a configuration's tasks."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from offbeat.cli.parser import Parser
from offbeat.config import load
from offbeat.errors import UserError


def add_arguments(parser: Parser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a Hugging Face folder or id, or offbeat-tiny")
    parser.add_argument("config", nargs="?", metavar="CONFIG.toml", help="whose tasks; without it, the built-in demo's")
    parser.add_argument("--prompts", metavar="N", help="held-out prompts, the same as --eval.prompts")
    parser.add_argument("--samples", metavar="K", help="answers per prompt, the same as --eval.samples")
    parser.add_argument("--json", action="store_true", help="one line of JSON instead of a table")


def run(arguments: argparse.Namespace, overrides: list[str]) -> int:
    if (Path(arguments.model) / "ledger.sqlite").exists():
        raise UserError(f"{arguments.model} is a run, not a model; run offbeat export {arguments.model} MODEL_DIR")
    given = [("eval.prompts", arguments.prompts), ("eval.samples", arguments.samples)]
    shorthands = [f"--{key}={value}" for key, value in given if value is not None]
    config = load(arguments.config, [*overrides, *shorthands, f"--model.path={arguments.model}"])
    from offbeat.cli.preview import check

    check(config)
    from offbeat.tools.evaluate import evaluate

    figures = evaluate(config)
    if arguments.json:
        print(json.dumps(figures))
    else:
        names = [getattr(task, "name", None) or getattr(task, "path", None) or task.source for task in config.task]
        print(f"{'task':<24} {', '.join(names)}")
        for name, value in figures.items():
            print(f"{name:<24} {value:.4g}" if isinstance(value, float) else f"{name:<24} {value}")
    return 0
