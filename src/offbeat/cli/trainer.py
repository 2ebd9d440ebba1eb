"""`offbeat trainer --join URL`: trains for a run whose coordinator runs elsewhere."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from offbeat.cli.main import STOPPED
from offbeat.cli.parser import Parser
from offbeat.errors import RunStopped

if TYPE_CHECKING:
    from offbeat.launch.joining import Invitation
    from offbeat.ledger.workers import Role


def add_join_arguments(parser: Parser, what: str) -> None:
    parser.add_argument("--join", metavar="URL", required=True, help="where the run's coordinator listens")
    parser.add_argument("--name", help=f"this {what}'s name; without it, that of its folder or of the machine")
    parser.add_argument("--dir", metavar="FOLDER", help=f"this {what}'s folder; without it, below ~/.cache/offbeat")
    parser.add_argument("--token-file", metavar="FILE", type=Path, help="a join token, if not in OFFBEAT_TOKEN")
    parser.add_argument("--ca-file", metavar="FILE", type=Path, help="certificate to trust besides the system's")
    parser.add_argument(
        "--patience", metavar="SECONDS", type=float, help="how long to look for a coordinator; without it, for ever"
    )
    parser.add_argument(
        "--allow-plain", action="store_true", help="send secrets without TLS, as within a private network"
    )
    parser.add_argument(
        "--trust-coordinator", action="store_true", help="let it choose programs, code and folders of this machine"
    )
    parser.add_argument(
        "--secrets-file", metavar="FILE", type=Path, help="URLs with passwords, by key, such as a run's secrets.json"
    )
    parser.epilog = (
        "Keys that concern only this machine can be given as --section.key value, such as --model.device cuda:1, "
        "--model.path /models/here or --run.threads 8."
    )


def invitation_of(arguments: argparse.Namespace, role: Role, folder: Path, name: str) -> Invitation:
    """Returns the `Invitation` (the way to join a run) that the arguments of `add_join_arguments` describe."""
    from offbeat.launch.joining import Invitation

    return Invitation(
        url=arguments.join,
        role=role,
        folder=folder,
        name=name,
        token_file=arguments.token_file,
        ca_file=arguments.ca_file,
        patience_s=arguments.patience,
        allow_plain=arguments.allow_plain,
        trusts_coordinator=arguments.trust_coordinator,
        secrets_file=arguments.secrets_file,
    )


def add_arguments(parser: Parser) -> None:
    add_join_arguments(parser, "trainer")
    parser.add_argument(
        "--from-scratch", action="store_true", help="without a checkpoint, undo all steps of the run and begin again"
    )


def run(arguments: argparse.Namespace, overrides: list[str]) -> int:
    from offbeat.launch import parent_watch
    from offbeat.launch.joining import own_folder
    from offbeat.launch.trainer_role import follow_rank_0, train
    from offbeat.ledger.workers import Role

    parent_watch.watch_parent()
    place = None
    if os.environ.get("WORLD_SIZE", "1") != "1":
        from offbeat.trainer.ranks import RankPlace

        place = RankPlace.of(os.environ)
    if place is not None and place.rank:
        follow_rank_0(place, overrides)
        return 0
    with own_folder(arguments.dir, arguments.name or "trainer", arguments.join, "trainer.lock") as (folder, name):
        invitation = invitation_of(arguments, Role.TRAINER, folder, name)
        run_folder = folder if (folder / "ledger.sqlite").is_file() else None  # it is the coordinator's own
        try:
            work = train(invitation, overrides, run_folder, from_scratch=arguments.from_scratch, place=place)
            return exit_status("trainer", asyncio.run(work))
        except RunStopped as error:
            print(f"offbeat: {error}", file=sys.stderr)
            return STOPPED


def exit_status(what: str, stopped_by: str | None) -> int:
    """Returns the exit status of a trainer or worker: 128 plus the signal's number if `stopped_by` names one, else
    0."""
    if stopped_by is None or stopped_by not in signal.Signals.__members__:
        return 0
    print(f"offbeat: {what} stopped by {stopped_by}", file=sys.stderr)
    return 128 + signal.Signals[stopped_by]
