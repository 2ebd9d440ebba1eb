"""Beginnings of trajectories that were handed back unfinished.

Guarantees: a task has one kept partial at most, and only while it is open or leased; each new one, and the trajectory
in the end, begins with the one before, so that no sampled token is counted twice or lost from sight: a partial's tokens
are kept, have become part of what continued it, or are wasted with a reason. A partial that was given up while someone
still carried it on is none that was wasted, once what it became arrives.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from blake3 import blake3

from offbeat.ledger import bodies
from offbeat.ledger.database import Database, array
from offbeat.trajectory import Trajectory


def load(db: Database, digest: bytes | None, body: bytes | None) -> Trajectory | None:
    """A kept partial, given its digest and what its row keeps of its body; None where there is none."""
    return None if digest is None else Trajectory.decode(bodies.read(db, digest, body))


def keep(db: Database, trajectory: Trajectory, worker: str, fence: int, body: bytes, digest: bytes) -> None:
    """Stores a partial in place of the one that it continues."""
    carry_on(db, [trajectory.task])
    sampled = [segment.version for segment in trajectory.segments if segment.version is not None]
    db.execute(
        "INSERT INTO partials (task, digest, num_sampled_tokens, first_version, last_version, worker, fence, state, "
        "stored_at, body) VALUES (?, ?, ?, ?, ?, ?, ?, 'kept', ?, ?)",
        (
            trajectory.task,
            digest,
            int(trajectory.sampled_mask.sum()),
            sampled[0],
            sampled[-1],
            worker,
            fence,
            db.wall_clock(),
            bodies.store(db, digest, body),
        ),
    )


def carry_on(db: Database, tasks: Iterable[int]) -> None:
    """What follows holds their tokens from now on."""
    db.execute(
        "UPDATE partials SET state = 'continued', body = NULL "
        "WHERE state = 'kept' AND task IN (SELECT value FROM json_each(?))",
        (array(tasks),),
    )


def handed_in(db: Database, task: int) -> list[tuple[str, int]]:
    """Who handed in the beginnings that a task's trajectory goes on from, in order, each with the sampled tokens that
    it had by then. What came before a beginning that was given up is no part of it."""
    query = """SELECT worker, num_sampled_tokens FROM partials WHERE task = :task AND state <> 'wasted'
               AND seq > (SELECT COALESCE(MAX(seq), 0) FROM partials WHERE task = :task AND state = 'wasted')
               ORDER BY seq"""
    return [(worker, num_tokens) for worker, num_tokens in db.execute(query, {"task": task})]


def rescue(db: Database, task: int) -> None:
    """The latest partial of a task was given up too soon: what follows holds its tokens."""
    db.execute(
        "UPDATE partials SET state = 'continued', reason = NULL "
        "WHERE state = 'wasted' AND seq = (SELECT MAX(seq) FROM partials WHERE task = ?)",
        (task,),
    )


def begins_with(trajectory: Trajectory, digest: bytes) -> bool:
    """Whether a trajectory goes on from the partial of this digest, whose bytes are no longer there."""
    for num_segments in range(1, len(trajectory.segments) + 1):
        beginning = replace(trajectory, segments=trajectory.segments[:num_segments], end=None)
        if blake3(beginning.encode()).digest() == digest:
            return True
    return False


def waste(db: Database, tasks: Iterable[int], reason: str) -> None:
    """Nobody will carry these on."""
    db.execute(
        "UPDATE partials SET state = 'wasted', reason = ?, body = NULL "
        "WHERE state = 'kept' AND task IN (SELECT value FROM json_each(?))",
        (reason, array(tasks)),
    )


def waste_abandoned(db: Database, reason: str) -> None:
    """Versions only rise along a trajectory, so one that ends in an abandoned version cannot be carried on."""
    db.execute(
        "UPDATE partials SET state = 'wasted', reason = ?, body = NULL WHERE state = 'kept' "
        "AND last_version IN (SELECT number FROM versions WHERE abandoned = 1)",
        (reason,),
    )
