"""Bodies of trajectories: their encoded bytes, and a cache of recent ones.

A short body is stored in its row, a long one in a file (`Blobs`); only `store` and `read` know which. A submitted
trajectory stays in the cache because it is soon scored and claimed. The cache key is the digest of the bytes and the
arrays are read-only, so a cached trajectory never differs from the stored one.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from sqlite3 import Cursor

from blake3 import blake3

from offbeat.files import cannot_write, fsync_file, fsync_folder
from offbeat.ledger.errors import Damaged, LedgerError
from offbeat.trajectory import Trajectory

MAX_KEPT_BYTES = 32_000_000
"""Largest size of the cache: enough for one step of long answers, or several steps of short ones."""
OVERHEAD_BYTES = 4000
"""Memory that a cached trajectory takes besides its body."""
MAX_ROW_BYTES = 256 * 1024
"""Largest body stored in its table row; larger bodies would fill the database's pages, and every scan would read
them."""


def store(blobs: Blobs, digest: bytes, body: bytes) -> bytes | None:
    """Returns the value for a row's `body` column: `body` itself, or None if it is long and was written to a file."""
    if len(body) <= MAX_ROW_BYTES:
        return body
    blobs.write(digest, body)
    return None


def read(blobs: Blobs, digest: bytes, body: bytes | None) -> bytes:
    """Returns the bytes of a body from its row's `body` column, or from its file if the column is None."""
    return blobs.read(digest) if body is None else body


def load(blobs: Blobs, digest: bytes | None, body: bytes | None) -> Trajectory | None:
    """Decodes a trajectory from its row's `digest` and `body` columns; None if `digest` is None."""
    return None if digest is None else Trajectory.decode(read(blobs, digest, body))


class Bodies:
    """Loads trajectories, through a cache of at most `max_kept_bytes`."""

    def __init__(self, execute: Callable[..., Cursor], blobs: Blobs, max_kept_bytes: int = MAX_KEPT_BYTES):
        self._execute, self._blobs, self._max_kept_bytes = execute, blobs, max_kept_bytes
        self._kept: OrderedDict[bytes, tuple[int, bytes | Trajectory]] = OrderedDict()
        """Cached size and content by digest; the content is the body, or the trajectory once it was decoded."""
        self._num_kept_bytes = 0

    def keep(self, digest: bytes, body: bytes) -> None:
        if digest in self._kept:
            return
        num_bytes = OVERHEAD_BYTES + len(body)
        self._kept[digest] = num_bytes, body
        self._num_kept_bytes += num_bytes
        while self._num_kept_bytes > self._max_kept_bytes:
            _, (num_bytes, _) = self._kept.popitem(last=False)
            self._num_kept_bytes -= num_bytes

    def load(self, wanted: Sequence[tuple[int, bytes]]) -> dict[int, Trajectory]:
        """Loads trajectories, given as pairs of `seq` (row number) and digest. Returns them by `seq`, in the same
        order."""
        kept = [self._find(digest) for _, digest in wanted]
        others = self._read([seq for (seq, _), found in zip(wanted, kept, strict=True) if found is None])
        return {seq: found or others[seq] for (seq, _), found in zip(wanted, kept, strict=True)}

    def _read(self, wanted: Sequence[int]) -> dict[int, Trajectory]:
        if not wanted:
            return {}
        found: dict[int, Trajectory] = {}
        query = """SELECT seq, task, digest, body, pruned FROM trajectories
                   WHERE seq IN (SELECT value FROM json_each(?))"""
        for seq, task, digest, body, is_pruned in self._execute(query, (json.dumps(wanted),)):
            if is_pruned:
                raise LedgerError(f"the trajectory of task {task} was pruned, so its tokens are no longer stored")
            found[seq] = Trajectory.restore(read(self._blobs, digest, body))
        return found

    def _find(self, digest: bytes) -> Trajectory | None:
        num_bytes, kept = self._kept.get(digest, (0, None))
        if isinstance(kept, bytes):
            kept = Trajectory.restore(kept)
            self._kept[digest] = num_bytes, kept
        return kept


FOLDER = "blobs"
UNFINISHED = ".new"


class Blobs:
    """Large bodies as files beside the ledger, named by the digest of their bytes: `blobs/ab/DIGEST`.

    Guarantees: after `write`, the file and its folder entry survive a power cut, so a transaction that names the file
    may commit. `read` returns the bytes that were written, or raises. The name depends only on the content, so a
    repeated write is harmless. A crash before the commit leaves at most a file that no row names; `sweep` removes it.
    """

    def __init__(self, folder: Path):
        self.folder = folder

    def path(self, digest: bytes) -> Path:
        name = digest.hex()
        return self.folder / name[:2] / name

    def write(self, digest: bytes, body: bytes) -> None:
        path = self.path(digest)
        try:
            if not path.parent.is_dir():
                path.parent.mkdir(parents=True)
                fsync_folder(self.folder.parent)
                fsync_folder(self.folder)
            if not path.exists():
                unfinished = path.with_name(path.name + UNFINISHED)
                unfinished.write_bytes(body)
                fsync_file(unfinished)
                unfinished.replace(path)
            fsync_folder(path.parent)  # also for an existing file: the process that renamed it may have died here
        except OSError as error:
            raise Damaged(str(cannot_write(path, error))) from error

    def read(self, digest: bytes) -> bytes:
        path = self.path(digest)
        try:
            body = path.read_bytes()
        except OSError as error:
            raise LedgerError(
                f"trajectory file {path} cannot be read ({error.strerror}); restore it from a backup"
            ) from error
        if blake3(body).digest() != digest:
            raise LedgerError(
                f"trajectory file {path} is damaged: its content does not match the digest in its name; restore it "
                "from a backup"
            )
        return body

    def all(self) -> Iterator[bytes]:
        """Yields the digests of all finished files."""
        for path in sorted(self.folder.glob("??/*")):
            if not path.name.endswith(UNFINISHED):
                yield bytes.fromhex(path.name)

    def sweep(self, named: set[bytes]) -> int:
        """Removes unfinished files and all files whose digest is not in `named`; returns the number of bytes freed."""
        num_bytes = 0
        for path in sorted(self.folder.glob("??/*")):
            if path.name.endswith(UNFINISHED) or bytes.fromhex(path.name) not in named:
                num_bytes += path.stat().st_size
                path.unlink()
        return num_bytes
