"""`offbeat doctor`: looks at this machine and says what will work, and what to install or change.

Status 0 where the configuration, or without one the built-in demo, can run here; 1 where it cannot.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shlex
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING

from offbeat.cli.parser import Parser
from offbeat.config import from_dict, load, resolved
from offbeat.errors import UserError

if TYPE_CHECKING:
    from offbeat.launch.doctor.report import Report
    from offbeat.launch.doctor.seen import Mistakes, Seen

WITHIN_S = 120.0
"""For each thing that is looked at: torch from a cold disk takes long, and so does an engine's first look at itself."""
COLOURS = {"!": "33", "x": "31", "-": "2"}


def add_arguments(parser: Parser) -> None:
    parser.add_argument("config", nargs="?", metavar="CONFIG.toml", help="without it, the built-in demo")
    parser.add_argument(
        "--engine-url", metavar="URL", help="an engine's server to look at, whatever the configuration uses"
    )
    parser.add_argument(
        "--within",
        metavar="SECONDS",
        type=float,
        default=WITHIN_S,
        help=f"how long to wait for anything ({WITHIN_S:g})",
    )
    parser.add_argument("--json", action="store_true", help="one line of JSON instead")
    parser.epilog = (
        "Any key of the configuration can be given as --section.key value, such as --model.device cuda or "
        "--engine.python ~/vllm/bin/python, the Python that has vLLM or SGLang."
    )


def run(arguments: argparse.Namespace, overrides: list[str]) -> int:
    if not arguments.within > 0:
        raise UserError(f"--within {arguments.within:g}: allowed more than 0")
    config = load(arguments.config, overrides)
    from offbeat.launch.doctor.look import look
    from offbeat.launch.doctor.needs import needs_of
    from offbeat.launch.doctor.report import report, without_secrets

    command = shlex.join(["offbeat", "train", *([arguments.config] if arguments.config else []), *overrides])
    needs = needs_of(config, arguments.config or "the built-in demo", command, arguments.engine_url)
    seen = asyncio.run(look(needs, arguments.within))
    told = report(seen, needs)
    if arguments.json:
        print(without_secrets(json.dumps(_data(seen, told))))
    else:
        _print(told)
    return 0 if told.can_run else 1


def look_at_mistakes() -> Mistakes:
    """A probe: what is wrong with the configuration on standard input; the model, the run's name and the sinks are
    looked at elsewhere."""
    from offbeat.cli.preview import check
    from offbeat.launch.doctor.seen import Mistakes
    from offbeat.launch.engines import check_engine
    from offbeat.model.loading import TINY

    config = from_dict(json.load(sys.stdin))
    rest = from_dict(resolved(config), {"run.name": None, "model.path": TINY, "log.sinks": []})
    found = []
    for checks in (lambda: check(rest), lambda: check_engine(config, config.rollout.workers)):
        try:
            checks()
        except UserError as error:
            found.append(str(error))
    return Mistakes(found)


def _data(seen: Seen, told: Report) -> dict[str, object]:
    return {
        "for": told.needs.name,
        "can_run": told.can_run,
        "findings": [asdict(finding) for finding in told.findings],
        "works": told.works,
        "changes": told.changes,
        "seen": asdict(seen),
    }


def _print(told: Report) -> None:
    from offbeat.launch.doctor.report import lines

    with_colours = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    for line in lines(told, os.path.expanduser("~")):
        colour = COLOURS.get(line[:1]) if with_colours and line[1:2] == " " else None
        print(f"\033[{colour}m{line}\033[0m" if colour else line)
