"""Leases: handing open tasks to workers, and the ways in which a lease ends without a trajectory.

Guarantees: one worker at a time holds a task, under a fence (a number that grows with every lease). A task that
requires a version goes only to a worker that serves this version. A task that failed `max_attempts` times ends as
failed, with the reason; a failure counts once, however often it is reported. When a worker vanishes, at most one of its
tasks counts as failed (`offbeat.rules.leases.culprit`). Returning a task or restarting the coordinator is no failure:
otherwise a run that is killed often would train on other data than an undisturbed run.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import msgspec
import numpy as np

from offbeat.ledger import bodies, partials
from offbeat.ledger.batches import is_batch_claimed
from offbeat.ledger.database import Database, array, transactional
from offbeat.ledger.errors import LOST_ENVIRONMENT, Fenced, Forbidden, Unknown
from offbeat.ledger.groups import Groups, settle_groups
from offbeat.ledger.records import WORKER_LOST, TaskState
from offbeat.rules.groups import may_begin, unclaimed_step
from offbeat.rules.leases import (
    NUM_NEAR,
    Lease,
    OpenGroup,
    OpenTask,
    Requester,
    choose_groups,
    choose_tasks,
    culprit,
    ends_task,
    oldest_first_step,
)
from offbeat.rules.leases import wanted_version as first_wanted
from offbeat.trajectory import EpisodeStart, Sampling, Task

OPEN = """groups INDEXED BY groups_open
          WHERE state = 'open' AND num_open > 0 AND (require_step IS NULL OR require_version IS NOT NULL)"""
"""SQL after FROM that selects the groups with an open task, except those that wait for the version of their step."""
OPEN_EVAL = f"{OPEN} AND (purpose <> 'eval') < 1"
"""`OPEN` for evaluation groups only; the condition is written so that the index returns them in order."""
TO_RETRY = "t.state = 'open' AND t.fence > 0 AND t.failed_fence = t.fence"
"""SQL condition for open tasks whose last attempt failed."""


@dataclass(frozen=True)
class LeaseRequest:
    """A worker's request for tasks."""

    worker: str
    capacity: int
    have_version: int | None
    total_slots: int | None = None
    """Number of tasks that all active workers can hold together; None: no other worker is active."""
    only_eval: bool = False
    """Whether to lease only evaluation tasks."""
    skips_failed: bool = False
    """Whether to skip tasks whose last attempt this worker failed."""

    @property
    def is_alone(self) -> bool:
        """Whether no other active worker has slots (places for tasks), because `capacity` is at least the number of
        slots of all active workers together."""
        return self.total_slots is None or self.total_slots <= self.capacity

    @property
    def table(self) -> str:
        """Returns the SQL clauses (FROM and WHERE) that select the groups from which the worker may get tasks."""
        return OPEN_EVAL if self.only_eval else OPEN


class Leasing(Groups):
    @transactional
    def lease(
        self,
        worker: str,
        capacity: int,
        have_version: int | None,
        *,
        total_slots: int | None = None,
        only_eval: bool = False,
        skips_failed: bool = False,
    ) -> list[Task]:
        """Leases up to `capacity` open tasks that require `have_version` or no version. Leases fewer if the rest is
        left to other workers, or would become too stale before it could be trained. With `terms.in_rounds`, leases only
        evaluation tasks while a batch is being trained. For the other parameters see `LeaseRequest`."""
        only_eval = only_eval or (self.terms.in_rounds and is_batch_claimed(self))
        request = LeaseRequest(worker, capacity, have_version, total_slots, only_eval, skips_failed)
        if capacity <= 0:
            return []
        num_near = NUM_NEAR + capacity
        near = _open_groups(self, num_near, request)
        if not near:
            return []
        step, unclaimed = _steps(self, have_version)
        tasks: list[Task] = []
        begun, continued = [], []
        requester, groups = _requester(self, request, step), _OpenGroups(self, request, step, unclaimed)
        for group, count in choose_groups(near, requester, groups, is_all=len(near) < num_near):
            found, first_step = _open_tasks(self, group, count, request)
            if not found:
                continue
            tasks += found
            if (oldest := oldest_first_step(first_step, step)) != first_step:
                begun.append((len(found), oldest, group))
            else:
                continued.append((len(found), group))
        # Two statements, because naming `first_step` in an update costs a lookup in its indices.
        self.executemany("UPDATE groups SET num_open = num_open - ?, first_step = ? WHERE id = ?", begun)
        self.executemany("UPDATE groups SET num_open = num_open - ? WHERE id = ?", continued)
        self.execute(
            "UPDATE tasks SET state = 'leased', worker = ?, fence = fence + 1, leased_at = ? "
            "WHERE id IN (SELECT value FROM json_each(?))",
            (worker, self.wall_clock(), array([task.id for task in tasks])),
        )
        return tasks

    def wanted_version(self) -> int | None:
        """Returns the version that the first open task requires, for idle workers to load; None if no task is open or
        the first requires none."""
        return first_wanted(_open_groups(self, 1))

    def leased(self) -> list[Lease]:
        """Returns all leases, including those from before a restart."""
        return [Lease(*row) for row in self.execute("SELECT id, fence, worker FROM tasks WHERE state = 'leased'")]

    def suspects(self) -> list[int]:
        """Returns the ids of unfinished tasks that may kill workers: a worker vanished while it held the task."""
        query = "SELECT id FROM tasks WHERE num_losses > 0 AND state IN ('open', 'leased')"
        return [task for (task,) in self.execute(query)]

    def still_held(self, worker: str, leases: Sequence[tuple[int, int]]) -> list[Lease]:
        """Returns those of `leases`, pairs of task id and fence (the lease's number), that `worker` still holds."""
        wanted = dict(leases)
        query = """SELECT id, fence, worker FROM tasks
                   WHERE state = 'leased' AND worker = ? AND id IN (SELECT value FROM json_each(?))"""
        rows = self.execute(query, (worker, array(wanted)))
        return [Lease(task, fence, name) for task, fence, name in rows if wanted[task] == fence]

    @transactional
    def release(self, worker: str | None = None) -> int:
        """Reopens the tasks leased by `worker`, or all leased tasks if `worker` is None, and returns their number. No
        attempt counts as failed."""
        query = "SELECT id, group_id FROM tasks WHERE state = 'leased' AND (? IS NULL OR worker = ?)"
        tasks = self.execute(query, (worker, worker)).fetchall()
        _reopen(self, tasks)
        return len(tasks)

    @transactional
    def give_back(self, leases: Sequence[Lease], *, untouched: bool = False) -> int:
        """Reopens the tasks of `leases` and returns how many were still leased. No attempt counts as failed.
        `untouched` says that the workers sampled no tokens under these leases and will submit nothing: any version may
        then begin a group that has no other token."""
        query = "SELECT id, group_id FROM tasks WHERE id = ? AND fence = ? AND worker = ? AND state = 'leased'"
        found = [row for lease in leases for row in self.execute(query, (lease.task, lease.fence, lease.worker))]
        _reopen(self, found)
        if untouched:
            self.executemany("UPDATE tasks SET worker = NULL WHERE id = ?", [(task,) for task, _ in found])
            _forget_first_step(self, {group for _, group in found})
        return len(found)

    @transactional
    def lose(self, leases: Sequence[Lease]) -> int:
        """Ends the leases of vanished workers and returns how many were still leased. For each worker, one task may be
        blamed (`offbeat.rules.leases.culprit`): its attempt counts as failed."""
        by_worker: dict[str, list[Lease]] = {}
        for lease in leases:
            by_worker.setdefault(lease.worker, []).append(lease)
        return sum(_lose_one(self, worker, lost) for worker, lost in by_worker.items())

    @transactional
    def fail(
        self, worker: str, task: int, fence: int, reason: str, detail: str | None = None, *, counts: bool = True
    ) -> TaskState:
        """Records a failed attempt and returns the task's new state: open again, or failed after `max_attempts`
        failures that count. The failure does not count if `counts` is False, as for a worker that gets no tasks for now
        (is set aside)."""
        row = self.execute("SELECT state, worker, fence, failed_fence FROM tasks WHERE id = ?", (task,)).fetchone()
        if row is None:
            raise Unknown(f"task {task} does not exist in this run")
        state = TaskState(row[0])
        check_lease(task, worker, fence, holder=row[1], newest=row[2])
        if state in (TaskState.FAILED, TaskState.DROPPED) or fence == row[3]:
            return state  # the failure was reported before, or the task has ended
        if state not in (TaskState.OPEN, TaskState.LEASED):
            raise Fenced(
                f"task {task} can no longer fail, because its trajectory is already stored (state {state.value})"
            )
        _fail(self, [task], reason, detail, counts=counts)
        return TaskState(self.execute("SELECT state FROM tasks WHERE id = ?", (task,)).fetchone()[0])

    @transactional
    def set_aside(self, worker: str, why: str, seconds: float) -> int:
        """Records that `worker` gets no tasks for `seconds`, for the reason `why`. The worker's past failures no longer
        count against tasks that are unfinished. Returns the number of failures that this cancels."""
        now = self.wall_clock()
        query = "INSERT INTO set_aside (worker, why, since, until) VALUES (?, ?, ?, ?)"
        self.execute(query, (worker, why, now, now + seconds))
        query = """SELECT f.task, f.fence FROM failures f JOIN tasks t ON t.id = f.task
                   WHERE f.worker = ? AND f.forgiven = 0 AND t.state IN ('open', 'leased')"""
        rows = self.execute(query, (worker,)).fetchall()
        self.executemany("UPDATE failures SET forgiven = 1 WHERE task = ? AND fence = ?", rows)
        self.executemany("UPDATE tasks SET num_failures = num_failures - 1 WHERE id = ?", [(task,) for task, _ in rows])
        return len(rows)


@dataclass(frozen=True)
class _OpenGroups:
    """The open groups for a worker, whose version is of `step`; `next_step` is the first step without a batch."""

    db: Database
    request: LeaseRequest
    step: int | None
    next_step: int

    def all(self) -> list[OpenGroup]:
        return _open_groups(self.db, request=self.request)

    def num_open(self) -> int:
        return int(self.db.execute(f"SELECT SUM(num_open) FROM {self.request.table}").fetchone()[0])

    def num_begin(self) -> int | None:
        return _num_begin(self.db, self.step, self.next_step)


def _steps(db: Database, version: int | None) -> tuple[int | None, int]:
    """Returns the step of `version` (None if the version was never published or is abandoned), and the first step
    without a batch."""
    query = """SELECT (SELECT step FROM versions WHERE number = ? AND abandoned = 0),
                      (SELECT step FROM versions NOT INDEXED WHERE abandoned = 0 ORDER BY number DESC LIMIT 1),
                      (SELECT MAX(step) + 1 FROM batches WHERE state <> 'undone')"""
    step, newest, claimed = db.execute(query, (version,)).fetchone()
    return step, unclaimed_step(newest, claimed)


def _requester(db: Database, request: LeaseRequest, step: int | None) -> Requester:
    query = "SELECT num_losses, COUNT(*) FROM tasks WHERE state = 'leased' AND worker = ? GROUP BY num_losses"
    held = dict(db.execute(query, (request.worker,)))
    return Requester(
        request.capacity,
        request.have_version,
        step=step,
        total_slots=request.total_slots,
        num_held=sum(held.values()),
        suspects={losses: count for losses, count in held.items() if losses},
    )


def _num_begin(db: Database, step: int | None, next_step: int) -> int | None:
    """Returns how many groups may be begun now with a version of `step`, so that none is too stale when it is trained;
    None: any number."""
    if step is None or db.terms.groups_per_step is None:
        return None
    begun: Counter[int] = Counter()
    for state in ("open", "ready"):
        query = f"""SELECT first_step, COUNT(*) FROM groups WHERE state = '{state}' AND purpose = 'train'
                    AND require_step IS NULL AND first_step IS NOT NULL GROUP BY first_step"""
        begun.update(dict(db.execute(query)))
    return may_begin(step, begun, next_step, db.terms.groups_per_step, db.terms.max_staleness)


def _open_groups(db: Database, limit: int = -1, request: LeaseRequest | None = None) -> list[OpenGroup]:
    """Loads the first `limit` groups with open tasks (all if `limit` is -1), in the order of `OpenGroup.order`. Leaves
    out what `request` excludes: training groups if `only_eval`, and tasks whose last attempt this worker failed if
    `skips_failed`."""
    query = f"""SELECT id, ordinal, purpose = 'eval', size, num_open, require_version, first_step
                FROM {OPEN if request is None else request.table}
                ORDER BY purpose <> 'eval', num_open = size, ordinal, id LIMIT ?"""
    losses = dict(
        db.execute(
            "SELECT group_id, MAX(num_losses) FROM tasks WHERE state = 'open' AND num_losses > 0 GROUP BY group_id"
        )
    )
    rows = db.execute(query, (limit,)).fetchall()
    if request is not None and request.skips_failed:
        query = f"SELECT t.group_id, COUNT(*) FROM tasks t WHERE {TO_RETRY} AND t.worker = ? GROUP BY t.group_id"
        skipped = dict(db.execute(query, (request.worker,)))
        rows = [(*row[:4], row[4] - skipped.get(row[0], 0), *row[5:]) for row in rows]
        rows = [row for row in rows if row[4]]
    begun = [row[0] for row in rows if row[-1] is not None and not row[2]]
    away = _away(db, begun, request) if request is not None else set()
    return [
        OpenGroup(
            group, ordinal, bool(is_eval), size, num_open, required, losses.get(group, 0), first_step, group in away
        )
        for group, ordinal, is_eval, size, num_open, required, first_step in rows
    ]


def _away(db: Database, groups: Sequence[int], request: LeaseRequest) -> set[int]:
    """Returns those of `groups` whose open tasks have partials (unfinished answers), but none from the requesting
    worker. Empty if `request.is_alone`."""
    if not groups or request.is_alone:
        return set()
    query = """SELECT t.group_id, p.worker = ? FROM json_each(?) g
               CROSS JOIN tasks t ON t.group_id = g.value AND t.state = 'open'
               CROSS JOIN partials p ON p.task = t.id AND p.state = 'kept'"""
    found = db.execute(query, (request.worker, array(groups))).fetchall()
    return {group for group, _ in found} - {group for group, is_own in found if is_own}


def _open_tasks(db: Database, group: int, count: int, request: LeaseRequest) -> tuple[list[Task], int | None]:
    """Returns up to `count` open tasks of `group` that the worker may run, and the group's `first_step`: the step of
    the oldest version with which a member was begun, or None."""
    query = f"""SELECT t.id, t.seed, t.fence + 1, p.digest, p.body, g.source, g.seed, g.problem, g.prompt,
                       g.sampling, g.require_version, g.first_step, p.last_version, p.worker,
                       CASE WHEN {TO_RETRY} THEN t.worker END
                FROM groups g CROSS JOIN tasks t ON t.group_id = g.id
                LEFT JOIN partials p ON p.task = t.id AND p.state = 'kept'
                WHERE g.id = ? AND t.state = 'open' ORDER BY t.member"""
    found = {row[0]: row for row in db.execute(query, (group,))}
    open_tasks = [OpenTask(task, *row[-3:]) for task, row in found.items()]
    chosen = choose_tasks(
        open_tasks,
        count,
        request.worker,
        request.have_version,
        is_alone=request.is_alone,
        skips_failed=request.skips_failed,
    )
    rows = [found[task][:-3] for task in chosen]
    if not rows:
        return [], None
    *_, source, group_seed, problem, prompt, sampling, require_version, first_step = rows[0]
    prompt_tokens, how = np.frombuffer(prompt, np.int32), sampling_of(sampling)
    is_episode = source in db.terms.episodes
    episode = EpisodeStart(source, json.loads(problem), group_seed) if is_episode else msgspec.UNSET
    tasks = [
        Task(
            id=task,
            group=group,
            prompt=prompt_tokens,
            seed=seed,
            sampling=how,
            require_version=require_version,
            prefix=bodies.load(db.blobs, digest, body),
            fence=fence,
            episode=episode,
        )
        for task, seed, fence, digest, body, *_ in rows
    ]
    return tasks, first_step


def _forget_first_step(db: Database, groups: Iterable[int]) -> None:
    """Clears `first_step` (the step of the oldest version with which a member was begun), so that any version may begin
    the group. Does so only for open groups of which neither the ledger nor a worker has a sampled token."""
    db.execute(
        """UPDATE groups SET first_step = NULL
           WHERE id IN (SELECT value FROM json_each(?)) AND +state = 'open' AND num_open = size AND NOT EXISTS (
               SELECT 1 FROM tasks t LEFT JOIN partials p ON p.task = t.id AND p.state = 'kept'
               WHERE t.group_id = groups.id AND (t.worker IS NOT NULL OR p.task IS NOT NULL))""",
        (array(groups),),
    )


def _lose_one(db: Database, worker: str, leases: Sequence[Lease]) -> int:
    query = "SELECT id, num_losses FROM tasks WHERE id = ? AND fence = ? AND worker = ? AND state = 'leased'"
    lost = dict(row for lease in leases for row in db.execute(query, (lease.task, lease.fence, lease.worker)))
    db.executemany("UPDATE tasks SET num_losses = num_losses + 1 WHERE id = ?", [(task,) for task in lost])
    blamed = culprit(lost)
    if blamed is not None:
        _fail(db, [blamed], WORKER_LOST, f"worker {worker}", counts=True)
    query = "SELECT id, group_id FROM tasks WHERE state = 'leased' AND id IN (SELECT value FROM json_each(?))"
    _reopen(db, db.execute(query, (array(lost),)).fetchall())  # the failure may have dropped a group and its tasks
    return len(lost)


@lru_cache(maxsize=256)
def sampling_of(text: str) -> Sampling:
    """Decodes the `sampling` column of a group; most groups of a run share one value."""
    return msgspec.json.decode(text, type=Sampling)


def check_lease(task: int, worker: str, fence: int, *, holder: str | None, newest: int) -> None:
    """Raises if a lease is not its task's latest one. `worker` and `fence` belong to the lease to check, `holder` and
    `newest` to the latest lease."""
    if fence < newest:
        raise Fenced(f"lease {fence} of task {task} is over: the task was leased again (lease {newest})")
    if fence > newest:
        raise Forbidden(f"lease {fence} of task {task} was never granted; the latest is lease {newest}")
    if worker != holder:
        raise Forbidden(f"task {task} was leased by {holder}, not by {worker}")


def _fail(db: Database, tasks: Sequence[int], reason: str, detail: str | None, *, counts: bool) -> None:
    db.execute(
        "INSERT INTO failures SELECT id, fence, worker, ?, ?, ?, ? FROM tasks "
        "WHERE id IN (SELECT value FROM json_each(?))",
        (reason, detail, db.wall_clock(), not counts, array(tasks)),
    )
    query = "SELECT id, group_id, state, num_failures + ? FROM tasks WHERE id IN (SELECT value FROM json_each(?))"
    rows = db.execute(query, (counts, array(tasks))).fetchall()
    db.executemany(
        "UPDATE tasks SET num_failures = ?, failed_fence = fence WHERE id = ?", [(n, task) for task, _, _, n in rows]
    )
    ended = [(task, group, state) for task, group, state, n in rows if counts and ends_task(n, db.terms.max_attempts)]
    over = {task for task, _, _ in ended}
    _reopen(db, [(task, group) for task, group, state, _ in rows if task not in over and state == TaskState.LEASED])
    db.executemany(
        "UPDATE tasks SET state = 'failed', reason = ?, detail = ? WHERE id = ?",
        [(reason, detail, task) for task, _, _ in ended],
    )
    partials.waste(db, tasks if reason == LOST_ENVIRONMENT else [task for task, _, _ in ended], reason)
    db.executemany(
        "UPDATE groups SET num_failed = num_failed + 1, num_open = num_open - ? WHERE id = ?",
        [(state == TaskState.OPEN, group) for _, group, state in ended],
    )
    settle_groups(db, [group for _, group, _ in ended])


def _reopen(db: Database, tasks: Sequence[tuple[int, int]]) -> None:
    """Reopens leased tasks, given as pairs of task and group. Until a task's next lease, its last worker may still
    submit."""
    db.executemany("UPDATE tasks SET state = 'open' WHERE id = ?", [(task,) for task, _ in tasks])
    db.executemany("UPDATE groups SET num_open = num_open + 1 WHERE id = ?", [(group,) for _, group in tasks])
