"""Joins a run as a member (worker, judge or trainer), with a join token and a folder of its own.

A member uses the run's configuration, except for keys that its own machine decides. Its folder keeps credentials,
configuration, spool and weights. A process that is restarted with the same folder is the same member and needs no new
token.
"""

from __future__ import annotations

import os
import socket
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from json import dumps
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from offbeat.client import credentials as saved
from offbeat.client.connection import Connection
from offbeat.client.http_client import Membership, join, rejoin
from offbeat.config import Config, load, secrets
from offbeat.config.load import typed_keys
from offbeat.config.local_keys import with_local_keys
from offbeat.errors import DeadlineError, RunInterrupted, RunOver, UserError
from offbeat.files import make_folder, readable_by, write_atomic
from offbeat.launch.run_folder import CONFIG, LOCK, FolderInUse, FolderLock
from offbeat.launch.stopping import interruptible
from offbeat.ledger.ledger import Ledger
from offbeat.ledger.workers import Role

READY = "OFFBEAT_READY"
"""Environment variable with the number of a file descriptor. A coordinator that is ready writes its URL and run folder
to this descriptor as a JSON line."""
LOCAL_TOKEN_MINUTES = 5.0
"""Minutes for which the join tokens of child processes on this machine are valid; these processes join at once."""
CREDENTIALS, KEY = "credentials.json", "joining.key"
OVER = "over"
"""End of the name of a file in a member's folder. The file exists if the member has left because its run was over."""
MAX_FOLDERS = 1000


@dataclass(frozen=True)
class Invitation:
    """Command-line options for joining a run."""

    url: str
    role: Role
    folder: Path
    name: str
    token_file: Path | None = None
    ca_file: Path | None = None
    patience_s: float | None = None
    """Seconds for which to retry while the coordinator does not answer; None: no limit."""
    allow_plain: bool = False
    """Whether the member's secret may be sent over a network without TLS."""
    trusts_coordinator: bool = False
    """Whether the coordinator may choose programs, code and folders for this machine (`config.local_keys`)."""
    secrets_file: Path | None = None
    """File with URLs that contain passwords, by configuration key; the coordinator does not send them
    (`config.secrets`)."""


@dataclass(frozen=True)
class JoinedRun:
    """Membership in a run: the connection, the member's name, and the run's name and configuration."""

    connection: Connection
    worker: str
    run: str
    config: Config


def new_token(run: Path, role: str, uses: int = 1) -> str:
    """Returns a new join token, with which `uses` child processes on this machine can join the run in folder `run`."""
    with Ledger(run / "ledger.sqlite", must_exist=True) as ledger, ledger.naming_damage():
        return ledger.issue_token(Role(role), LOCAL_TOKEN_MINUTES, uses)


@asynccontextmanager
async def joined(invitation: Invitation, overrides: Sequence[str]) -> AsyncIterator[JoinedRun]:
    """Joins or rejoins a run, and yields the membership. `overrides` are words of this process's command line that set
    configuration keys."""
    connection = Connection(
        invitation.url,
        ca_file=invitation.ca_file,
        patience_s=invitation.patience_s,
        allow_plain=invitation.allow_plain,
    )
    try:
        member = await _membership(invitation, connection)
        _over_file(invitation).unlink(missing_ok=True)
        config = own_config(invitation, member.config, overrides)
        with readable_by(config.run.access):
            yield JoinedRun(connection, member.credentials.worker, member.credentials.run, config)
    finally:
        await connection.close()


def own_config(invitation: Invitation, sent: Mapping[str, Any], overrides: Sequence[str]) -> Config:
    """Returns the configuration that the coordinator `sent`, with `overrides` and this machine's secrets. If the
    coordinator is not trusted, values that it may not choose for this machine are replaced by defaults. Raises
    `UserError` if the member needs such a value and `overrides` does not set it."""
    file = invitation.folder / f"{invitation.role.value}-{CONFIG}"
    if (given := invitation.secrets_file) is not None and not given.is_file():
        raise UserError(f"--secrets-file {given}: there is no such file")
    kept = {} if given is None else secrets.load(given)
    words = [*(f"--{key}={value}" for key, value in kept.items() if isinstance(value, str)), *overrides]

    def read(data: Mapping[str, Any]) -> Config:
        write_atomic(file, dumps(secrets.shown_value(dict(data)), indent=2).encode(), secrets.PRIVATE)
        return load(file, words)

    if invitation.trusts_coordinator:
        return read(sent)
    return with_local_keys(sent, typed_keys(words), invitation.role.value, read)


async def _membership(invitation: Invitation, connection: Connection) -> Membership:
    file = invitation.folder / f"{invitation.role.value}-{CREDENTIALS}"
    known = saved.load(file)
    if known is not None and known.url == connection.url:
        try:
            return await rejoin(connection, known)
        except UserError:  # another run at this address, or a revoked worker: try a token
            connection.secret = None
        except DeadlineError as error:
            if not _over_file(invitation).exists():
                raise
            if not saved.has_token(invitation.token_file):
                raise RunOver(
                    f"{known.worker}: run {known.run} has ended, and its coordinator does not answer any more; nothing "
                    "is left to do"
                ) from error
            connection.secret = None  # the token is for another run, which will be served here
    with interruptible():  # a person may be asked for it
        token = saved.read_token(invitation.token_file)
    secret = saved.own_secret(invitation.folder / f"{invitation.role.value}-{KEY}", token)
    member = await join(connection, token, invitation.name, secret=secret)
    if member.credentials.role is not invitation.role:
        raise UserError(
            f"{saved.TOKEN_VARIABLE}: the token is for the role {member.credentials.role.value}, not "
            f"{invitation.role.value}; get the right one with: offbeat worker token RUN --role {invitation.role.value}"
        )
    saved.save(file, member.credentials)
    return member


def make_private(path: Path) -> None:
    """Creates a folder that no other user can enter; leaves an existing folder and its permissions as they are."""
    with readable_by("private"):
        make_folder(path)


def report_run_over(invitation: Invitation, member: JoinedRun, what: str, why: RunOver | None = None) -> None:
    """Prints that the run is over, and records it in the member's folder, because the run may no longer be served when
    the member starts again. If `why` says that the run was only interrupted, records nothing, and prints that the
    member must be started again after the resume. `what` is the kind of member, such as "worker"."""
    if isinstance(why, RunInterrupted):
        again = f"start this {what} again after the resume (it needs no token)"
        print(f"{what} {member.worker}: run {member.run} was {why}; {again}", flush=True)
        return
    with suppress(OSError):
        _over_file(invitation).touch()
    print(f"{what} {member.worker}: run {member.run} is over; nothing is left to do", flush=True)


def _over_file(invitation: Invitation) -> Path:
    return invitation.folder / f"{invitation.role.value}-{OVER}"


@contextmanager
def own_folder(directory: str | None, name: str | None, url: str, lock_name: str = LOCK) -> Iterator[tuple[Path, str]]:
    """Locks a folder for a member (worker, judge or trainer); yields the folder and the name to join with.

    If `directory` is None, the folder is in the user's cache, named by `name` or, without a name, by the machine. If
    another process uses this folder, a number is added to the name: the lowest one whose folder is not in use. So a
    restarted worker finds its own folder again.
    """
    if directory is not None:
        path = Path(directory).expanduser().absolute()
        make_private(path)
        lock = FolderLock(path / lock_name)
        name = name or path.name
    else:
        path, name, lock = _first_free(name or socket.gethostname().partition(".")[0], url)
    try:
        yield path, name
    finally:
        lock.release()


def _first_free(name: str, url: str) -> tuple[Path, str, FolderLock]:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    host = urlsplit(url).netloc.replace(":", "-")
    for number in range(1, MAX_FOLDERS):
        numbered = name if number == 1 else f"{name}-{number}"
        path = cache / "offbeat" / host / numbered
        make_private(path)
        with suppress(FolderInUse):
            return path, numbered, FolderLock(path / LOCK)
    raise UserError(
        f"{path.parent}: the folders {name} to {numbered} are all in use by other processes; give another folder with "
        "--dir"
    )
