"""What a batch knows of the siblings of answers that were claimed without them.

To the ledger such an answer is a group of size 1, and its siblings are the groups drawn for the same prompt.

Guarantees: a batch knows the rewards that were stored before it was claimed and never a later one, so that its
advantages are the same whenever it is loaded. What an abandoned version answered does not count: its group was issued
again with the same seed, and one answer would count twice. A group that was dropped as stale keeps its reward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from offbeat.control.settle import MAX_RETRIES
from offbeat.ledger.database import Database
from offbeat.ledger.records import Drop

OF_PROMPT = """
SELECT s.ordinal, s.id, o.id, s.batch IS :batch, s.reason, s.retry, r.value
FROM groups o INDEXED BY groups_drawn CROSS JOIN groups s ON s.purpose = 'train' AND s.ordinal = o.ordinal
CROSS JOIN tasks t ON t.group_id = s.id LEFT JOIN rewards r ON r.task = t.id AND r.seq <= :last_reward
WHERE o.purpose = 'train' AND o.reissue_of IS NULL AND o.source = :source AND o.source_ordinal = :source_ordinal
"""
"""All groups of a prompt, however often they were issued; a reward that failed has no value."""


class Kin(NamedTuple):
    """What `BatchGroup` says of an answer's siblings; all of a batch's answers to a prompt have the same."""

    prompt: int
    """The group that the prompt was first drawn as."""
    earlier: tuple[float, ...]
    """By ordinal: who was scored first must not matter."""
    is_early: bool


def of_batch(db: Database, batch: int) -> dict[int, Kin]:
    """By group; without the groups that were claimed whole."""
    prompts: dict[tuple[str, int], list[int]] = {}
    query = "SELECT source, source_ordinal, id FROM groups WHERE batch = ? AND size = 1"
    for source, source_ordinal, group in db.execute(query, (batch,)):
        prompts.setdefault((source, source_ordinal), []).append(group)
    (last_reward,) = db.execute("SELECT last_reward FROM batches WHERE id = ?", (batch,)).fetchone()
    found: dict[int, Kin] = {}
    for (source, source_ordinal), groups in prompts.items():
        asked = {"source": source, "source_ordinal": source_ordinal, "batch": batch, "last_reward": last_reward}
        found.update(dict.fromkeys(groups, _kin(sorted(db.execute(OF_PROMPT, asked)))))
    return found


def _kin(rows: Sequence[tuple[int, int, int, bool, str | None, int, float | None]]) -> Kin:
    earlier: list[float] = []
    ended: set[int] = set()
    for ordinal, _, _, is_in_batch, reason, retry, reward in rows:
        if reward is not None and reason != Drop.ABANDONED:
            ended.add(ordinal)
            if not is_in_batch:
                earlier.append(reward)
        elif reason == Drop.FAILED and retry == MAX_RETRIES:
            ended.add(ordinal)
    return Kin(rows[0][2], tuple(earlier), len(ended) < len({row[0] for row in rows}))
