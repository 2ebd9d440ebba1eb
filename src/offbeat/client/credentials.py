"""Stores the credentials of a worker, judge or trainer on disk, so that it keeps its name when it restarts; reads
join tokens."""

from __future__ import annotations

import getpass
import os
import sys
from collections.abc import Mapping
from pathlib import Path

import msgspec
from blake3 import blake3

from offbeat.errors import UserError
from offbeat.files import create_atomic, write_atomic
from offbeat.ledger.workers import Role

TOKEN_VARIABLE = "OFFBEAT_TOKEN"
HOW_TO_GET_ONE = "to get one, run offbeat worker token RUN on the coordinator's machine"


class Credentials(msgspec.Struct, frozen=True):
    """Identity and secret of a member of a run (worker, judge or trainer). `repr` hides the secret."""

    url: str
    worker: str
    secret: str
    role: Role
    run: str

    def __repr__(self) -> str:
        return f"Credentials(url={self.url!r}, worker={self.worker!r}, role={self.role.value!r}, run={self.run!r})"


def load(path: Path) -> Credentials | None:
    """Returns the saved credentials; None if the file does not exist."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UserError(
            f"{path}: the worker's credentials cannot be read: {error.strerror}; check owner and permissions"
        ) from error
    if path.stat().st_mode & 0o077:
        raise UserError(f"{path}: other users can read the secret in it; run chmod 600 {path}")
    try:
        return msgspec.json.decode(data, type=Credentials)
    except msgspec.DecodeError as error:
        raise UserError(
            f"{path}: holds no credentials ({error}); delete this file and join with a new token"
        ) from error


def save(path: Path, credentials: Credentials) -> None:
    """Writes credentials to a file that no other user can read at any moment."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, msgspec.json.format(msgspec.json.encode(credentials)), mode=0o600)
    except OSError as error:
        raise UserError(
            f"{path}: the worker's credentials cannot be written: {error.strerror}; check owner and permissions"
        ) from error


def own_secret(path: Path, token: str) -> str:
    """Returns the secret to join with `token`, derived from the token and a key in the file at `path`. A worker that
    was killed while joining gets the same secret at its next attempt, and is therefore the same worker."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            create_atomic(path, os.urandom(blake3.key_size).hex().encode(), mode=0o600)
        return blake3(token.encode(), key=bytes.fromhex(path.read_text())).hexdigest()
    except OSError as error:
        raise UserError(
            f"{path}: the key for joining cannot be read or written: {error.strerror}; check owner and permissions"
        ) from error
    except ValueError:  # the message could quote the key
        raise UserError(f"{path}: holds no key for joining; delete this file, and join with a new token") from None


def has_token(file: Path | None, environment: Mapping[str, str] = os.environ) -> bool:
    """Whether `read_token` finds a join token without asking a person."""
    return file is not None or bool(environment.get(TOKEN_VARIABLE, "").strip())


def read_token(file: Path | None, environment: Mapping[str, str] = os.environ) -> str:
    """Returns the join token from `file`. If `file` is None, takes it from the environment, or else from a person at
    the terminal, but never from the command line, which other users can read."""
    if file is None:
        token = environment.get(TOKEN_VARIABLE, "").strip()
        if not token and sys.stdin is not None and sys.stdin.isatty():
            token = getpass.getpass(f"join token ({HOW_TO_GET_ONE}): ").strip()
        if not token:
            raise UserError(f"{TOKEN_VARIABLE} is not set; set it to a join token ({HOW_TO_GET_ONE})")
        return token
    try:
        token = file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{file}: the join token cannot be read from this file: {error}") from error
    if not token:
        raise UserError(f"{file} is empty; put a join token there ({HOW_TO_GET_ONE})")
    return token
