"""Trajectories as objects, by the digest of their bytes.

What came in a moment ago is about to be scored and claimed, so it is kept as it is; everything else is decoded from the
file. Because the key is the content, what is kept can never differ from what is stored.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Iterable

from offbeat.ledger.schema import Database
from offbeat.trajectory import Trajectory

MAX_KEPT_TOKENS = 4_000_000
"""About a hundred megabytes with their log-probs: several steps of long answers."""


class Bodies:
    def __init__(self, db: Database, max_kept_tokens: int = MAX_KEPT_TOKENS):
        self._db, self._max_kept_tokens = db, max_kept_tokens
        self._kept: OrderedDict[bytes, Trajectory] = OrderedDict()
        self._num_kept_tokens = 0

    def keep(self, digest: bytes, trajectory: Trajectory) -> None:
        if digest in self._kept:
            return
        self._kept[digest] = trajectory
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
            query = "SELECT task, body FROM trajectories WHERE task IN (SELECT value FROM json_each(?))"
            for task, body in self._db.execute(query, (json.dumps(missing),)):
                found[task] = Trajectory.decode(body)
        return found


def _size(trajectory: Trajectory) -> int:
    return len(trajectory.prompt) + trajectory.num_tokens
