"""How a worker or a trainer comes to a run: with a token, into a folder of its own, with the run's configuration.

Whoever joined keeps what it needs to come back in its folder: credentials, configuration, spool and weights. One that
is started again and finds its folder is the same worker, and needs no token.
"""

from __future__ import annotations

import os
import socket
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from json import dumps
from pathlib import Path
from urllib.parse import urlsplit

from offbeat.config import Config, load
from offbeat.errors import DeadlineError, RunOver, UserError
from offbeat.files import write_atomic
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
CREDENTIALS = "credentials.json"
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


@dataclass(frozen=True)
class Joined:
    """A member of a run."""

    connection: Connection
    worker: str
    run: str
    config: Config


def new_token(run: Path, role: str) -> str:
    """A token for a child of this machine."""
    with Ledger(run / "ledger.sqlite") as ledger, ledger.naming_damage():
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
        file = invitation.folder / f"{member.credentials.role.value}-{CONFIG}"
        write_atomic(file, dumps(dict(member.config), indent=2).encode())
        config = load(file, list(overrides))
        yield Joined(connection, member.credentials.worker, member.credentials.run, config)
    finally:
        await connection.close()


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
    member = await join(connection, saved.read_token(invitation.token_file), invitation.name)
    if member.credentials.role is not invitation.role:
        raise UserError(
            f"{saved.TOKEN_VARIABLE}: the token is for a {member.credentials.role.value}, not for a "
            f"{invitation.role.value}; offbeat worker token RUN --role {invitation.role.value} gives one"
        )
    saved.save(file, member.credentials)
    return member


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
        path.mkdir(parents=True, exist_ok=True)
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
        path.mkdir(parents=True, exist_ok=True)
        with suppress(UserError):  # another worker's, who is at work
            return path, numbered, FolderLock(path / LOCK)
    raise UserError(f"{path}: and {MAX_PLACES} more are in use; name a folder with --dir")
