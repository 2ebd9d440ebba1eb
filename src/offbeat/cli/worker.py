"""`offbeat worker --join URL`: generates, or with `--role reward` judges, for a run whose coordinator runs elsewhere.
`offbeat worker token | list | revoke` are in `access`."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

from offbeat.cli.parser import Parser
from offbeat.cli.trainer import add_join_arguments, exit_status, invitation_of
from offbeat.errors import UserError

ROLES = ("rollout", "reward")


def add_arguments(parser: Parser) -> None:
    add_join_arguments(parser, "worker")
    parser.add_argument(
        "--role", choices=ROLES, default="rollout", help="rollout: generate (the default); reward: judge answers"
    )
    parser.add_argument(
        "--site", default="", help="name of the site, within which workers fetch weights from each other"
    )
    parser.add_argument(
        "--peer-address", metavar="HOST:PORT", help="where other workers of the --site fetch weights from this one"
    )
    parser.add_argument(
        "--fetch-weights", action="store_true", help="fetch weights even if the coordinator's disk is readable here"
    )
    parser.add_argument(
        "--engine-url", metavar="URL", help="a vLLM or SGLang server for this worker alone, the same as --engine.url"
    )
    parser.add_argument(
        "--engine-log", metavar="FILE", type=Path, help="output of the engine's server; without it, engine.log in --dir"
    )
    parser.epilog = f"{parser.epilog}\n\nSee also: offbeat worker token --help."


def run(arguments: argparse.Namespace, overrides: list[str]) -> int:
    from offbeat.launch import parent_watch
    from offbeat.launch.joining import own_folder
    from offbeat.launch.run_folder import LEDGER
    from offbeat.ledger.workers import Role

    if arguments.engine_url:
        overrides = [*overrides, f"--engine.url={arguments.engine_url}"]
    is_supervised = parent_watch.watch_parent()
    with own_folder(arguments.dir, arguments.name, arguments.join) as (folder, name):
        invitation = invitation_of(arguments, Role(arguments.role), folder, name)
        if invitation.role is Role.REWARD:
            from offbeat.launch.judge_role import judge

            return exit_status(f"judge {name}", asyncio.run(judge(invitation, overrides)))
        from offbeat.launch.worker_role import Site, read_address, work

        if arguments.peer_address and not arguments.site:
            raise UserError("--peer-address needs --site, the name of the site whose workers fetch weights there")
        site = Site(arguments.site, read_address(arguments.peer_address) if arguments.peer_address else None)
        shares_disk = not arguments.fetch_weights
        home = folder.parents[1]  # of a worker that the run itself has started, on the trainer's machine: the run
        working = work(
            *(invitation, overrides, site),
            shares_disk=shares_disk,
            engine_log=arguments.engine_log,
            beside_trainer=home if is_supervised and (home / LEDGER).is_file() else None,
        )
        return exit_status(f"worker {name}", asyncio.run(working))
