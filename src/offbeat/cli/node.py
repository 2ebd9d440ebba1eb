"""`offbeat node --join URL`: runs and restarts the workers of one machine, and trainer ranks where told so."""

from __future__ import annotations

import argparse
import asyncio
import os
from pathlib import Path
from typing import TYPE_CHECKING

from offbeat.cli.parser import Parser
from offbeat.cli.trainer import exit_status
from offbeat.errors import UserError

if TYPE_CHECKING:
    from offbeat.launch.join_file import JoinFile
    from offbeat.launch.node import GangPart, NodePlan

JOIN_FILE_WITHIN_S = 600.0


def add_arguments(parser: Parser) -> None:
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--join", metavar="URL", help="where the run's coordinator listens")
    where.add_argument(
        "--join-file", metavar="FILE", type=Path, help="from offbeat train --join-file: URL, certificate and token"
    )
    parser.add_argument(
        "--workers", type=int, metavar="N", help="without it, one for each GPU left by the trainer, or one"
    )
    parser.add_argument("--devices", metavar="0,1", help="GPUs to use; without it, all that this process may use")
    parser.add_argument("--name", help="this node's name; without it, that of its folder or of the machine")
    parser.add_argument("--dir", metavar="FOLDER", help="this node's folder; without it, below ~/.cache/offbeat")
    parser.add_argument("--logs", metavar="FOLDER", type=Path, help="folder of logs; without it, logs in --dir")
    parser.add_argument(
        "--token-file", metavar="FILE", type=Path, help="a join token for as many workers, if not in OFFBEAT_TOKEN"
    )
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
    parser.add_argument("--secrets-file", metavar="FILE", type=Path, help="URLs with passwords, by key")
    parser.add_argument("--ranks", type=int, default=0, metavar="N", help="trainer ranks on this machine (default: 0)")
    parser.add_argument(
        "--trainer-token-file", metavar="FILE", type=Path, help="with --ranks: a join token of the role trainer"
    )
    parser.add_argument("--num-ranks", type=int, metavar="N", help="trainer ranks on all machines together")
    parser.add_argument("--first-rank", type=int, default=0, metavar="N", help="number of the first rank here")
    parser.add_argument("--meet", metavar="HOST:PORT", help="where ranks of several machines meet, on rank 0's machine")
    parser.epilog = (
        "Keys that concern only this machine can be given as --section.key value, such as --rollout.slots 64 or "
        "--model.path /models/here."
    )


def run(arguments: argparse.Namespace, overrides: list[str]) -> int:
    from offbeat.client.credentials import TOKEN_VARIABLE
    from offbeat.launch import gpus, join_file, parent_watch
    from offbeat.launch.joining import own_folder
    from offbeat.launch.node import Node, NodePlan

    parent_watch.watch_parent()
    gang = _gang(arguments)
    devices = gpus.chosen_gpus(arguments.devices)
    if gang.num_here and devices and len(devices) < gang.num_here:
        raise UserError(f"--ranks {gang.num_here}: each rank takes a GPU, and there are {len(devices)} here")
    if arguments.workers is not None and arguments.workers < 0:
        raise UserError(f"--workers {arguments.workers}: give 0 or more")
    known = None
    if arguments.join_file is not None:
        patience_s = JOIN_FILE_WITHIN_S if arguments.patience is None else arguments.patience
        known = join_file.read(arguments.join_file.expanduser(), patience_s)
    url = known.url if known else arguments.join
    tokens = _tokens(arguments, known, has_rank_0=gang.num_here > 0 and gang.first == 0)
    os.environ.pop(TOKEN_VARIABLE, None)  # only children that need it get it
    with own_folder(arguments.dir, arguments.name, url, "node.lock") as (folder, name):
        if folder.stat().st_uid != os.getuid():
            raise UserError(
                f"--dir {folder}: belongs to another user, who could read secrets in it; give another folder"
            )
        ca_file = arguments.ca_file.expanduser().absolute() if arguments.ca_file else None
        if known and known.certificate:
            ca_file = folder / "coordinator.pem"
            ca_file.write_text(known.certificate)
        per_worker = known.gpus_per_worker if known else _typed_tensor_parallel(overrides)
        num_left = len(devices) - gang.num_here if devices else 0
        num_workers = arguments.workers
        if num_workers is None:
            num_workers = num_left // per_worker if devices else int(gang.num_here == 0)
        if devices and num_workers and num_left < per_worker:
            raise UserError(
                f"--workers {num_workers}: a worker takes {per_worker} GPU{'s' * (per_worker > 1)}, and {num_left} "
                "are left here"
            )
        if not num_workers and not gang.num_here:
            raise UserError("nothing to run here: give --workers or --ranks")
        join = ["--join", url]
        join += ["--ca-file", str(ca_file)] if ca_file else []
        join += ["--patience", f"{arguments.patience:g}"] if arguments.patience is not None else []
        join += ["--allow-plain"] if arguments.allow_plain or (known and known.allow_plain) else []
        join += ["--trust-coordinator"] if arguments.trust_coordinator else []
        join += ["--secrets-file", str(arguments.secrets_file.absolute())] if arguments.secrets_file else []
        plan = NodePlan(name, num_workers, devices, per_worker, gang)
        logs = arguments.logs.expanduser().absolute() if arguments.logs else folder / "logs"
        node = Node(plan, folder, logs, join, tokens, overrides)
        print(f"node {name}: {_what(plan)} for {url}; logs in {logs}", flush=True)
        why = asyncio.run(node.run_to_end())
        print(f"node {name}: {'all of its processes have ended' if why is None else f'stopped: {why}'}", flush=True)
        return exit_status(f"node {name}", why)


def _what(plan: NodePlan) -> str:
    ranks, workers = plan.gang.num_here, plan.num_workers
    parts = [f"{ranks} trainer rank{'s' * (ranks > 1)}"] if ranks else []
    parts += [f"{workers} worker{'s' * (workers > 1)}"] if workers else []
    on = f" on GPU {','.join(plan.gpus)}" if plan.gpus else " on the CPU"
    return " and ".join(parts) + on


def _tokens(arguments: argparse.Namespace, known: JoinFile | None, *, has_rank_0: bool) -> dict[str, str]:
    """Returns join tokens by role. A node whose children have joined before needs none."""
    from offbeat.client import credentials

    tokens = {}
    if known is not None:
        tokens["rollout"] = known.token
    elif credentials.has_token(arguments.token_file):
        tokens["rollout"] = credentials.read_token(arguments.token_file)
    if has_rank_0 and arguments.trainer_token_file is not None:
        tokens["trainer"] = credentials.read_token(arguments.trainer_token_file)
    return tokens


def _gang(arguments: argparse.Namespace) -> GangPart:
    from offbeat.launch.node import GangPart
    from offbeat.launch.worker_role import read_address

    here, first = arguments.ranks, arguments.first_rank
    total = arguments.num_ranks if arguments.num_ranks is not None else here
    if here < 0 or first < 0 or first + here > total:
        raise UserError(
            f"--ranks {here} --first-rank {first} --num-ranks {total}: the ranks here must be among all of them"
        )
    if total > here and here and arguments.meet is None:
        raise UserError(f"--num-ranks {total}: ranks on several machines need --meet HOST:PORT, on rank 0's machine")
    meet = read_address(arguments.meet, "--meet") if arguments.meet else None
    return GangPart(here, total, first, meet)


def _typed_tensor_parallel(overrides: list[str]) -> int:
    from offbeat.config.load import typed_keys

    text = typed_keys(overrides).get("engine.tensor_parallel") or "1"
    return int(text) if text.isdecimal() and int(text) else 1
