"""`offbeat worker --join URL`: generates for a run whose coordinator runs elsewhere. `offbeat worker token | list |
revoke` are in `access`."""

from __future__ import annotations

import argparse
import asyncio

from offbeat.cli.parser import Parser
from offbeat.cli.trainer import add_join_arguments, told


def add_arguments(parser: Parser) -> None:
    add_join_arguments(parser, "worker")
    parser.epilog = f"{parser.epilog}\n\nSee also: offbeat worker token --help."


def run(arguments: argparse.Namespace, overrides: list[str]) -> int:
    from offbeat.launch import tether
    from offbeat.launch.joining import Invitation, own_folder
    from offbeat.launch.worker import work
    from offbeat.ledger.workers import Role

    tether.hold()
    with own_folder(arguments.dir, arguments.name, arguments.join) as (folder, name):
        invitation = Invitation(
            url=arguments.join,
            role=Role.ROLLOUT,
            folder=folder,
            name=name,
            token_file=arguments.token_file,
            ca_file=arguments.ca_file,
            patience_s=arguments.patience,
        )
        return told(f"worker {name}", asyncio.run(work(invitation, overrides)))
