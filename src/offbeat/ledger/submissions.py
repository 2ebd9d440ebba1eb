"""Trajectories on their way in, whole or partial.

Guarantees: a task has at most one trajectory, ever; the same bytes again change nothing, other bytes under the same
fence are a conflict, and a fence that is over is told so. A stored trajectory answers the issued prompt within the
issued length, goes on from the beginning that was issued with it, and every sampled segment names a published version:
of the step that the task requires, or such that a token of it may still be trained. A trajectory whose task ended
without it is kept and counts as wasted. One that may not be stored is answered with its error and takes no other along.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
from blake3 import blake3

from offbeat.control.select import is_trainable
from offbeat.ledger import partials, versions
from offbeat.ledger.bodies import Bodies, store
from offbeat.ledger.errors import Conflict, Fenced, Forbidden, LedgerError, Refused, Unknown
from offbeat.ledger.records import Outcome, Submission, TaskState
from offbeat.ledger.schema import Database
from offbeat.ledger.tasks import check_lease
from offbeat.trajectory import Origin, Sampling, Segment, Trajectory


class Stored(NamedTuple):
    """What was handed in for a task before."""

    digest: bytes
    fence: int
    worker: str


class Issued(NamedTuple):
    """What the ledger knows of a task that an answer arrives for."""

    state: TaskState
    worker: str | None
    fence: int
    group: int
    prompt: bytes
    max_new_tokens: int
    require_step: int | None
    trajectory: Stored | None
    partial: Stored | None
    """The latest one, kept or not."""
    is_wasted: bool
    """Whether that one was given up."""
    prefix: Trajectory | None
    """The one that is kept."""


class Fresh(NamedTuple):
    """A submission that will be stored."""

    submission: Submission
    body: bytes
    digest: bytes
    outcome: Outcome

    @property
    def stored(self) -> Stored:
        return Stored(self.digest, self.submission.fence, self.submission.worker)


class Desk:
    """Looks at submissions one by one, and remembers those of this transaction that are to be stored."""

    def __init__(self, db: Database, submissions: Sequence[Submission], bound: int):
        self.issued = _issued(db, [s.trajectory.task for s in submissions])
        numbers = {s.version for t, _, _ in submissions for s in t.segments if s.version is not None}
        self.known = versions.lineage(db, numbers)
        newest = versions.latest(db)
        self.step, self.bound = newest.step if newest else 0, bound
        self.fresh: dict[int, Fresh] = {}

    def take(self, submission: Submission) -> Outcome:
        """What becomes of a submission; one that is to be stored is put beside the other fresh ones."""
        trajectory, worker, fence = submission
        number = trajectory.task
        task = self.issued.get(number)
        if task is None:
            raise Unknown(f"task {number}: never issued")
        body = trajectory.encode()
        digest = blake3(body).digest()
        held = self.fresh[number].stored if number in self.fresh else None
        for before in (held, task.trajectory, task.partial):
            if before is not None and before.fence == fence:
                return _again(number, before, worker, digest)
        check_lease(number, worker, fence, holder=task.worker, newest=task.fence)
        if task.trajectory is not None:
            raise Fenced(f"task {number}: has ended, its trajectory came under fence {task.trajectory.fence}")
        is_late = task.state in (TaskState.FAILED, TaskState.DROPPED)
        if is_late and trajectory.is_partial:
            raise Fenced(f"task {number}: has ended ({task.state.value}), nobody will carry on with a partial")
        self._check(trajectory, task, is_late)
        outcome = Outcome.PARTIAL if trajectory.is_partial else Outcome.LATE if is_late else Outcome.STORED
        self.fresh[number] = Fresh(submission, body, digest, outcome)
        return outcome

    def _check(self, trajectory: Trajectory, task: Issued, is_late: bool) -> None:
        def refuse(why: str) -> Refused:
            return Refused(f"task {trajectory.task}: {why}")

        if trajectory.index != 0:
            raise refuse(f"trajectory index {trajectory.index}; allowed 0, a task has one trajectory")
        if trajectory.max_version_drop != 0:
            raise refuse(f"max_version_drop = {trajectory.max_version_drop}; allowed 0, versions only rise")
        if trajectory.prompt.tobytes() != task.prompt:
            raise refuse("its prompt is not the one that was issued")
        if trajectory.max_new_tokens != task.max_new_tokens:
            raise refuse(f"max_new_tokens = {trajectory.max_new_tokens}, issued with {task.max_new_tokens}")
        prefix = None if is_late else task.prefix
        if prefix is not None and trajectory.segments[: len(prefix.segments)] != prefix.segments:
            raise refuse("does not begin with the tokens that it was to carry on")
        sampled = [segment for segment in trajectory.segments if segment.origin is Origin.SAMPLED]
        if not sampled:
            raise refuse("holds no sampled token")
        for segment in sampled:
            if segment.version not in self.known:
                raise refuse(f"sampled from version {segment.version}, which was never published")
        if is_late:
            return  # nobody will train on it
        if problem := self._age_problem(sampled, task.require_step):
            raise refuse(problem)

    def _age_problem(self, sampled: Sequence[Segment], require_step: int | None) -> str | None:
        steps = [(s.version, self.known[s.version]) for s in sampled if s.version is not None]
        if require_step is None:
            if any(is_trainable(version.living_step, self.step, self.bound) for _, version in steps):
                return None
            number, newest = steps[-1]
            if newest.is_abandoned:
                return f"sampled from version {number}, which is abandoned"
            return (
                f"sampled from version {number} of step {newest.step}, and the run is at step {self.step}: too old for "
                f"max_staleness = {self.bound}"
            )
        for number, version in steps:
            if version.is_abandoned:
                return f"sampled from version {number}, which is abandoned"
            if version.step != require_step:
                return f"sampled from version {number} of step {version.step}; the task requires step {require_step}"
        return None


def submit(db: Database, bodies: Bodies, submissions: Sequence[Submission], bound: int) -> list[Outcome | LedgerError]:
    desk = Desk(db, submissions, bound)
    outcomes: list[Outcome | LedgerError] = []
    for submission in submissions:
        try:
            outcomes.append(desk.take(submission))
        except LedgerError as error:
            outcomes.append(error)
    for number, fresh in desk.fresh.items():
        given_up = desk.issued[number].partial if desk.issued[number].is_wasted else None
        if given_up is not None and partials.begins_with(fresh.submission.trajectory, given_up.digest):
            partials.rescue(db, number)
    whole = [fresh for fresh in desk.fresh.values() if fresh.outcome is not Outcome.PARTIAL]
    for found in whole:
        bodies.keep(found.digest, found.body)
    _store(db, whole, desk.issued)
    for found in desk.fresh.values():
        if found.outcome is Outcome.PARTIAL:
            _store_partial(db, found, desk.issued)
    return outcomes


def _again(task: int, before: Stored, worker: str, digest: bytes) -> Outcome:
    if before.worker != worker:
        raise Forbidden(f"task {task}: fence {before.fence} was leased by {before.worker}, not by {worker}")
    if before.digest != digest:
        raise Conflict(f"task {task}: another trajectory is stored already under fence {before.fence}")
    return Outcome.REPEATED


def _issued(db: Database, tasks: Sequence[int]) -> dict[int, Issued]:
    query = """SELECT t.id, t.state, t.worker, t.fence, g.id, g.prompt, g.sampling, g.require_step,
                      j.digest, j.fence, j.worker, p.digest, p.fence, p.worker, p.state, p.body
               FROM tasks t JOIN groups g ON g.id = t.group_id LEFT JOIN trajectories j ON j.task = t.id
               LEFT JOIN partials p ON p.seq = (SELECT MAX(seq) FROM partials WHERE task = t.id)
               WHERE t.id IN (SELECT value FROM json_each(?))"""
    lengths: dict[str, int] = {}
    found: dict[int, Issued] = {}
    for row in db.execute(query, (json.dumps(tasks),)).fetchall():
        task, state, worker, fence, group, prompt, sampling, require_step = row[:8]
        if sampling not in lengths:
            lengths[sampling] = msgspec.json.decode(sampling, type=Sampling).max_new_tokens
        found[task] = Issued(
            state=TaskState(state),
            worker=worker,
            fence=fence,
            group=group,
            prompt=prompt,
            max_new_tokens=lengths[sampling],
            require_step=require_step,
            trajectory=None if row[8] is None else Stored(*row[8:11]),
            partial=None if row[11] is None else Stored(*row[11:14]),
            is_wasted=row[14] == "wasted",
            prefix=partials.load(db, row[11], row[15]) if row[14] == "kept" else None,
        )
    return found


def _store(db: Database, fresh: Sequence[Fresh], issued: dict[int, Issued]) -> None:
    now = db.wall_clock()
    rows, segments = [], []
    added: dict[int, list[int]] = {}
    for (trajectory, worker, fence), body, digest, _ in fresh:
        task, end = trajectory.task, trajectory.end
        assert end is not None
        num_tokens = 0
        for s in trajectory.segments:
            segments.append((task, trajectory.index, s.start, len(s.tokens), s.version))
            num_tokens += len(s.tokens) if s.origin is Origin.SAMPLED else 0
        counted = (end.value, trajectory.num_tokens, num_tokens)
        rows.append((task, trajectory.index, digest, *counted, worker, fence, now, store(db, digest, body)))
        sums = added.setdefault(issued[task].group, [0, 0, 0])
        sums[0] += 1
        sums[1] += num_tokens
        sums[2] += issued[task].state is TaskState.OPEN
    db.executemany(
        "INSERT INTO trajectories (task, trajectory_index, digest, ended_by, num_tokens, num_sampled_tokens, worker, "
        "fence, accepted_at, body) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        rows,
    )
    db.executemany("INSERT INTO segments VALUES (?, ?, ?, ?, ?)", segments)
    tasks = [row[0] for row in rows]
    db.execute(
        "UPDATE tasks SET state = 'accepted' "
        "WHERE id IN (SELECT value FROM json_each(?)) AND state IN ('open', 'leased')",
        (json.dumps(tasks),),
    )
    partials.carry_on(db, [task for task in tasks if issued[task].prefix is not None])
    db.executemany(
        "UPDATE groups SET num_trajectories = num_trajectories + ?, num_sampled_tokens = num_sampled_tokens + ?, "
        "num_open = num_open - ? WHERE id = ?",
        [(*sums, group) for group, sums in added.items()],
    )


def _store_partial(db: Database, fresh: Fresh, issued: dict[int, Issued]) -> None:
    trajectory, worker, fence = fresh.submission
    task = issued[trajectory.task]
    partials.keep(db, trajectory, worker, fence, fresh.body, fresh.digest)
    if task.state is TaskState.LEASED:
        db.execute("UPDATE tasks SET state = 'open' WHERE id = ?", (trajectory.task,))
        db.execute("UPDATE groups SET num_open = num_open + 1 WHERE id = ?", (task.group,))
