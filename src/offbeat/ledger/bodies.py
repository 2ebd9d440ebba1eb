"""Bodies of trajectories: their encoded bytes, and a cache of recent ones.

A short body is stored in its row, a long one in a file (`offbeat.ledger.blobs`); only `store` and `read` know which. A
trajectory that was just submitted is soon scored and claimed, so it stays in the cache. The cache key is the digest of
the bytes, and the arrays are read-only, so a cached trajectory never differs from the stored one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from sqlite3 import Cursor

from offbeat.ledger.blobs import Blobs
from offbeat.ledger.errors import LedgerError
from offbeat.ledger.tables import array
from offbeat.trajectory import Trajectory

MAX_KEPT_BYTES = 32_000_000
"""Holds one step of long answers, or several of short ones."""
OVERHEAD_BYTES = 4000
"""Size of the objects around the shortest trajectory."""
MAX_ROW_BYTES = 256 * 1024
"""Larger bodies would fill the database's pages, and every scan would read them."""


def store(blobs: Blobs, digest: bytes, body: bytes) -> bytes | None:
    """Returns the value for the row's `body` column: the bytes, or None after they were written to a file."""
    if len(body) <= MAX_ROW_BYTES:
        return body
    blobs.write(digest, body)
    return None


def read(blobs: Blobs, digest: bytes, body: bytes | None) -> bytes:
    """Returns the bytes of a body, given its row's `body` column."""
    return blobs.read(digest) if body is None else body


class Bodies:
    """Loads trajectories, through a cache of at most `max_kept_bytes`."""

    def __init__(self, execute: Callable[..., Cursor], blobs: Blobs, max_kept_bytes: int = MAX_KEPT_BYTES):
        self._execute, self._blobs, self._max_kept_bytes = execute, blobs, max_kept_bytes
        self._kept: OrderedDict[bytes, tuple[int, bytes | Trajectory]] = OrderedDict()
        """By digest: size, and the body, or the trajectory once it was decoded."""
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
        """Loads trajectories, given as pairs of `seq` and digest; returns them by `seq` in the same order."""
        kept = [self._find(digest) for _, digest in wanted]
        others = self._read([seq for (seq, _), found in zip(wanted, kept, strict=True) if found is None])
        return {seq: found or others[seq] for (seq, _), found in zip(wanted, kept, strict=True)}

    def _read(self, wanted: Sequence[int]) -> dict[int, Trajectory]:
        if not wanted:
            return {}
        found: dict[int, Trajectory] = {}
        query = """SELECT seq, task, digest, body, pruned FROM trajectories
                   WHERE seq IN (SELECT value FROM json_each(?))"""
        for seq, task, digest, body, is_pruned in self._execute(query, (array(wanted),)):
            if is_pruned:
                raise LedgerError(f"task {task}: its trajectory was pruned")
            found[seq] = Trajectory.restore(read(self._blobs, digest, body))
        return found

    def _find(self, digest: bytes) -> Trajectory | None:
        num_bytes, kept = self._kept.get(digest, (0, None))
        if isinstance(kept, bytes):
            kept = Trajectory.restore(kept)
            self._kept[digest] = num_bytes, kept
        return kept
