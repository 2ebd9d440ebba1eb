"""Open tasks and who works on them.

Guarantees: a task is held by one worker at a time, under a fence that grows with every lease; one that requires a
version goes only to a worker that has it; a task that workers failed `max_attempts` times ends as failed, with the
reason; an attempt counts once, however often its failure is told. When a worker vanishes, only the task that is to
blame for it counts a failure (`offbeat.control.assign`). What a worker gives back, and a restart of the coordinator,
cost no attempt: otherwise a run that is killed often enough would train on other data than one that is not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import msgspec
import numpy as np

from offbeat.control.admit import may_begin
from offbeat.control.assign import Asker, OpenGroup, assign, culprit, front
from offbeat.control.assign import wanted_version as first_wanted
from offbeat.control.leases import Held
from offbeat.control.settle import Terms
from offbeat.ledger import partials
from offbeat.ledger.database import Database, array
from offbeat.ledger.errors import Fenced, Forbidden, Unknown
from offbeat.ledger.groups import settle_groups
from offbeat.ledger.records import WORKER_LOST, TaskState
from offbeat.trajectory import Sampling, Task

OPEN = """groups INDEXED BY groups_open
          WHERE state = 'open' AND num_open > 0 AND (require_step IS NULL OR require_version IS NOT NULL)"""
"""Groups with a task that a worker could be given."""
OPEN_EVAL = f"{OPEN} AND (purpose <> 'eval') < 1"
"""Those among them that judge a version, asked for such that the index brings them in order."""
TO_RETRY = "t.state = 'open' AND t.fence > 0 AND t.failed_fence = t.fence"
"""Tasks that are open again because the worker that held them last failed them."""
NUM_NEAR = 8
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
    only_eval: bool = False
    """Whether nothing but evaluation is handed out."""
    skips_failed: bool = False
    """Whether tasks that this worker itself failed last are left to others."""

    @property
    def is_alone(self) -> bool:
        """Whether no other worker has slots."""
        return self.total_slots is None or self.total_slots <= self.capacity

    @property
    def asked(self) -> str:
        """The groups that it may be given tasks of."""
        return OPEN_EVAL if self.only_eval else OPEN


def lease(db: Database, asking: Asking, bound: int, groups_per_step: int | None) -> list[Task]:
    """`groups_per_step` paces what may be begun; None: everything may."""
    if asking.capacity <= 0:
        return []
    near = _open_groups(db, NUM_NEAR + asking.capacity, asking)
    if not near:
        return []
    step, next_step = _steps(db, asking.have_version)
    asker = _asker(db, asking, step)

    def num_begin() -> int | None:
        return None if step is None else _num_begin(db, step, next_step, bound, groups_per_step)

    tasks: list[Task] = []
    begun, carried_on = [], []
    for group, count in _assigned(db, near, asker, num_begin, asking):
        found, first_step = _open_tasks(db, group, count, asking)
        if not found:
            continue
        tasks += found
        if step is not None and (first_step is None or first_step > step):
            begun.append((len(found), step, group))
        else:
            carried_on.append((len(found), group))
    # What an update does not name it need not look up in the indices.
    db.executemany("UPDATE groups SET num_open = num_open - ?, first_step = ? WHERE id = ?", begun)
    db.executemany("UPDATE groups SET num_open = num_open - ? WHERE id = ?", carried_on)
    db.execute(
        "UPDATE tasks SET state = 'leased', worker = ?, fence = fence + 1, leased_at = ? "
        "WHERE id IN (SELECT value FROM json_each(?))",
        (asking.worker, db.wall_clock(), array([task.id for task in tasks])),
    )
    return tasks


def _assigned(
    db: Database, near: Sequence[OpenGroup], asker: Asker, num_begin: Callable[[], int | None], asking: Asking
) -> list[tuple[int, int]]:
    """What the worker is given of the groups asked for, of which the first ones are at hand. Their number, how many may
    be begun and the groups further on are asked for only where the answer depends on it."""
    is_all = len(near) < NUM_NEAR + asker.capacity
    num_open = sum(group.num_open for group in near)
    if not is_all and asker.share(num_open) < asker.capacity:
        num_open = int(db.execute(f"SELECT SUM(num_open) FROM {asking.asked}").fetchone()[0])
    asker = replace(asker, num_open=num_open)

    def is_filled(given: Sequence[tuple[int, int]]) -> bool:
        return sum(count for _, count in given) == asker.share(num_open)

    begun = front(near)
    is_whole = is_all or len(begun) < len(near)
    given = assign(begun if is_whole else [group for group in begun if not group.is_away], asker)
    if is_filled(given):
        return given
    asker = replace(asker, num_begin=num_begin())
    if is_whole:
        given = assign(near, asker)
        if is_all or is_filled(given):
            return given
    return assign(_open_groups(db, asking=asking), asker)


def _steps(db: Database, version: int | None) -> tuple[int | None, int]:
    """The step of a version if it lives, and the first step without a batch."""
    query = """SELECT (SELECT step FROM versions WHERE number = ? AND abandoned = 0),
                      (SELECT step FROM versions WHERE abandoned = 0 ORDER BY number DESC LIMIT 1),
                      (SELECT MAX(step) + 1 FROM batches WHERE state <> 'undone')"""
    step, newest, claimed = db.execute(query, (version,)).fetchone()
    return step, max(newest or 0, claimed or 0)


def _asker(db: Database, asking: Asking, step: int | None) -> Asker:
    query = "SELECT num_losses, COUNT(*) FROM tasks WHERE state = 'leased' AND worker = ? GROUP BY num_losses"
    held = dict(db.execute(query, (asking.worker,)))
    return Asker(
        asking.capacity,
        asking.have_version,
        step=step,
        total_slots=asking.total_slots,
        num_held=sum(held.values()),
        suspects={losses: count for losses, count in held.items() if losses},
    )


def _num_begin(db: Database, step: int, next_step: int, bound: int, groups_per_step: int | None) -> int | None:
    """How many groups pacing lets a worker begin that has a version of `step`."""
    if groups_per_step is None:
        return None
    begun: Counter[int] = Counter()
    for state in ("open", "ready"):
        query = f"""SELECT first_step, COUNT(*) FROM groups WHERE state = '{state}' AND purpose = 'train'
                    AND require_step IS NULL AND first_step IS NOT NULL GROUP BY first_step"""
        begun.update(dict(db.execute(query)))
    return may_begin(step, begun, next_step, groups_per_step, bound)


def _open_groups(db: Database, limit: int = -1, asking: Asking | None = None) -> list[OpenGroup]:
    """Groups with open tasks, by `OpenGroup.order`; all of them, or the first ones."""
    query = f"""SELECT id, ordinal, purpose = 'eval', size, num_open, require_version, first_step
                FROM {OPEN if asking is None else asking.asked}
                ORDER BY purpose <> 'eval', num_open = size, ordinal, id LIMIT ?"""
    losses = dict(
        db.execute(
            "SELECT group_id, MAX(num_losses) FROM tasks WHERE state = 'open' AND num_losses > 0 GROUP BY group_id"
        )
    )
    rows = db.execute(query, (limit,)).fetchall()
    if asking is not None and asking.skips_failed:
        query = f"SELECT t.group_id, COUNT(*) FROM tasks t WHERE {TO_RETRY} AND t.worker = ? GROUP BY t.group_id"
        skipped = dict(db.execute(query, (asking.worker,)))
        rows = [(*row[:4], row[4] - skipped.get(row[0], 0), *row[5:]) for row in rows]
        rows = [row for row in rows if row[4]]
    begun = [row[0] for row in rows if row[-1] is not None and not row[2]]
    away = _away(db, begun, asking) if asking is not None else set()
    return [
        OpenGroup(
            group, ordinal, bool(is_eval), size, num_open, required, losses.get(group, 0), first_step, group in away
        )
        for group, ordinal, is_eval, size, num_open, required, first_step in rows
    ]


def _away(db: Database, groups: Sequence[int], asking: Asking) -> set[int]:
    """Of groups that were begun, those of which other workers alone handed back what can be carried on."""
    if not groups or asking.is_alone:
        return set()
    query = """SELECT t.group_id, p.worker = ? FROM json_each(?) g
               CROSS JOIN tasks t ON t.group_id = g.value AND t.state = 'open'
               CROSS JOIN partials p ON p.task = t.id AND p.state = 'kept'"""
    found = db.execute(query, (asking.worker, array(groups))).fetchall()
    return {group for group, _ in found} - {group for group, is_own in found if is_own}


def _open_tasks(db: Database, group: int, count: int, asking: Asking) -> tuple[list[Task], int | None]:
    """A group's open tasks, but those begun with a newer version than the worker has: versions only rise. What lies
    with another worker comes last. And the step that the group was begun with."""

    def found(which: str, limit: int) -> list[Any]:
        query = f"""SELECT t.id, t.seed, t.fence + 1, p.digest, p.body, g.prompt, g.sampling, g.require_version,
                           g.first_step
                    FROM groups g CROSS JOIN tasks t ON t.group_id = g.id
                    LEFT JOIN partials p ON p.task = t.id AND p.state = 'kept'
                    WHERE g.id = :group AND t.state = 'open' AND (p.task IS NULL OR p.last_version <= :version)
                          AND ({which}) AND NOT (:skips AND {TO_RETRY} AND t.worker IS :worker)
                    ORDER BY t.member LIMIT :limit"""
        known = {"group": group, "version": asking.have_version, "worker": asking.worker, "limit": limit}
        known["skips"] = asking.skips_failed
        return db.execute(query, known).fetchall()

    if asking.is_alone:
        rows = found("1", count)
    else:
        rows = found("p.task IS NULL OR p.worker = :worker", count)
        if len(rows) < count:
            rows += found("p.worker <> :worker", count - len(rows))
    if not rows:
        return [], None
    *_, prompt, sampling, require_version, first_step = rows[0]
    prompt_tokens, how = np.frombuffer(prompt, np.int32), sampling_of(sampling)
    tasks = [
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
        for task, seed, fence, digest, body, *_ in rows
    ]
    return tasks, first_step


def leased(db: Database) -> list[Held]:
    """Every lease that the ledger knows: those of before a restart, too."""
    return [Held(*row) for row in db.execute("SELECT id, fence, worker FROM tasks WHERE state = 'leased'")]


def suspects(db: Database) -> list[int]:
    query = "SELECT id FROM tasks WHERE num_losses > 0 AND state IN ('open', 'leased')"
    return [task for (task,) in db.execute(query)]


def still_held(db: Database, worker: str, leases: Iterable[tuple[int, int]]) -> list[Held]:
    """Of the leases that a worker believes to hold, those that it does."""
    wanted = dict(leases)
    query = """SELECT id, fence, worker FROM tasks
               WHERE state = 'leased' AND worker = ? AND id IN (SELECT value FROM json_each(?))"""
    rows = db.execute(query, (worker, array(wanted)))
    return [Held(task, fence, name) for task, fence, name in rows if wanted[task] == fence]


def release(db: Database, worker: str | None) -> int:
    """Opens what a worker that leaves still holds; without a name, what anybody does."""
    query = "SELECT id, group_id FROM tasks WHERE state = 'leased' AND (? IS NULL OR worker = ?)"
    tasks = db.execute(query, (worker, worker)).fetchall()
    _reopen(db, tasks)
    return len(tasks)


def give_back(db: Database, leases: Sequence[Held], *, untouched: bool) -> int:
    """Opens those of the tasks that are still leased as named; where their worker says that it has no new token of
    them, nobody will hand one in under these leases."""
    query = "SELECT id, group_id FROM tasks WHERE id = ? AND fence = ? AND worker = ? AND state = 'leased'"
    found = [row for held in leases for row in db.execute(query, (held.task, held.fence, held.worker))]
    _reopen(db, found)
    if untouched:
        db.executemany("UPDATE tasks SET worker = NULL WHERE id = ?", [(task,) for task, _ in found])
        _begin_anew(db, {group for _, group in found})
    return len(found)


def _begin_anew(db: Database, groups: Iterable[int]) -> None:
    """Of groups of which nobody has a token any version may sample the first: they are no older than that."""
    db.execute(
        """UPDATE groups SET first_step = NULL
           WHERE id IN (SELECT value FROM json_each(?)) AND +state = 'open' AND num_open = size AND NOT EXISTS (
               SELECT 1 FROM tasks t LEFT JOIN partials p ON p.task = t.id AND p.state = 'kept'
               WHERE t.group_id = groups.id AND (t.worker IS NOT NULL OR p.task IS NOT NULL))""",
        (array(groups),),
    )


def lose(db: Database, leases: Sequence[Held], terms: Terms, max_attempts: int) -> int:
    """Takes back leases whose workers have vanished; returns how many were still held."""
    by_worker: dict[str, list[Held]] = {}
    for held in leases:
        by_worker.setdefault(held.worker, []).append(held)
    return sum(_lose_one(db, worker, held, terms, max_attempts) for worker, held in by_worker.items())


def _lose_one(db: Database, worker: str, leases: Sequence[Held], terms: Terms, max_attempts: int) -> int:
    query = "SELECT id, num_losses FROM tasks WHERE id = ? AND fence = ? AND worker = ? AND state = 'leased'"
    lost = dict(row for held in leases for row in db.execute(query, (held.task, held.fence, held.worker)))
    db.executemany("UPDATE tasks SET num_losses = num_losses + 1 WHERE id = ?", [(task,) for task in lost])
    blamed = culprit(lost)
    if blamed is not None:
        _fail(db, [blamed], WORKER_LOST, f"worker {worker}", terms, max_attempts)
    query = "SELECT id, group_id FROM tasks WHERE state = 'leased' AND id IN (SELECT value FROM json_each(?))"
    _reopen(db, db.execute(query, (array(lost),)).fetchall())  # without a group that was dropped just now
    return len(lost)


def fail(
    db: Database,
    worker: str,
    task: int,
    fence: int,
    reason: str,
    detail: str | None,
    terms: Terms,
    max_attempts: int,
    *,
    counts: bool,
) -> TaskState:
    """One attempt at a task failed: it is tried again, or ends as failed. Where it does not count, as that of a worker
    that is set aside, the task has as many attempts left as before."""
    row = db.execute("SELECT state, worker, fence, failed_fence FROM tasks WHERE id = ?", (task,)).fetchone()
    if row is None:
        raise Unknown(f"task {task}: never issued")
    state = TaskState(row[0])
    check_lease(task, worker, fence, holder=row[1], newest=row[2])
    if state in (TaskState.FAILED, TaskState.DROPPED) or fence == row[3]:
        return state  # told twice, or too late to matter
    if state not in (TaskState.OPEN, TaskState.LEASED):
        raise Fenced(f"task {task}: cannot fail, its trajectory is stored ({state.value})")
    _fail(db, [task], reason, detail, terms, max_attempts if counts else None)
    return TaskState(db.execute("SELECT state FROM tasks WHERE id = ?", (task,)).fetchone()[0])


@lru_cache(maxsize=256)
def sampling_of(text: str) -> Sampling:
    """How a group's answers are drawn, as its row says; most groups of a run say the same."""
    return msgspec.json.decode(text, type=Sampling)


def check_lease(task: int, worker: str, fence: int, *, holder: str | None, newest: int) -> None:
    """Raises unless the worker was the last to be given this task, under this fence."""
    if fence < newest:
        raise Fenced(f"task {task}: fence {fence} is over, the task was leased again as {newest}")
    if fence > newest:
        raise Forbidden(f"task {task}: fence {fence} was never given, the latest is {newest}")
    if worker != holder:
        raise Forbidden(f"task {task}: leased by {holder}, not by {worker}")


def forgive(db: Database, worker: str) -> int:
    """Takes back what a worker's failures count against tasks that have not ended; returns how many they were."""
    query = """SELECT f.task, f.fence FROM failures f JOIN tasks t ON t.id = f.task
               WHERE f.worker = ? AND f.forgiven = 0 AND t.state IN ('open', 'leased')"""
    rows = db.execute(query, (worker,)).fetchall()
    db.executemany("UPDATE failures SET forgiven = 1 WHERE task = ? AND fence = ?", rows)
    db.executemany("UPDATE tasks SET num_failures = num_failures - 1 WHERE id = ?", [(task,) for task, _ in rows])
    return len(rows)


def _fail(
    db: Database, tasks: Sequence[int], reason: str, detail: str | None, terms: Terms, max_attempts: int | None
) -> None:
    """Without `max_attempts` the attempt does not count."""
    counts = max_attempts is not None
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
    ended = [(task, group, state) for task, group, state, n in rows if max_attempts is not None and n >= max_attempts]
    over = {task for task, _, _ in ended}
    _reopen(db, [(task, group) for task, group, state, _ in rows if task not in over and state == TaskState.LEASED])
    db.executemany(
        "UPDATE tasks SET state = 'failed', reason = ?, detail = ? WHERE id = ?",
        [(reason, detail, task) for task, _, _ in ended],
    )
    partials.waste(db, [task for task, _, _ in ended], reason)
    db.executemany(
        "UPDATE groups SET num_failed = num_failed + 1, num_open = num_open - ? WHERE id = ?",
        [(state == TaskState.OPEN, group) for _, group, state in ended],
    )
    settle_groups(db, [group for _, group, _ in ended], terms)


def _reopen(db: Database, tasks: Sequence[tuple[int, int]]) -> None:
    """The worker stays on record: what it finished after all is welcome while nobody else has begun."""
    db.executemany("UPDATE tasks SET state = 'open' WHERE id = ?", [(task,) for task, _ in tasks])
    db.executemany("UPDATE groups SET num_open = num_open + 1 WHERE id = ?", [(group,) for _, group in tasks])
