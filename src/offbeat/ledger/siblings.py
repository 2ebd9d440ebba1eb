"""What a batch knows of the siblings of answers that were claimed without them.

To the ledger such an answer is a group of size 1, and its siblings are the groups drawn for the same prompt.

Guarantees: a batch knows the rewards that were stored before it was claimed and never a later one, so that its
advantages are the same whenever it is loaded. What an abandoned version answered does not count: its group was issued
again with the same seed, and one answer would count twice. A group that was dropped as stale keeps its reward.
"""

from __future__ import annotations

from typing import NamedTuple

from offbeat.ledger.database import Database

EARLIER = """
SELECT s.ordinal, s.id, r.value
FROM groups o INDEXED BY groups_drawn CROSS JOIN groups s ON s.purpose = 'train' AND s.ordinal = o.ordinal
CROSS JOIN tasks t ON t.group_id = s.id CROSS JOIN rewards r ON r.task = t.id
WHERE o.purpose = 'train' AND o.reissue_of IS NULL AND o.source = :source AND o.source_ordinal = :source_ordinal
    AND s.batch IS NOT :batch AND s.reason IS NOT 'abandoned' AND r.value IS NOT NULL AND r.seq <= :last_reward
"""
"""Rewards that a batch knows of a prompt's other groups, however often those were issued."""


class Kin(NamedTuple):
    """What `BatchGroup` says of an answer's siblings; all of a batch's answers to a prompt have the same."""

    prompt: int
    """The group that the prompt was first drawn as."""
    earlier: tuple[float, ...]
    """By ordinal: who was scored first must not matter."""


def of_batch(db: Database, batch: int) -> dict[int, Kin]:
    """By group; without the groups that were claimed whole."""
    query = """SELECT g.source, g.source_ordinal, g.id, o.id
               FROM groups g CROSS JOIN groups o INDEXED BY groups_drawn ON o.purpose = 'train' AND o.reissue_of IS NULL
                   AND o.source = g.source AND o.source_ordinal = g.source_ordinal AND o.sibling = 0
               WHERE g.batch = ? AND g.size = 1"""
    groups = db.execute(query, (batch,)).fetchall()
    (last_reward,) = db.execute("SELECT last_reward FROM batches WHERE id = ?", (batch,)).fetchone()
    earlier: dict[int, tuple[float, ...]] = {}
    for source, source_ordinal, _, prompt in groups:
        if prompt not in earlier:
            asked = {"source": source, "source_ordinal": source_ordinal, "batch": batch, "last_reward": last_reward}
            earlier[prompt] = tuple(reward for _, _, reward in sorted(db.execute(EARLIER, asked)))
    return {group: Kin(prompt, earlier[prompt]) for _, _, group, prompt in groups}
