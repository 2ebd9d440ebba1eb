"""Finished trajectories on their way in.

Guarantees: a task has at most one trajectory, ever; the same bytes again change nothing, other bytes are a conflict; a
stored trajectory answers the issued prompt within the issued length, and every sampled segment names a version that is
published, alive, and of the step that the task requires. A trajectory whose task ended without it is kept and counts as
wasted. One that may not be stored is answered with its error and takes no other along.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
from blake3 import blake3

from offbeat.ledger.bodies import Bodies
from offbeat.ledger.errors import Conflict, LedgerError, Refused, Unknown
from offbeat.ledger.records import Outcome, TaskState
from offbeat.ledger.schema import Database
from offbeat.ledger.versions import Lineage, lineage
from offbeat.trajectory import Origin, Sampling, Trajectory


class Issued(NamedTuple):
    """What the ledger knows of a task that an answer arrives for."""

    state: TaskState
    worker: str | None
    group: int
    prompt: bytes
    max_new_tokens: int
    require_step: int | None
    digest: bytes | None
    """Of the trajectory it has already."""


class Fresh(NamedTuple):
    """A trajectory that will be stored."""

    trajectory: Trajectory
    worker: str
    body: bytes
    digest: bytes


def submit(db: Database, bodies: Bodies, submissions: Sequence[tuple[Trajectory, str]]) -> list[Outcome | LedgerError]:
    issued = _issued(db, [trajectory.task for trajectory, _ in submissions])
    known = lineage(
        db, {s.version for trajectory, _ in submissions for s in trajectory.segments if s.version is not None}
    )
    outcomes: list[Outcome | LedgerError] = []
    fresh: dict[int, Fresh] = {}
    for trajectory, worker in submissions:
        try:
            outcomes.append(_take(trajectory, worker, issued, known, fresh))
        except LedgerError as error:
            outcomes.append(error)
    for found in fresh.values():
        bodies.keep(found.digest, found.trajectory)
    _store(db, list(fresh.values()), issued)
    return outcomes


def _take(
    trajectory: Trajectory, worker: str, issued: dict[int, Issued], known: dict[int, Lineage], fresh: dict[int, Fresh]
) -> Outcome:
    """What becomes of one submission; one that is to be stored is put beside the other fresh ones."""
    task = issued.get(trajectory.task)
    if task is None:
        raise Unknown(f"task {trajectory.task}: never issued")
    body = trajectory.encode()
    digest = blake3(body).digest()
    before = fresh[trajectory.task].digest if trajectory.task in fresh else task.digest
    if before is not None:
        if before != digest:
            raise Conflict(f"task {trajectory.task}: another trajectory is stored already")
        return Outcome.REPEATED
    is_late = task.state in (TaskState.FAILED, TaskState.DROPPED)
    _check(trajectory, worker, task, known, is_late)
    fresh[trajectory.task] = Fresh(trajectory, worker, body, digest)
    return Outcome.LATE if is_late else Outcome.STORED


def _issued(db: Database, tasks: Sequence[int]) -> dict[int, Issued]:
    query = """SELECT t.id, t.state, t.worker, g.id, g.prompt, g.sampling, g.require_step, j.digest
               FROM tasks t JOIN groups g ON g.id = t.group_id LEFT JOIN trajectories j ON j.task = t.id
               WHERE t.id IN (SELECT value FROM json_each(?))"""
    lengths: dict[str, int] = {}
    found: dict[int, Issued] = {}
    for task, state, worker, group, prompt, sampling, require_step, digest in db.execute(query, (json.dumps(tasks),)):
        if sampling not in lengths:
            lengths[sampling] = msgspec.json.decode(sampling, type=Sampling).max_new_tokens
        found[task] = Issued(TaskState(state), worker, group, prompt, lengths[sampling], require_step, digest)
    return found


def _check(trajectory: Trajectory, worker: str, task: Issued, known: dict[int, Lineage], is_late: bool) -> None:
    def refuse(why: str) -> Refused:
        return Refused(f"task {trajectory.task}: {why}")

    if trajectory.is_partial:
        raise refuse("a trajectory without an end is not accepted; generate it to its end")
    if trajectory.index != 0:
        raise refuse(f"trajectory index {trajectory.index}; allowed 0, a task has one trajectory")
    if trajectory.prompt.tobytes() != task.prompt:
        raise refuse("its prompt is not the one that was issued")
    if trajectory.max_new_tokens != task.max_new_tokens:
        raise refuse(f"max_new_tokens = {trajectory.max_new_tokens}, issued with {task.max_new_tokens}")
    if task.state is TaskState.LEASED and task.worker != worker:
        raise refuse(f"leased by {task.worker}, not by {worker}")
    sampled = [segment.version for segment in trajectory.segments if segment.origin is Origin.SAMPLED]
    if not sampled:
        raise refuse("holds no sampled token")
    for number in sampled:
        version = None if number is None else known.get(number)
        if version is None:
            raise refuse(f"sampled from version {number}, which was never published")
        if is_late:
            continue  # nobody will train on it
        if version.is_abandoned:
            raise refuse(f"sampled from version {number}, which is abandoned")
        if task.require_step is not None and version.step != task.require_step:
            raise refuse(
                f"sampled from version {number} of step {version.step}; the task requires step {task.require_step}"
            )


def _store(db: Database, fresh: Sequence[Fresh], issued: dict[int, Issued]) -> None:
    now = db.wall_clock()
    rows, segments = [], []
    added: dict[int, list[int]] = {}
    for trajectory, worker, body, digest in fresh:
        task, end = trajectory.task, trajectory.end
        assert end is not None
        num_tokens = 0
        for s in trajectory.segments:
            segments.append((task, trajectory.index, s.start, len(s.tokens), s.version))
            num_tokens += len(s.tokens) if s.origin is Origin.SAMPLED else 0
        rows.append((task, trajectory.index, digest, end.value, trajectory.num_tokens, num_tokens, worker, now, body))
        sums = added.setdefault(issued[task].group, [0, 0, 0])
        sums[0] += 1
        sums[1] += num_tokens
        sums[2] += issued[task].state is TaskState.OPEN
    db.executemany(
        "INSERT INTO trajectories (task, trajectory_index, digest, ended_by, num_tokens, num_sampled_tokens, worker, "
        "accepted_at, body) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
        rows,
    )
    db.executemany("INSERT INTO segments VALUES (?, ?, ?, ?, ?)", segments)
    db.execute(
        "UPDATE tasks SET state = 'accepted', worker = NULL "
        "WHERE id IN (SELECT value FROM json_each(?)) AND state IN ('open', 'leased')",
        (json.dumps([row[0] for row in rows]),),
    )
    db.executemany(
        "UPDATE groups SET num_trajectories = num_trajectories + ?, num_sampled_tokens = num_sampled_tokens + ?, "
        "num_open = num_open - ? WHERE id = ?",
        [(*sums, group) for group, sums in added.items()],
    )
