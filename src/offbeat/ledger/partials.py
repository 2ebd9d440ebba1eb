"""Partials: beginnings of trajectories that were handed back unfinished.

Guarantees: a task has at most one kept partial (one to be continued), and only while the task is open or leased. Each
further partial, and finally the trajectory, begins with the partial before it. So every sampled token is counted once:
in the kept partial, in its continuation, or as wasted with a reason. If a partial was counted as wasted and a
trajectory that continues it arrives late, the partial is marked `continued` instead.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from blake3 import blake3

from offbeat.ledger import bodies
from offbeat.ledger.database import Database, array
from offbeat.trajectory import EpisodeRecord, Trajectory


def keep(db: Database, trajectory: Trajectory, worker: str, fence: int, body: bytes, digest: bytes) -> None:
    """Stores `trajectory` as its task's kept partial and marks the partial before it as continued."""
    mark_continued(db, [trajectory.task])
    sampled = [segment.version for segment in trajectory.segments if segment.version is not None]
    db.execute(
        "INSERT INTO partials (task, digest, num_tokens, num_sampled_tokens, first_version, last_version, worker, "
        "fence, state, stored_at, body) VALUES (?, ?, ?, ?, ?, ?, ?, ?, 'kept', ?, ?)",
        (
            trajectory.task,
            digest,
            trajectory.num_tokens,
            int(trajectory.sampled_mask.sum()),
            sampled[0],
            sampled[-1],
            worker,
            fence,
            db.wall_clock(),
            bodies.store(db.blobs, digest, body),
        ),
    )


def mark_continued(db: Database, tasks: Iterable[int]) -> None:
    """Marks the kept partials of `tasks` as continued: the next partial or the trajectory now holds their tokens."""
    db.execute(
        "UPDATE partials SET state = 'continued', body = NULL "
        "WHERE state = 'kept' AND task IN (SELECT value FROM json_each(?))",
        (array(tasks),),
    )


def contributors(db: Database, task: int) -> list[tuple[str, int]]:
    """Returns which workers submitted the beginning of a task's trajectory: for each partial that the trajectory
    continues, in order, the worker that submitted the partial and the number of tokens up to its end. Only partials
    after the last wasted one count."""
    query = """SELECT worker, num_tokens FROM partials WHERE task = :task AND state <> 'wasted'
               AND seq > (SELECT COALESCE(MAX(seq), 0) FROM partials WHERE task = :task AND state = 'wasted')
               ORDER BY seq"""
    return [(worker, num_tokens) for worker, num_tokens in db.execute(query, {"task": task})]


def rescue(db: Database, task: int) -> None:
    """If a task's latest partial is wasted, marks it as continued instead, because its continuation has arrived."""
    db.execute(
        "UPDATE partials SET state = 'continued', reason = NULL "
        "WHERE state = 'wasted' AND seq = (SELECT MAX(seq) FROM partials WHERE task = ?)",
        (task,),
    )


def begins_with(trajectory: Trajectory, digest: bytes) -> bool:
    """Whether `trajectory` begins with the partial that has this digest. Compares digests, because the partial's bytes
    are no longer stored."""
    record = None if trajectory.episode is None else EpisodeRecord()  # a partial's notes are always empty
    for num_segments in range(1, len(trajectory.segments) + 1):
        beginning = replace(trajectory, segments=trajectory.segments[:num_segments], end=None, episode=record)
        if blake3(beginning.encode()).digest() == digest:
            return True
    return False


def waste(db: Database, tasks: Iterable[int], reason: str) -> None:
    """Marks the kept partials of `tasks` as wasted, with `reason`."""
    db.execute(
        "UPDATE partials SET state = 'wasted', reason = ?, body = NULL "
        "WHERE state = 'kept' AND task IN (SELECT value FROM json_each(?))",
        (reason, array(tasks)),
    )


def waste_abandoned(db: Database, reason: str) -> None:
    """Marks kept partials with tokens of an abandoned version as wasted, with `reason`. Checks only each partial's last
    version, because versions only rise along a trajectory."""
    db.execute(
        "UPDATE partials SET state = 'wasted', reason = ?, body = NULL WHERE state = 'kept' "
        "AND last_version IN (SELECT number FROM versions WHERE abandoned = 1)",
        (reason,),
    )
