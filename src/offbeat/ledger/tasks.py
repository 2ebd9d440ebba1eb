"""Open tasks and who works on them.

Guarantees: a task is held by one worker at a time, under a fence that grows with every lease; one that requires a
version goes only to a worker that has it; a task that workers failed `max_attempts` times ends as failed, with the
reason; an attempt counts once, however often its failure is told. When a worker vanishes, only the task that is to
blame for it counts a failure (`offbeat.control.assign`). What a worker gives back, and a restart of the coordinator,
cost no attempt: otherwise a run that is killed often enough would train on other data than one that is not.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import msgspec
import numpy as np

from offbeat.control.admit import may_begin
from offbeat.control.assign import Asker, OpenGroup, assign, culprit
from offbeat.control.assign import wanted_version as first_wanted
from offbeat.control.leases import Held
from offbeat.ledger import partials, versions
from offbeat.ledger.errors import Fenced, Forbidden, Unknown
from offbeat.ledger.groups import settle_groups
from offbeat.ledger.records import WORKER_LOST, Purpose, TaskState
from offbeat.ledger.schema import Database
from offbeat.trajectory import Sampling, Task

OPEN = "state = 'open' AND num_open > 0 AND (require_step IS NULL OR require_version IS NOT NULL)"
"""Groups with a task that a worker could be given."""
NUM_NEAR = 32
"""Groups looked at first, besides one per task wanted: with hundreds open, the rest seldom matters."""


def wanted_version(db: Database) -> int | None:
    return first_wanted(_open_groups(db, 1))


@dataclass(frozen=True)
class Asking:
    """A worker's call for tasks."""

    worker: str
    capacity: int
    have_version: int | None
    total_slots: int | None = None
    """Of all workers that ask these days; None: it is alone."""


def lease(db: Database, asking: Asking, bound: int, groups_per_step: int | None) -> list[Task]:
    """`groups_per_step` paces what may be begun; None: everything may."""
    worker, have_version = asking.worker, asking.have_version
    if asking.capacity <= 0:
        return []
    groups = _open_groups(db, NUM_NEAR + asking.capacity)
    if not groups:
        return []
    step = _living_step(db, have_version)
    asker = _asker(db, asking, step, None if step is None else _num_begin(db, step, bound, groups_per_step))
    tasks: list[Task] = []
    for group, count in _assigned(db, groups, asker):
        found = _open_tasks(db, group, count, have_version)
        tasks += found
        db.execute("UPDATE groups SET num_open = num_open - ? WHERE id = ?", (len(found), group))
        if found and step is not None:
            db.execute(
                "UPDATE groups SET first_step = ? WHERE id = ? AND (first_step IS NULL OR first_step > ?)",
                (step, group, step),
            )
    db.execute(
        "UPDATE tasks SET state = 'leased', worker = ?, fence = fence + 1, leased_at = ? "
        "WHERE id IN (SELECT value FROM json_each(?))",
        (worker, db.wall_clock(), json.dumps([task.id for task in tasks])),
    )
    return tasks


def _assigned(db: Database, groups: Sequence[OpenGroup], asker: Asker) -> list[tuple[int, int]]:
    """What the worker is given of the first groups; where they do not suit it and there are more, of all."""
    if len(groups) < NUM_NEAR + asker.capacity:
        return assign(groups, asker)
    num_open = int(db.execute(f"SELECT SUM(num_open) FROM groups WHERE {OPEN}").fetchone()[0])
    given = assign(groups, replace(asker, num_open=num_open))
    if sum(count for _, count in given) == asker.share(num_open):
        return given
    return assign(_open_groups(db), asker)


def _living_step(db: Database, version: int | None) -> int | None:
    known = None if version is None else versions.lineage(db, [version]).get(version)
    return None if known is None else known.living_step


def _asker(db: Database, asking: Asking, step: int | None, num_begin: int | None) -> Asker:
    query = "SELECT num_losses, COUNT(*) FROM tasks WHERE state = 'leased' AND worker = ? GROUP BY num_losses"
    held = dict(db.execute(query, (asking.worker,)))
    return Asker(
        asking.capacity,
        asking.have_version,
        step=step,
        num_begin=num_begin,
        total_slots=asking.total_slots,
        num_held=sum(held.values()),
        suspects={losses: count for losses, count in held.items() if losses},
    )


def _num_begin(db: Database, step: int, bound: int, groups_per_step: int | None) -> int | None:
    """How many groups pacing lets a worker begin that has a version of `step`."""
    if groups_per_step is None:
        return None
    begun = dict(
        db.execute(
            "SELECT first_step, COUNT(*) FROM groups WHERE state IN ('open', 'ready') AND purpose = 'train' "
            "AND require_step IS NULL AND first_step IS NOT NULL GROUP BY first_step"
        )
    )
    newest = versions.latest(db)
    claimed = db.execute("SELECT MAX(step) + 1 FROM batches WHERE state <> 'undone'").fetchone()[0]
    return may_begin(step, begun, max(newest.step if newest else 0, claimed or 0), groups_per_step, bound)


def _open_groups(db: Database, limit: int = -1) -> list[OpenGroup]:
    """Groups with open tasks, by `OpenGroup.order`; all of them, or the first ones."""
    query = f"""SELECT id, ordinal, purpose, size, num_open, require_version, first_step FROM groups WHERE {OPEN}
                ORDER BY purpose <> 'eval', num_open = size, +ordinal, id LIMIT ?"""
    losses = dict(
        db.execute(
            "SELECT group_id, MAX(num_losses) FROM tasks WHERE state = 'open' AND num_losses > 0 GROUP BY group_id"
        )
    )
    return [
        OpenGroup(group, ordinal, purpose == Purpose.EVAL, size, num_open, required, losses.get(group, 0), first_step)
        for group, ordinal, purpose, size, num_open, required, first_step in db.execute(query, (limit,))
    ]


def _open_tasks(db: Database, group: int, count: int, have_version: int | None) -> list[Task]:
    """A group's open tasks, but those begun with a newer version than the worker has: versions only rise."""
    prompt, sampling, require_version = db.execute(
        "SELECT prompt, sampling, require_version FROM groups WHERE id = ?", (group,)
    ).fetchone()
    prompt_tokens, how = np.frombuffer(prompt, np.int32), msgspec.json.decode(sampling, type=Sampling)
    query = """SELECT t.id, t.seed, t.fence + 1, p.digest, p.body
               FROM tasks t LEFT JOIN partials p ON p.task = t.id AND p.state = 'kept'
               WHERE t.group_id = ? AND t.state = 'open' AND (p.task IS NULL OR p.last_version <= ?)
               ORDER BY t.member LIMIT ?"""
    return [
        Task(
            id=task,
            group=group,
            prompt=prompt_tokens,
            seed=seed,
            sampling=how,
            require_version=require_version,
            prefix=partials.load(db, digest, body),
            fence=fence,
        )
        for task, seed, fence, digest, body in db.execute(query, (group, have_version, count)).fetchall()
    ]


def leased(db: Database) -> list[Held]:
    """Every lease that the ledger knows: those of before a restart, too."""
    return [Held(*row) for row in db.execute("SELECT id, fence, worker FROM tasks WHERE state = 'leased'")]


def still_held(db: Database, worker: str, leases: Iterable[tuple[int, int]]) -> list[Held]:
    """Of the leases that a worker believes to hold, those that it does."""
    wanted = dict(leases)
    query = """SELECT id, fence, worker FROM tasks
               WHERE state = 'leased' AND worker = ? AND id IN (SELECT value FROM json_each(?))"""
    rows = db.execute(query, (worker, json.dumps(list(wanted))))
    return [Held(task, fence, name) for task, fence, name in rows if wanted[task] == fence]


def release(db: Database, worker: str | None) -> int:
    """Opens what a worker that leaves still holds; without a name, what anybody does."""
    query = "SELECT id, group_id FROM tasks WHERE state = 'leased' AND (? IS NULL OR worker = ?)"
    tasks = db.execute(query, (worker, worker)).fetchall()
    _reopen(db, tasks)
    return len(tasks)


def give_back(db: Database, leases: Sequence[Held]) -> int:
    """Opens those of the tasks that are still leased as named."""
    query = "SELECT id, group_id FROM tasks WHERE id = ? AND fence = ? AND worker = ? AND state = 'leased'"
    found = [row for held in leases for row in db.execute(query, (held.task, held.fence, held.worker))]
    _reopen(db, found)
    return len(found)


def lose(db: Database, leases: Sequence[Held], min_group: int, max_attempts: int) -> int:
    """Takes back leases whose workers have vanished; returns how many were still held."""
    by_worker: dict[str, list[Held]] = {}
    for held in leases:
        by_worker.setdefault(held.worker, []).append(held)
    return sum(_lose_one(db, worker, held, min_group, max_attempts) for worker, held in by_worker.items())


def _lose_one(db: Database, worker: str, leases: Sequence[Held], min_group: int, max_attempts: int) -> int:
    query = "SELECT id, num_losses FROM tasks WHERE id = ? AND fence = ? AND worker = ? AND state = 'leased'"
    lost = dict(row for held in leases for row in db.execute(query, (held.task, held.fence, held.worker)))
    db.executemany("UPDATE tasks SET num_losses = num_losses + 1 WHERE id = ?", [(task,) for task in lost])
    blamed = culprit(lost)
    if blamed is not None:
        _fail(db, [blamed], WORKER_LOST, f"worker {worker}", min_group, max_attempts)
    query = "SELECT id, group_id FROM tasks WHERE state = 'leased' AND id IN (SELECT value FROM json_each(?))"
    _reopen(db, db.execute(query, (json.dumps(list(lost)),)).fetchall())  # without a group that was dropped just now
    return len(lost)


def fail(
    db: Database,
    worker: str,
    task: int,
    fence: int,
    reason: str,
    detail: str | None,
    min_group: int,
    max_attempts: int,
) -> TaskState:
    """One attempt at a task failed: it is tried again, or ends as failed."""
    row = db.execute("SELECT state, worker, fence, failed_fence FROM tasks WHERE id = ?", (task,)).fetchone()
    if row is None:
        raise Unknown(f"task {task}: never issued")
    state = TaskState(row[0])
    check_lease(task, worker, fence, holder=row[1], newest=row[2])
    if state in (TaskState.FAILED, TaskState.DROPPED) or fence == row[3]:
        return state  # told twice, or too late to matter
    if state not in (TaskState.OPEN, TaskState.LEASED):
        raise Fenced(f"task {task}: cannot fail, its trajectory is stored ({state.value})")
    _fail(db, [task], reason, detail, min_group, max_attempts)
    return TaskState(db.execute("SELECT state FROM tasks WHERE id = ?", (task,)).fetchone()[0])


def check_lease(task: int, worker: str, fence: int, *, holder: str | None, newest: int) -> None:
    """Raises unless the worker was the last to be given this task, under this fence."""
    if fence < newest:
        raise Fenced(f"task {task}: fence {fence} is over, the task was leased again as {newest}")
    if fence > newest:
        raise Forbidden(f"task {task}: fence {fence} was never given, the latest is {newest}")
    if worker != holder:
        raise Forbidden(f"task {task}: leased by {holder}, not by {worker}")


def _fail(
    db: Database, tasks: Sequence[int], reason: str, detail: str | None, min_group: int, max_attempts: int
) -> None:
    query = "SELECT id, group_id, state, num_failures + 1 FROM tasks WHERE id IN (SELECT value FROM json_each(?))"
    rows = db.execute(query, (json.dumps(list(tasks)),)).fetchall()
    db.executemany(
        "UPDATE tasks SET num_failures = ?, failed_fence = fence WHERE id = ?", [(n, task) for task, _, _, n in rows]
    )
    _reopen(db, [(task, group) for task, group, state, n in rows if n < max_attempts and state == TaskState.LEASED])
    ended = [(task, group, state) for task, group, state, n in rows if n >= max_attempts]
    db.executemany(
        "UPDATE tasks SET state = 'failed', reason = ?, detail = ? WHERE id = ?",
        [(reason, detail, task) for task, _, _ in ended],
    )
    partials.waste(db, [task for task, _, _ in ended], reason)
    db.executemany(
        "UPDATE groups SET num_failed = num_failed + 1, num_open = num_open - ? WHERE id = ?",
        [(state == TaskState.OPEN, group) for _, group, state in ended],
    )
    settle_groups(db, [group for _, group, _ in ended], min_group)


def _reopen(db: Database, tasks: Sequence[tuple[int, int]]) -> None:
    """The worker stays on record: what it finished after all is welcome while nobody else has begun."""
    db.executemany("UPDATE tasks SET state = 'open' WHERE id = ?", [(task,) for task, _ in tasks])
    db.executemany("UPDATE groups SET num_open = num_open + 1 WHERE id = ?", [(group,) for _, group in tasks])
