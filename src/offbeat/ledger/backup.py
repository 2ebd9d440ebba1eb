"""A copy of the ledger in a folder or behind a URL, made while the run goes on.

The copy is one moment of the ledger: it is read in a transaction of its own, page by page, and whoever writes meanwhile
does not wait. Files of large bodies are copied before the ledger that names them, and only those that are not there
yet; the ledger takes its place by a rename. So at every moment the target holds a whole copy, the one before or the new
one. To restore, copy the target's files back into a run's folder.
"""

from __future__ import annotations

import os
import sqlite3
import tempfile
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from offbeat.errors import UserError
from offbeat.extras import import_extra
from offbeat.ledger.blobs import FOLDER, UNFINISHED, Blobs, sync_folder
from offbeat.ledger.errors import LedgerError
from offbeat.redact import shown

LEDGER = "ledger.sqlite"
PAGES = 1024
"""Four megabytes at a time, so that a copy leaves the disk to the run in between."""
PAUSE_S = 0.002
MAX_ATTEMPTS = 5
"""Pruning may remove a file that a copy was about to take; the next copy does not name it any more."""
NAMED = """
SELECT digest FROM trajectories WHERE body IS NULL AND pruned = 0
UNION SELECT digest FROM partials WHERE body IS NULL AND state = 'kept'
"""


@dataclass(frozen=True)
class Backup:
    num_bytes: int
    """Of the ledger and of the files copied with it."""
    num_blobs: int
    """Files copied; those that were there already are not counted."""


class Place(Protocol):
    """Where a copy lies."""

    def blobs(self) -> set[bytes]:
        """The digests of the files that are there."""

    def put_blob(self, digest: bytes, body: bytes) -> None: ...

    def take(self, ledger: Path) -> None:
        """Puts a new copy of the ledger in the place of the one before, in one go."""

    def sweep(self, named: set[bytes]) -> None:
        """Removes the files of bodies that the ledger does not name any more."""


def backup(path: Path, target: str | Path) -> Backup:
    """Copies the ledger at `path` to a folder or a URL; safe to call from any thread, beside any writer."""
    place: Place = Remote(str(target)) if "://" in str(target) else Folder(Path(target))
    with tempfile.TemporaryDirectory(prefix="backup-", dir=path.parent) as scratch:
        copy = Path(scratch) / LEDGER
        for attempt in range(1, MAX_ATTEMPTS + 1):
            named = _snapshot(path, copy)
            try:
                num_bytes, num_blobs = _copy_blobs(Blobs(path.parent / FOLDER), place, named)
                break
            except LedgerError:
                if attempt == MAX_ATTEMPTS:
                    raise
        num_bytes += copy.stat().st_size
        place.take(copy)
    place.sweep(named)
    return Backup(num_bytes, num_blobs)


def _snapshot(path: Path, copy: Path, progress: Callable[[int, int, int], Any] | None = None) -> set[bytes]:
    """Copies one moment of the database into a file of its own; returns the digests of the files that it names."""
    copy.unlink(missing_ok=True)
    with closing(sqlite3.connect(path)) as source, closing(sqlite3.connect(copy)) as made:
        source.execute("BEGIN")
        source.execute("SELECT 1 FROM meta").fetchone()  # from here on writers do not change what is read
        source.backup(made, pages=PAGES, progress=progress, sleep=PAUSE_S)
        made.execute("PRAGMA journal_mode = DELETE")  # one file is all there is, whoever opens it to read
        named = {digest for (digest,) in made.execute(NAMED)}
    with copy.open("rb") as file:
        os.fsync(file.fileno())
    return named


def _copy_blobs(blobs: Blobs, place: Place, named: set[bytes]) -> tuple[int, int]:
    missing = sorted(named - place.blobs())
    num_bytes = 0
    for digest in missing:
        body = blobs.read(digest)
        place.put_blob(digest, body)
        num_bytes += len(body)
    return num_bytes, len(missing)


class Folder:
    """A folder on this machine, or on a network file system."""

    def __init__(self, folder: Path):
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._blobs = folder, Blobs(folder / FOLDER)
        journal = folder / f"{LEDGER}-wal"
        if journal.exists() and journal.stat().st_size:
            raise UserError(f"{folder}: somebody writes to the ledger there; give an empty folder or one of backups")

    def blobs(self) -> set[bytes]:
        return set(self._blobs.all())

    def put_blob(self, digest: bytes, body: bytes) -> None:
        self._blobs.write(digest, body)

    def take(self, ledger: Path) -> None:
        unfinished = self._folder / f"{LEDGER}{UNFINISHED}"
        with ledger.open("rb") as source, unfinished.open("wb") as file:
            while piece := source.read(1 << 20):
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(self._folder / LEDGER)
        sync_folder(self._folder)

    def sweep(self, named: set[bytes]) -> None:
        self._blobs.sweep(named)


class Remote:
    """Whatever fsspec knows how to reach."""

    def __init__(self, url: str):
        fsspec = import_extra("fsspec", "remote", f"a backup to {shown(url)}")
        try:
            self._files, self._root = fsspec.core.url_to_fs(url)
        except (ImportError, ValueError) as error:
            raise UserError(f"{shown(url)}: cannot be used as a target: {error}") from error

    def blobs(self) -> set[bytes]:
        return {bytes.fromhex(name) for name in self._names()}

    def _names(self) -> list[str]:
        folder = f"{self._root}/{FOLDER}"
        found = self._files.find(folder) if self._files.exists(folder) else []
        return [path.rsplit("/", 1)[-1] for path in found if not path.endswith(UNFINISHED)]

    def _path(self, digest: bytes) -> str:
        return f"{self._root}/{FOLDER}/{digest.hex()[:2]}/{digest.hex()}"

    def put_blob(self, digest: bytes, body: bytes) -> None:
        path = self._path(digest)
        self._files.makedirs(path.rsplit("/", 1)[0], exist_ok=True)
        self._files.pipe_file(path + UNFINISHED, body)
        self._files.mv(path + UNFINISHED, path)

    def take(self, ledger: Path) -> None:
        self._files.makedirs(self._root, exist_ok=True)
        unfinished = f"{self._root}/{LEDGER}{UNFINISHED}"
        self._files.put_file(str(ledger), unfinished)
        self._files.mv(unfinished, f"{self._root}/{LEDGER}")

    def sweep(self, named: set[bytes]) -> None:
        for digest in self.blobs() - named:
            self._files.rm_file(self._path(digest))
