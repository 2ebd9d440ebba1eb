"""Open tasks and who works on them.

Guarantees: a task is held by one worker at a time; one that requires a version goes only to a worker that has it; a
task that workers failed `max_attempts` times ends as failed, with the reason. A restart of the whole run costs no
attempt: otherwise a run that is killed often enough would train on other data than one that is not.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import msgspec
import numpy as np

from offbeat.control.assign import OpenGroup, assign
from offbeat.control.assign import wanted_version as first_wanted
from offbeat.ledger.errors import Refused, Unknown
from offbeat.ledger.groups import settle_groups
from offbeat.ledger.records import WORKER_LOST, Purpose, TaskState
from offbeat.ledger.schema import Database
from offbeat.trajectory import Sampling, Task


def wanted_version(db: Database) -> int | None:
    return first_wanted(_open_groups(db))


def lease(db: Database, worker: str, capacity: int, have_version: int | None) -> list[Task]:
    given = assign(_open_groups(db), capacity, have_version)
    tasks: list[Task] = []
    for group, count in given:
        tasks += _open_tasks(db, group, count)
    db.execute(
        "UPDATE tasks SET state = 'leased', worker = ?, attempt = attempt + 1 "
        "WHERE id IN (SELECT value FROM json_each(?))",
        (worker, json.dumps([task.id for task in tasks])),
    )
    db.executemany("UPDATE groups SET num_open = num_open - ? WHERE id = ?", [(count, group) for group, count in given])
    return tasks


def _open_groups(db: Database) -> list[OpenGroup]:
    query = """SELECT id, ordinal, purpose, size, num_open, require_version FROM groups
               WHERE state = 'open' AND num_open > 0 AND (require_step IS NULL OR require_version IS NOT NULL)"""
    return [
        OpenGroup(group, ordinal, purpose == Purpose.EVAL, size, num_open, require_version)
        for group, ordinal, purpose, size, num_open, require_version in db.execute(query)
    ]


def _open_tasks(db: Database, group: int, count: int) -> list[Task]:
    prompt, sampling, require_version = db.execute(
        "SELECT prompt, sampling, require_version FROM groups WHERE id = ?", (group,)
    ).fetchone()
    prompt_tokens, how = np.frombuffer(prompt, np.int32), msgspec.json.decode(sampling, type=Sampling)
    query = "SELECT id, seed FROM tasks WHERE group_id = ? AND state = 'open' ORDER BY member LIMIT ?"
    return [
        Task(id=task, group=group, prompt=prompt_tokens, seed=seed, sampling=how, require_version=require_version)
        for task, seed in db.execute(query, (group, count))
    ]


def release_all(db: Database) -> int:
    """Takes back every lease at a restart, when nobody can hold one."""
    tasks = db.execute("SELECT id, group_id FROM tasks WHERE state = 'leased'").fetchall()
    _reopen(db, tasks)
    return len(tasks)


def release_worker(db: Database, worker: str, min_group: int, max_attempts: int) -> int:
    """Takes back the leases of a worker that is lost; each counts as one failed attempt."""
    tasks = db.execute("SELECT id FROM tasks WHERE state = 'leased' AND worker = ?", (worker,)).fetchall()
    _fail(db, [task for (task,) in tasks], WORKER_LOST, f"worker {worker}", min_group, max_attempts)
    return len(tasks)


def fail(
    db: Database, task: int, reason: str, detail: str | None, is_final: bool, min_group: int, max_attempts: int
) -> TaskState:
    """One attempt at a task failed: it is tried again, or ends as failed."""
    row = db.execute("SELECT state FROM tasks WHERE id = ?", (task,)).fetchone()
    if row is None:
        raise Unknown(f"task {task}: never issued")
    state = TaskState(row[0])
    if state in (TaskState.FAILED, TaskState.DROPPED):
        return state  # told twice, or too late to matter
    if state not in (TaskState.OPEN, TaskState.LEASED):
        raise Refused(f"task {task}: cannot fail, its trajectory is stored ({state.value})")
    _fail(db, [task], reason, detail, min_group, 1 if is_final else max_attempts)
    return TaskState(db.execute("SELECT state FROM tasks WHERE id = ?", (task,)).fetchone()[0])


def _fail(
    db: Database, tasks: Sequence[int], reason: str, detail: str | None, min_group: int, max_attempts: int
) -> None:
    query = "SELECT id, group_id, state, num_failures + 1 FROM tasks WHERE id IN (SELECT value FROM json_each(?))"
    rows = db.execute(query, (json.dumps(list(tasks)),)).fetchall()
    db.executemany("UPDATE tasks SET num_failures = ? WHERE id = ?", [(n, task) for task, _, _, n in rows])
    _reopen(db, [(task, group) for task, group, state, n in rows if n < max_attempts and state == TaskState.LEASED])
    ended = [(task, group, state) for task, group, state, n in rows if n >= max_attempts]
    db.executemany(
        "UPDATE tasks SET state = 'failed', worker = NULL, reason = ?, detail = ? WHERE id = ?",
        [(reason, detail, task) for task, _, _ in ended],
    )
    db.executemany(
        "UPDATE groups SET num_failed = num_failed + 1, num_open = num_open - ? WHERE id = ?",
        [(state == TaskState.OPEN, group) for _, group, state in ended],
    )
    settle_groups(db, [group for _, group, _ in ended], min_group)


def _reopen(db: Database, tasks: Sequence[tuple[int, int]]) -> None:
    db.executemany("UPDATE tasks SET state = 'open', worker = NULL WHERE id = ?", [(task,) for task, _ in tasks])
    db.executemany("UPDATE groups SET num_open = num_open + 1 WHERE id = ?", [(group,) for _, group in tasks])
