"""Trajectories as bytes and as objects, by the digest of their bytes.

Short bodies lie in their row, long ones in a file (`offbeat.ledger.blobs`); `store` and `read` alone know which. What
came in a moment ago is about to be scored and claimed, so it is kept; all else is decoded from where it lies. The key
is the content and the arrays cannot be written to, so what is kept never differs from what is stored.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from offbeat.ledger.database import Database, array
from offbeat.ledger.errors import LedgerError
from offbeat.trajectory import Trajectory

MAX_KEPT_BYTES = 32_000_000
"""A step of long answers, several of short ones."""
OVERHEAD_BYTES = 4000
"""What the objects around the shortest trajectory weigh."""


MAX_ROW_BYTES = 256 * 1024
"""Past this, pages of the database would hold little but bodies, and every read of it would move them."""


def store(db: Database, digest: bytes, body: bytes) -> bytes | None:
    """What a row keeps of a body: its bytes, or none where they went to a file, which is on disk then."""
    if len(body) <= MAX_ROW_BYTES:
        return body
    db.blobs.write(digest, body)
    return None


def read(db: Database, digest: bytes, body: bytes | None) -> bytes:
    """A body, given what its row keeps of it."""
    return db.blobs.read(digest) if body is None else body


class Bodies:
    def __init__(self, db: Database, max_kept_bytes: int = MAX_KEPT_BYTES):
        self._db, self._max_kept_bytes = db, max_kept_bytes
        self._kept: OrderedDict[bytes, tuple[int, bytes | Trajectory]] = OrderedDict()
        """By digest: what it weighs, and the body; once it was asked for, the trajectory in its place."""
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
        """Trajectories by their `seq`, in the order asked for, given the digests stored with them."""
        kept = [self._find(digest) for _, digest in wanted]
        others = self._read([seq for (seq, _), found in zip(wanted, kept, strict=True) if found is None])
        return {seq: found or others[seq] for (seq, _), found in zip(wanted, kept, strict=True)}

    def _read(self, wanted: Sequence[int]) -> dict[int, Trajectory]:
        if not wanted:
            return {}
        found: dict[int, Trajectory] = {}
        query = """SELECT seq, task, digest, body, pruned FROM trajectories
                   WHERE seq IN (SELECT value FROM json_each(?))"""
        for seq, task, digest, body, is_pruned in self._db.execute(query, (array(wanted),)):
            if is_pruned:
                raise LedgerError(f"task {task}: its trajectory was pruned")
            found[seq] = Trajectory.restore(read(self._db, digest, body))
        return found

    def _find(self, digest: bytes) -> Trajectory | None:
        num_bytes, kept = self._kept.get(digest, (0, None))
        if isinstance(kept, bytes):
            kept = Trajectory.restore(kept)
            self._kept[digest] = num_bytes, kept
        return kept
