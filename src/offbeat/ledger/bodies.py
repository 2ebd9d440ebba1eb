"""Trajectories as bytes and as objects, by the digest of their bytes.

Short bodies lie in their row, long ones in a file (`offbeat.ledger.blobs`); `store` and `read` alone know which. What
came in a moment ago is about to be scored and claimed, so a copy of it is kept; all else is decoded from where it lies.
The key is the content and the arrays cannot be written to, so what is kept never differs from what is stored.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Iterable

import numpy as np

from offbeat.ledger.errors import LedgerError
from offbeat.ledger.schema import Database
from offbeat.trajectory import Segment, Trajectory

MAX_KEPT_TOKENS = 2_000_000
"""About twenty megabytes with their log-probs: a step of long answers, several of short ones."""
OVERHEAD_TOKENS = 500
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
    def __init__(self, db: Database, max_kept_tokens: int = MAX_KEPT_TOKENS):
        self._db, self._max_kept_tokens = db, max_kept_tokens
        self._kept: OrderedDict[bytes, Trajectory] = OrderedDict()
        self._num_kept_tokens = 0

    def keep(self, digest: bytes, trajectory: Trajectory) -> None:
        if digest in self._kept:
            return
        self._kept[digest] = _copy(trajectory)
        self._num_kept_tokens += _size(trajectory)
        while self._num_kept_tokens > self._max_kept_tokens:
            _, oldest = self._kept.popitem(last=False)
            self._num_kept_tokens -= _size(oldest)

    def load(self, wanted: Iterable[tuple[int, bytes]]) -> dict[int, Trajectory]:
        """The trajectories of tasks, given the digests stored with them."""
        found: dict[int, Trajectory] = {}
        missing: list[int] = []
        for task, digest in wanted:
            trajectory = self._kept.get(digest)
            if trajectory is None:
                missing.append(task)
            else:
                found[task] = trajectory
        if missing:
            query = "SELECT task, digest, body, pruned FROM trajectories WHERE task IN (SELECT value FROM json_each(?))"
            for task, digest, body, is_pruned in self._db.execute(query, (json.dumps(missing),)).fetchall():
                if is_pruned:
                    raise LedgerError(f"task {task}: its trajectory was pruned")
                found[task] = Trajectory.restore(read(self._db, digest, body))
        return found


def _copy(trajectory: Trajectory) -> Trajectory:
    """The same trajectory with arrays of its own: an engine may go on to use the memory that it filled."""
    return Trajectory(
        task=trajectory.task,
        prompt=_frozen(trajectory.prompt),
        max_new_tokens=trajectory.max_new_tokens,
        index=trajectory.index,
        max_version_drop=trajectory.max_version_drop,
        segments=tuple([_copy_segment(segment) for segment in trajectory.segments]),
        end=trajectory.end,
    )


def _copy_segment(segment: Segment) -> Segment:
    return Segment(
        start=segment.start,
        tokens=_frozen(segment.tokens),
        origin=segment.origin,
        logprobs=None if segment.logprobs is None else _frozen(segment.logprobs),
        version=segment.version,
        kv_version=segment.kv_version,
        worker=segment.worker,
        engine=segment.engine,
        arrays={name: _frozen(array) for name, array in segment.arrays.items()},
    )


def _frozen(array: np.ndarray) -> np.ndarray:
    copied = array.copy()
    copied.flags.writeable = False
    return copied


def _size(trajectory: Trajectory) -> int:
    return OVERHEAD_TOKENS + len(trajectory.prompt) + trajectory.num_tokens
