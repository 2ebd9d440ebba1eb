"""`offbeat doctor`: examines this machine and reports what will work, and what to install or change.

Exit status 0 if the configuration, by default the built-in demo, can run on this machine; 1 if it cannot.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shlex
import sys
from pathlib import Path

from offbeat.cli.parser import Parser
from offbeat.config import Config, from_dict, load, resolved
from offbeat.errors import UserError

WITHIN_S = 120.0
"""Default time limit in seconds of each probe (a check in its own process). Importing torch from a cold disk takes
long."""
COLOURS = {"!": "33", "x": "31", "-": "2"}


def add_arguments(parser: Parser) -> None:
    parser.add_argument("config", nargs="?", metavar="CONFIG.toml", help="without it, the built-in demo")
    parser.add_argument("--engine-url", metavar="URL", help="also examine the vLLM or SGLang server at this URL")
    parser.add_argument(
        "--within", metavar="SECONDS", type=float, default=WITHIN_S, help=f"how long to wait for a probe ({WITHIN_S:g})"
    )
    parser.add_argument(
        "--ranks", metavar="N", type=int, help="try N trainer ranks instead, here or, under torchrun, on its machines"
    )
    parser.add_argument("--shared", metavar="FOLDER", help="with --ranks: also try whether all ranks share this folder")
    parser.add_argument("--json", action="store_true", help="one line of JSON instead")
    parser.epilog = (
        "Any key of the configuration can be given as --section.key value, such as --model.device cuda or "
        "--engine.python ~/vllm/bin/python, the Python that has vLLM or SGLang."
    )


def run(arguments: argparse.Namespace, overrides: list[str]) -> int:
    if not arguments.within > 0:
        raise UserError(f"--within is {arguments.within:g}; it must be a number of seconds above 0")
    if arguments.ranks is not None:
        return _try_ranks(arguments, overrides)
    from offbeat.launch.engine_choice import with_chosen_engine
    from offbeat.tools.doctor.checks import examine
    from offbeat.tools.doctor.report import without_secrets

    config, _ = with_chosen_engine(load(arguments.config, overrides))

    command = shlex.join(["offbeat", "train", *([arguments.config] if arguments.config else []), *overrides])
    name = arguments.config or "the built-in demo"
    report = asyncio.run(examine(config, name, command, arguments.engine_url, _mistakes(config), arguments.within))
    if arguments.json:
        findings = [{"about": f.about, "told": f.text, "level": f.level, "remedy": f.remedy} for f in report.findings]
        data = {"for": report.name, "can_run": report.can_run, "findings": findings}
        print(without_secrets(json.dumps({**data, "works": report.works, "changes": report.changes})))
    else:
        _print(report.lines(os.path.expanduser("~")))
    return 0 if report.can_run else 1


def _try_ranks(arguments: argparse.Namespace, overrides: list[str]) -> int:
    from offbeat.tools.doctor.ranks import examine, examine_here
    from offbeat.trainer.ranks import RankPlace

    config, place = load(arguments.config, overrides), RankPlace.of(os.environ)
    if arguments.ranks < 2:
        raise UserError(f"--ranks is {arguments.ranks}; give 2 or more")
    if place is None:
        words = [*([arguments.config] if arguments.config else []), f"--within={arguments.within:g}", *overrides]
        return examine_here(arguments.ranks, words, arguments.within)
    if place.size != arguments.ranks:
        raise UserError(f"--ranks is {arguments.ranks}, but WORLD_SIZE is {place.size}; give the same number")
    return examine(place, config, Path(arguments.shared) if arguments.shared else None, arguments.within)


def _mistakes(config: Config) -> list[str]:
    """Returns the messages of the errors that `offbeat train` would raise; does not check the model, the run's name or
    log sinks."""
    from offbeat.cli.preview import check
    from offbeat.launch.engine_parts import check_engine
    from offbeat.model.loading import TINY

    rest = from_dict(resolved(config), {"run.name": None, "model.path": TINY, "log.sinks": []})
    found = []
    for checks in (lambda: check(rest), lambda: check_engine(config, config.rollout.workers)):
        try:
            checks()
        except UserError as error:
            found.append(str(error))
    return found


def _print(lines: list[str]) -> None:
    with_colours = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    for line in lines:
        colour = COLOURS.get(line[:1]) if with_colours and line[1:2] == " " else None
        print(f"\033[{colour}m{line}\033[0m" if colour else line)
