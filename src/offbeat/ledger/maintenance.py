"""Backups of the ledger, and pruning.

A backup is a snapshot of the ledger in a folder or behind a URL, read in its own transaction without blocking writers.
Files of large bodies that the target lacks are copied first; then the target's ledger is replaced by a rename. So the
target always holds a whole copy, the previous one or the new one. To restore, copy its files into a run's folder.

Pruning deletes the bytes of trajectories that no resume from a durable checkpoint of step c or later needs. These are
the trajectories that were trained or evaluated before step c, and those that were dropped before the batch of step
c - 1 was trained. Their rows, digests and sums stay. A resume from an older checkpoint is refused if it would train a
batch again whose bytes were deleted.
"""

from __future__ import annotations

import shutil
import sqlite3
import tempfile
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from offbeat.errors import UserError
from offbeat.extras import import_extra
from offbeat.files import fsync_file, fsync_folder
from offbeat.ledger.bodies import FOLDER, UNFINISHED, Blobs
from offbeat.ledger.database import Database
from offbeat.ledger.errors import LedgerError
from offbeat.net import shown

LEDGER = "ledger.sqlite"
PAGES = 1024
"""Pages copied between two pauses (4 MB), so that a backup does not keep the disk busy."""
PAUSE_S = 0.002
MAX_ATTEMPTS = 5
"""Attempts at a backup. If pruning removes a file before it is copied, the next attempt takes a new snapshot, which no
longer names that file."""
NAMED = """
SELECT digest FROM trajectories WHERE body IS NULL AND pruned = 0
UNION ALL SELECT digest FROM partials WHERE body IS NULL AND state = 'kept'
"""
"""Query for the digests of bodies that are stored as files."""


@dataclass(frozen=True)
class Backup:
    num_bytes: int
    """Size of the ledger and of the files copied with it."""
    num_blobs: int
    """Number of files copied; files that the target already had do not count."""


class BackupTarget(Protocol):
    """Folder or URL that holds a backup."""

    def blobs(self) -> set[bytes]:
        """Returns the digests of the bodies that the target already holds."""

    def put_blob(self, digest: bytes, body: bytes) -> None: ...

    def take(self, ledger: Path) -> None:
        """Stores the file `ledger` in the target, where it atomically replaces the ledger of the previous backup."""

    def sweep(self, named: set[bytes]) -> None:
        """Removes all bodies whose digest is not in `named`."""


def _snapshot(path: Path, copy: Path, progress: Callable[[int, int, int], Any] | None = None) -> set[bytes]:
    """Copies a snapshot of the database at `path` to `copy`; returns the digests of the body files that it names."""
    copy.unlink(missing_ok=True)
    with closing(sqlite3.connect(path)) as source, closing(sqlite3.connect(copy)) as made:
        source.execute("BEGIN")
        source.execute("SELECT 1 FROM meta").fetchone()  # the snapshot begins here
        source.backup(made, pages=PAGES, progress=progress, sleep=PAUSE_S)
        made.execute("PRAGMA journal_mode = DELETE")  # a WAL would add a second file
        named = {digest for (digest,) in made.execute(NAMED)}
    fsync_file(copy)
    return named


def _copy_blobs(blobs: Blobs, target: BackupTarget, named: set[bytes]) -> tuple[int, int]:
    missing = sorted(named - target.blobs())
    num_bytes = 0
    for digest in missing:
        body = blobs.read(digest)
        target.put_blob(digest, body)
        num_bytes += len(body)
    return num_bytes, len(missing)


class Folder:
    """Backup target: a folder on this machine or on a network file system."""

    def __init__(self, folder: Path):
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._blobs = folder, Blobs(folder / FOLDER)
        journal = folder / f"{LEDGER}-wal"
        if journal.exists() and journal.stat().st_size:
            raise UserError(
                f"backup folder {folder} holds a ledger in use; give an empty folder, or one with earlier backups"
            )

    def blobs(self) -> set[bytes]:
        return set(self._blobs.all())

    def put_blob(self, digest: bytes, body: bytes) -> None:
        self._blobs.write(digest, body)

    def take(self, ledger: Path) -> None:
        unfinished = self._folder / f"{LEDGER}{UNFINISHED}"
        shutil.copyfile(ledger, unfinished)
        fsync_file(unfinished)
        unfinished.replace(self._folder / LEDGER)
        fsync_folder(self._folder)

    def sweep(self, named: set[bytes]) -> None:
        self._blobs.sweep(named)


class Remote:
    """Backup target: a URL of any file system that fsspec supports."""

    def __init__(self, url: str):
        fsspec = import_extra("fsspec", "remote", f"a backup to {shown(url)}")
        try:
            self._files, self._root = fsspec.core.url_to_fs(url)
        except (ImportError, ValueError) as error:
            raise UserError(f"backup target {shown(url)} cannot be used: {error}") from error

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


SLICE = 1000
"""Number of bodies pruned in one transaction, so that other writers do not wait for the whole pruning."""
PRUNABLE = """
SELECT j.seq, g.id, LENGTH(j.body) FROM groups g INDEXED BY groups_unpruned CROSS JOIN tasks t ON t.group_id = g.id
CROSS JOIN trajectories j ON j.task = t.id
LEFT JOIN batches b ON b.id = g.batch LEFT JOIN evals e ON e.id = g.eval
WHERE (g.state = 'trained' OR g.state = 'evaluated' OR g.state = 'dropped') AND g.num_pruned < g.num_trajectories
AND j.pruned = 0 AND (
    (g.state = 'trained' AND b.step < :before)
    OR (g.purpose = 'eval' AND g.state IN ('evaluated', 'dropped') AND e.step < :before)
    OR (g.purpose = 'train' AND g.state = 'dropped' AND MAX(g.ended_at, j.accepted_at) <= (
        SELECT trained_at FROM batches WHERE state = 'trained' AND step = :before - 1)))
LIMIT :slice
"""


@dataclass(frozen=True)
class Pruned:
    num_bodies: int
    num_bytes: int

    def __add__(self, other: Pruned) -> Pruned:
        return Pruned(self.num_bodies + other.num_bodies, self.num_bytes + other.num_bytes)


class Maintenance(Database):
    def prune(self, step: int, keep: int = 0) -> Pruned:
        """Deletes the bytes of trajectories that no resume from a durable checkpoint of `step` or later needs, except
        those of the last `keep` steps before `step`. Returns the numbers of trajectories and bytes deleted."""
        pruned = Pruned(0, 0)
        while True:
            with self.transaction():
                found = _prune_slice(self, step - keep)
            pruned += found
            if found.num_bodies < SLICE:
                return pruned + Pruned(0, self.sweep())

    def sweep(self) -> int:
        """Removes body files that no row names: the body was pruned, its trajectory was discarded, or the transaction
        that would have named it never committed. Returns the number of bytes freed."""
        return self.blobs.sweep({digest for (digest,) in self.execute(NAMED)})

    def backup(self, target: str | Path) -> Backup:
        """Copies the ledger to a folder or a URL. May be called from any thread while others write."""
        place: BackupTarget = Remote(str(target)) if "://" in str(target) else Folder(Path(target))
        with tempfile.TemporaryDirectory(prefix="backup-", dir=self.path.parent) as scratch:
            copy = Path(scratch) / LEDGER
            for attempt in range(1, MAX_ATTEMPTS + 1):
                named = _snapshot(self.path, copy)
                try:
                    num_bytes, num_blobs = _copy_blobs(self.blobs, place, named)
                    break
                except LedgerError:
                    if attempt == MAX_ATTEMPTS:
                        raise
            num_bytes += copy.stat().st_size
            place.take(copy)
        place.sweep(named)
        return Backup(num_bytes, num_blobs)


def _prune_slice(db: Database, before: int) -> Pruned:
    """Deletes the bytes of up to `SLICE` trajectories that no resume from step `before` or later needs. Bytes stored in
    a file are only marked as pruned; `sweep` deletes the file."""
    rows = db.execute(PRUNABLE, {"before": before, "slice": SLICE}).fetchall()
    db.executemany("UPDATE trajectories SET body = NULL, pruned = 1 WHERE seq = ?", [(seq,) for seq, _, _ in rows])
    num_pruned = Counter(group for _, group, _ in rows)
    db.executemany(
        "UPDATE groups SET num_pruned = num_pruned + ? WHERE id = ?",
        [(count, group) for group, count in num_pruned.items()],
    )
    return Pruned(len(rows), sum(size or 0 for _, _, size in rows))
