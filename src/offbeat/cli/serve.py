"""`offbeat serve`: runs the coordinator of a run, which a trainer and workers join."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys

from offbeat.cli.main import STOPPED
from offbeat.cli.parser import Parser
from offbeat.cli.train import resolve, status_of
from offbeat.errors import RunStopped
from offbeat.extras import hidden


def add_arguments(parser: Parser) -> None:
    parser.add_argument("config", nargs="?", metavar="CONFIG.toml", help="without it, the built-in demo")
    parser.add_argument("--name", help="the run's name, the same as --run.name")
    parser.add_argument(
        "--resume", nargs="?", const="", metavar="RUN", help="continue a run; without RUN, the newest one"
    )
    parser.epilog = "Any key of the configuration can be given as --section.key value, such as --serve.port 8700."


def run(arguments: argparse.Namespace, overrides: list[str]) -> int:
    if arguments.name:
        overrides = [*overrides, f"--run.name={arguments.name}"]
    config, resume = resolve(arguments.config, overrides, arguments.resume)
    from offbeat.cli.preview import check
    from offbeat.launch import parent_watch
    from offbeat.launch.run_folder import RunFolder

    is_supervised = parent_watch.watch_parent()
    check(config, resume)
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # no warning about a missing torch
    with hidden("torch"):  # a tokenizer does not need torch, but transformers would load it
        from offbeat.launch.address import address_of
        from offbeat.launch.coordinator_role import serve
    address_of(config).check()
    with RunFolder.open(resume, config) if resume else RunFolder.create(config) as folder:
        try:
            summary = asyncio.run(serve(folder, command="train" if is_supervised else "serve"))
            return status_of(summary, "serve", is_quiet=is_supervised)  # the supervisor prints it
        except RunStopped as error:
            folder.event("error", error=str(error))
            print(f"offbeat: {error}", file=sys.stderr)
            return STOPPED
