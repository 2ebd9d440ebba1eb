"""`offbeat worker --join URL`: generates, or with `--role reward` judges, for a run whose coordinator runs elsewhere.
`offbeat worker token | list | revoke` are in `access`."""

from __future__ import annotations

import argparse
import asyncio

from offbeat.cli.parser import Parser
from offbeat.cli.trainer import add_join_arguments, invitation_of, told

ROLES = ("rollout", "reward")


def add_arguments(parser: Parser) -> None:
    add_join_arguments(parser, "worker")
    parser.add_argument(
        "--role", choices=ROLES, default="rollout", help="rollout: generate (the default); reward: judge answers"
    )
    parser.epilog = f"{parser.epilog}\n\nSee also: offbeat worker token --help."


def run(arguments: argparse.Namespace, overrides: list[str]) -> int:
    from offbeat.launch import tether
    from offbeat.launch.joining import own_folder
    from offbeat.ledger.workers import Role

    tether.hold()
    with own_folder(arguments.dir, arguments.name, arguments.join) as (folder, name):
        invitation = invitation_of(arguments, Role(arguments.role), folder, name)
        if invitation.role is Role.REWARD:
            from offbeat.launch.judge import judge

            return told(f"judge {name}", asyncio.run(judge(invitation, overrides)))
        from offbeat.launch.worker import work

        return told(f"worker {name}", asyncio.run(work(invitation, overrides)))
