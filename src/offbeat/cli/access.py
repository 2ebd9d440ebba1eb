"""`offbeat worker token | list | revoke`: controls which workers may join a run.

These commands use the run's ledger directly. A running coordinator sees changes at once.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from offbeat.cli.chosen_run import RUN_HELP, chosen_run, is_run
from offbeat.cli.ledger import span
from offbeat.config.schema import RolloutConfig
from offbeat.errors import UserError
from offbeat.launch.run_folder import ADDRESS, has_finished, stored_config
from offbeat.spelling import nearest

if TYPE_CHECKING:
    from offbeat.cli.parser import Parser
    from offbeat.ledger.ledger import Ledger
    from offbeat.ledger.workers import WorkerRecord

ACTIONS = {
    "token": "print a token with which one worker can join, once, or several with --uses",
    "list": "list the workers that have joined",
    "revoke": "make a worker's secret invalid",
}
ROLES = ("rollout", "reward", "trainer")
DEFAULT_MINUTES = 15.0


def add_arguments(parser: Parser) -> None:
    parser.add_argument(
        "action", choices=list(ACTIONS), help="; ".join(f"{name}: {text}" for name, text in ACTIONS.items())
    )
    parser.add_argument("run", metavar="RUN", nargs="?", help=RUN_HELP)
    parser.add_argument("name", metavar="NAME", nargs="?", help="with revoke: the worker")
    parser.add_argument("--role", choices=ROLES, help="with token: what the worker may do (default: rollout)")
    parser.add_argument(
        "--minutes", type=float, help=f"with token: how long it can be used (default: {DEFAULT_MINUTES:g})"
    )
    parser.add_argument("--uses", type=int, metavar="N", help="with token: how many workers it lets in (default: 1)")
    parser.add_argument("--reason", help="with revoke: the reason to give to the worker")
    parser.add_argument("--json", action="store_true", help="with list: one line of JSON")


def run(arguments: argparse.Namespace, overrides: list[str]) -> int:
    if arguments.action == "revoke" and arguments.name is None and arguments.run and not is_run(arguments.run):
        arguments.run, arguments.name = None, arguments.run  # offbeat worker revoke NAME
    _check(arguments)
    folder = chosen_run(arguments.run)
    if arguments.action == "token":
        minutes = DEFAULT_MINUTES if arguments.minutes is None else arguments.minutes
        uses = 1 if arguments.uses is None else arguments.uses
        return issue_token(folder, arguments.role or "rollout", minutes, uses)
    if arguments.action == "list":
        return list_workers(folder, as_json=arguments.json)
    return revoke(folder, arguments.name, arguments.reason)


def issue_token(folder: Path, role: str = "rollout", minutes: float = DEFAULT_MINUTES, uses: int = 1) -> int:
    """Prints a join token for `uses` workers, valid for `minutes`, and nothing else, so that the output can be
    piped."""
    from offbeat.ledger.workers import Role

    with _ledger(folder) as ledger, ledger.naming_damage():
        _check_joinable(folder)
        token = ledger.issue_token(Role(role), minutes, uses)
    print(token)
    return 0


def list_workers(folder: Path, *, as_json: bool = False) -> int:
    with _ledger(folder, read_only=True) as ledger, ledger.naming_damage():
        rollout = stored_config(folder).get("rollout", {})
        found = ledger.list_workers(rollout.get("lease_s", RolloutConfig().lease_s))
    if as_json:
        print(json.dumps([asdict(worker) for worker in found]))
    else:
        print("\n".join(_lines(found, is_finished=has_finished(folder))))
    return 0


def revoke(folder: Path, name: str, reason: str | None = None) -> int:
    from offbeat.ledger.errors import Unknown
    from offbeat.ledger.workers import WorkerState

    with _ledger(folder) as ledger, ledger.naming_damage():
        try:
            ledger.move_worker(name, WorkerState.REVOKED, reason)
        except Unknown:
            near = nearest(name, [worker.name for worker in ledger.list_workers()])
            hint = f"did you mean {near}?" if near else f"offbeat worker list {folder} lists its workers"
            raise UserError(f"worker {name} never joined the run {folder}; {hint}") from None
    print(f"worker {name} is revoked")
    return 0


def _check(arguments: argparse.Namespace) -> None:
    """Raises `UserError` for options that do not apply to the action."""
    belongs = {
        "name": "revoke",
        "reason": "revoke",
        "role": "token",
        "minutes": "token",
        "uses": "token",
        "json": "list",
    }
    for name, action in belongs.items():
        if getattr(arguments, name) not in (None, False) and arguments.action != action:
            shown = name.upper() if name == "name" else f"--{name}"
            raise UserError(f"{shown} goes with offbeat worker {action}, not with offbeat worker {arguments.action}")
    if arguments.action == "revoke" and not arguments.name:
        raise UserError("a worker's NAME is missing; offbeat worker list prints the names")


def _check_joinable(folder: Path) -> None:
    """Raises `UserError` if no worker could use a token for the run."""
    if has_finished(folder):
        raise UserError(
            f"{folder}: the run has finished, so nobody can join it; to continue it, run offbeat train --resume "
            f"{folder} --run.steps N"
        )
    if not (folder / ADDRESS).is_file():
        raise UserError(
            f"{folder}: no coordinator listens for workers (the run is one process, or is still starting); to let "
            f"workers join, wait until it has ended, then run offbeat train --resume {folder} --rollout.workers 1"
        )


def _ledger(folder: Path, *, read_only: bool = False) -> Ledger:
    file = folder / "ledger.sqlite"
    if not file.is_file():
        if (folder / "config.json").is_file():
            raise UserError(f"{folder} holds no ledger yet; wait until its coordinator has started")
        raise UserError(f"{folder} holds no ledger; give the folder of a run, such as runs/NAME")
    from offbeat.ledger.ledger import Ledger

    return Ledger(file, read_only=read_only, must_exist=True)


def _lines(found: list[WorkerRecord], *, is_finished: bool) -> list[str]:
    if not found:
        return ["no worker has joined; offbeat worker token RUN prints a token to join with"]
    head = f"{'worker':<24} {'role':<8} {'state':<12} {'leased':>6}  {'tokens audited':>14}  {'log-prob off':>12}"
    lines = [f"{head}  {'joined':<16}  last seen"]
    for worker in found:
        joined = time.strftime("%Y-%m-%d %H:%M", time.localtime(worker.joined_at))
        seen = "-" if worker.last_seen_at is None else f"{span(time.time() - worker.last_seen_at)} ago"
        figures = f"{worker.num_leased:>6,}  {worker.num_compared:>14,}  {worker.num_off:>12,}"
        reason = f"  ({worker.reason})" if worker.reason else ""
        state = _state(worker, is_finished=is_finished)
        lines.append(f"{worker.name:<24} {worker.role:<8} {state:<12} {figures}  {joined}  {seen}{reason}")
    return lines


def _state(worker: WorkerRecord, *, is_finished: bool) -> str:
    if not worker.is_away:
        return worker.state
    return "finished" if is_finished and worker.role == "trainer" else "away"
