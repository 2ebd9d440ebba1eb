"""Which of many gangs are worth a column: those that are the fastest, or the leanest, for their nodes.

Unlike `pruning` this keeps no optimum to the last bit: gains too small for the cost model to tell are left out, too.
"""

from __future__ import annotations

from collections.abc import Iterable

from offbeat.plan.problem import Gang

MIN_GAIN = 0.02
"""A gang with more nodes is worth a column if it is faster by this share: the cost model is no better than that."""
MIN_LEANER = 0.1
"""One that keeps less on cards which generate too is worth a column if it is by this share."""


def fastest_first_front(candidates: Iterable[Gang]) -> list[Gang]:
    """Without gangs that are no faster than one with no more nodes of any class, and leave replicas no more memory."""
    best: dict[object, Gang] = {}
    for gang in candidates:
        key = gang.name if gang.kept_bytes else tuple(sorted(gang.nodes.items()))
        if key not in best or gang.period_s < best[key].period_s:
            best[key] = gang
    kept: list[Gang] = []
    for gang in sorted(best.values(), key=lambda gang: (sum(gang.nodes.values()), gang.period_s)):
        period_s = gang.period_s
        if not any((1 - MIN_GAIN) * other.period_s <= period_s and _is_as_small(other, gang) for other in kept):
            kept.append(gang)
    return kept


def _is_as_small(one: Gang, other: Gang) -> bool:
    """Whether it takes no more nodes of any class, and hardly more memory of those that both have."""
    return all(other.nodes.get(name, 0) >= num for name, num in one.nodes.items()) and all(
        (1 - MIN_LEANER) * one.kept_bytes.get(name, 0.0) <= kept for name, kept in other.kept_bytes.items()
    )
