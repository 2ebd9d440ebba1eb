"""Bodies that nobody needs any more.

A durable checkpoint of step c is resumed from by training the batch of step c again and whatever follows. So what was
trained in the surviving history before step c, and what ended without training before the commit that made c, is only
history: its rows, digests and sums stay, its bytes may go. Nothing else is ever removed, and a resume from an older
checkpoint, whose batch has lost its bytes, is refused.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from offbeat.ledger.database import Database

SLICE = 1000
"""Bodies removed in one transaction: others that write wait for a slice, not for all."""

NEEDLESS = """
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


def prune_slice(db: Database, before: int) -> Pruned:
    """Forgets the bytes of some trajectories that ended before a step; those in files are removed by `sweep`."""
    rows = db.execute(NEEDLESS, {"before": before, "slice": SLICE}).fetchall()
    db.executemany("UPDATE trajectories SET body = NULL, pruned = 1 WHERE seq = ?", [(seq,) for seq, _, _ in rows])
    num_pruned = Counter(group for _, group, _ in rows)
    db.executemany(
        "UPDATE groups SET num_pruned = num_pruned + ? WHERE id = ?",
        [(count, group) for group, count in num_pruned.items()],
    )
    return Pruned(len(rows), sum(size or 0 for _, _, size in rows))


def sweep(db: Database) -> int:
    """Removes files that nothing names: of pruned and given-up bodies, and of calls that never committed."""
    query = """SELECT digest FROM trajectories WHERE body IS NULL AND pruned = 0
               UNION ALL SELECT digest FROM partials WHERE body IS NULL AND state = 'kept'"""
    return db.blobs.sweep({digest for (digest,) in db.execute(query)})
