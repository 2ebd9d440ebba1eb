"""How a worker or a trainer comes to a run: with a token, into a folder of its own, with the run's configuration, of
which it takes what is not its own machine's affair.

Whoever joined keeps what it needs to come back in its folder: credentials, configuration, spool and weights. One that
is started again and finds its folder is the same worker, and needs no token.
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

from offbeat.config import Config, load, secrets
from offbeat.config.load import typed_keys
from offbeat.config.local_keys import own_affairs
from offbeat.errors import DeadlineError, RunOver, UserError
from offbeat.files import make_folder, readable_by, write_atomic
from offbeat.launch.folder import CONFIG, LOCK
from offbeat.launch.lock import FolderLock
from offbeat.ledger.ledger import Ledger
from offbeat.ledger.workers import Role
from offbeat.serve.http import credentials as saved
from offbeat.serve.http.client import Membership, join, rejoin
from offbeat.serve.http.connection import Connection

READY = "OFFBEAT_READY"
"""Names the descriptor to which a coordinator writes, as a line of JSON, where it listens and where its run lies."""
LOCAL_TOKEN_MINUTES = 5.0
"""For children of the same machine: they join at once or not at all."""
CREDENTIALS, KEY = "credentials.json", "joining.key"
OVER = "over"
"""In the folder of one that left because its run was over."""
MAX_PLACES = 1000


@dataclass(frozen=True)
class Invitation:
    """What the command line says about joining."""

    url: str
    role: Role
    folder: Path
    name: str
    token_file: Path | None = None
    ca_file: Path | None = None
    patience_s: float | None = None
    """How long to look for a coordinator that does not answer; None: for ever."""
    allow_plain: bool = False
    """Whether the secret may cross a network in the clear."""
    trusts_coordinator: bool = False
    """Whether the coordinator may choose programs, code and folders for this machine (`config.local_keys`)."""
    secrets_file: Path | None = None
    """URLs with passwords, by key, which the coordinator keeps to itself (`config.secrets`)."""


@dataclass(frozen=True)
class Joined:
    """A member of a run."""

    connection: Connection
    worker: str
    run: str
    config: Config


def new_token(run: Path, role: str) -> str:
    """A token for a child of this machine."""
    with Ledger(run / "ledger.sqlite", must_exist=True) as ledger, ledger.naming_damage():
        return ledger.issue_token(Role(role), LOCAL_TOKEN_MINUTES)


@asynccontextmanager
async def joined(invitation: Invitation, overrides: Sequence[str]) -> AsyncIterator[Joined]:
    """Joins, or comes back; `overrides` say what is different on this machine."""
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
            yield Joined(connection, member.credentials.worker, member.credentials.run, config)
    finally:
        await connection.close()


def own_config(invitation: Invitation, told: Mapping[str, Any], overrides: Sequence[str]) -> Config:
    """What the coordinator told, as far as that is its affair; `overrides` say the rest."""
    file = invitation.folder / f"{invitation.role.value}-{CONFIG}"
    kept = _secrets(invitation.secrets_file) if invitation.secrets_file is not None else {}
    words = [*(f"--{key}={value}" for key, value in kept.items() if isinstance(value, str)), *overrides]

    def read(data: Mapping[str, Any]) -> Config:
        write_atomic(file, dumps(secrets.shown_value(dict(data)), indent=2).encode(), secrets.PRIVATE)
        return load(file, words)

    if invitation.trusts_coordinator:
        return read(told)
    return own_affairs(told, typed_keys(words), invitation.role.value, read)


def _secrets(file: Path) -> dict[str, Any]:
    if not file.is_file():
        raise UserError(f"--secrets-file {file}: no such file")
    return secrets.load(file)


async def _membership(invitation: Invitation, connection: Connection) -> Membership:
    file = invitation.folder / f"{invitation.role.value}-{CREDENTIALS}"
    known = saved.load(file)
    if known is not None and known.url == connection.url:
        try:
            return await rejoin(connection, known)
        except UserError:  # another run at the same address, or a revoked worker: a token may help
            connection.secret = None
        except DeadlineError as error:
            if not _over_file(invitation).exists():
                raise
            raise RunOver(
                f"{known.worker}: run {known.run} was over when this left it; nobody serves it now"
            ) from error
    token = saved.read_token(invitation.token_file)
    secret = saved.own_secret(invitation.folder / f"{invitation.role.value}-{KEY}", token)
    member = await join(connection, token, invitation.name, secret=secret)
    if member.credentials.role is not invitation.role:
        raise UserError(
            f"{saved.TOKEN_VARIABLE}: the token is for a {member.credentials.role.value}, not for a "
            f"{invitation.role.value}; offbeat worker token RUN --role {invitation.role.value} gives one"
        )
    saved.save(file, member.credentials)
    return member


def make_private(path: Path) -> None:
    """Makes a folder that nobody else on this machine can enter; one that is there stays as it is."""
    with readable_by("private"):
        make_folder(path)


def say_over(invitation: Invitation, member: Joined, what: str) -> None:
    """Tells that the run is over, and remembers it for when `what` is started again and nobody serves the run."""
    with suppress(OSError):
        _over_file(invitation).touch()
    print(f"{what} {member.worker}: run {member.run} is over; nothing is left to do", flush=True)


def _over_file(invitation: Invitation) -> Path:
    return invitation.folder / f"{invitation.role.value}-{OVER}"


@contextmanager
def own_folder(directory: str | None, name: str | None, url: str, lock_name: str = LOCK) -> Iterator[tuple[Path, str]]:
    """A folder that no other worker uses now, and the name to join by.

    Unless a folder is named, it is that of the name or the machine, with a number where that one is in use: the first
    free one, so that a worker that is started again comes back to its own.
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
    place = urlsplit(url).netloc.replace(":", "-")
    for number in range(1, MAX_PLACES):
        numbered = name if number == 1 else f"{name}-{number}"
        path = cache / "offbeat" / place / numbered
        make_private(path)
        with suppress(UserError):  # another worker's, who is at work
            return path, numbered, FolderLock(path / LOCK)
    raise UserError(f"{path}: and {MAX_PLACES} more are in use; name a folder with --dir")
