"""Claims and commits: which data a step trains on, and that it did.

Guarantees: a claim selects, checks the bound against the step really trained from, and stores its answer in one
transaction; asking again for the same step returns the same batch; a commit records the new version with it and is
idempotent by step. No token above the bound, given, or of an abandoned version may be trained.
"""

from __future__ import annotations

import itertools
import json
import operator
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from offbeat.control.select import Candidate, Stretch, is_trainable, select, staleness
from offbeat.crash import crash_here
from offbeat.ledger import versions, workers
from offbeat.ledger.bodies import Bodies
from offbeat.ledger.errors import Conflict, Refused, Unknown
from offbeat.ledger.groups import drop, reissue
from offbeat.ledger.records import Batch, BatchGroup, BatchState, Drop, GroupState, Member
from offbeat.ledger.schema import Database
from offbeat.trajectory import Origin, Reward, Trajectory
from offbeat.weights.version import Version

Stretches = dict[int, list[tuple[int, Stretch, bool]]]
"""By group: task, stretch, and whether its version is abandoned."""


def claim(db: Database, bodies: Bodies, step: int, count: int, bound: int, *, in_order: bool) -> Batch | None:
    newest = versions.latest(db)
    found = _living_batch(db, step)
    if found is None:
        is_ahead = newest is not None and newest.step + 1 == step and _living_batch(db, newest.step) is not None
        if newest is None or (newest.step != step and not is_ahead):
            at = "no version is published" if newest is None else f"the latest version is of step {newest.step}"
            raise Refused(f"step {step} cannot be claimed: {at}")
        return _choose(db, bodies, step, None if is_ahead else newest.number, count, bound, in_order)
    if found["state"] == BatchState.CLAIMED and newest is not None and newest.step == step:
        db.execute("UPDATE batches SET from_version = ? WHERE id = ?", (newest.number, found["id"]))
    return load(db, bodies, found["id"])


def _living_batch(db: Database, step: int) -> dict[str, Any] | None:
    query = "SELECT id, state, to_version FROM batches WHERE step = ? AND state <> 'undone'"
    row = db.execute(query, (step,)).fetchone()
    return None if row is None else dict(zip(("id", "state", "to_version"), row, strict=True))


def _choose(
    db: Database, bodies: Bodies, step: int, from_version: int | None, count: int, bound: int, in_order: bool
) -> Batch | None:
    stale: list[int] = []
    while True:
        groups = _eligible(db, step, count, bound, in_order)
        stretches = _stretches(db, [group for group, _, state, *_ in groups if state == GroupState.READY])
        candidates = [
            Candidate(
                group=group,
                ordinal=ordinal,
                ready=state == GroupState.READY,
                require_step=require_step,
                first_step=first_step,
                stretches=tuple(s for _, s, _ in stretches.get(group, ())),
            )
            for group, ordinal, state, require_step, first_step in groups
        ]
        selection = select(candidates, step, count, bound, in_order=in_order)
        drop(db, selection.stale, Drop.STALE)
        stale += selection.stale
        if selection.take or not selection.stale:  # otherwise those behind the ones dropped are to be looked at
            break
    reissue(db, stale, with_new_seed=False, for_step=step)
    if not selection.take:
        return None
    batch = _store(db, step, from_version, bound, selection.take, stretches)
    crash_here("claim-chosen")
    return load(db, bodies, batch)


def _eligible(db: Database, step: int, count: int, bound: int, in_order: bool) -> list[tuple[Any, ...]]:
    """The groups that selection has to see: the unfinished, the first `count` of the ready ones in the order in which
    they are taken, and all whose tokens may be too old or of an abandoned version. The rest could not be in the batch:
    however much waits, what is read is about as much as is trained."""
    asked = {"step": step, "oldest": step - bound, "count": count}
    columns, due = "id, ordinal, state, require_step, first_step", "(require_step IS NULL OR require_step <= :step)"
    unfinished = f"SELECT {columns} FROM groups WHERE state = 'open' AND purpose = 'train' AND {due}"
    ready = f"""SELECT {columns} FROM groups INDEXED BY groups_ready
                WHERE state = 'ready' AND purpose = 'train' AND {due}"""
    if db.execute("SELECT 1 FROM versions WHERE abandoned = 1 LIMIT 1").fetchone():
        chosen = [ready]
    else:
        order = "ordinal, id" if in_order else "first_step, ordinal, id"
        first_ones = f"{ready} AND first_step >= :oldest ORDER BY {order} LIMIT :count"
        chosen = [first_ones, f"{ready} AND first_step < :oldest", f"{ready} AND first_step IS NULL"]
    return [row for query in (unfinished, *chosen) for row in db.execute(query, asked)]


def _stretches(db: Database, groups: Sequence[int]) -> Stretches:
    """The segments of the groups' scored members, with the steps of their versions."""
    query = """SELECT t.group_id, t.id, s.num_tokens, v.step, v.abandoned
               FROM tasks t JOIN segments s ON s.task = t.id LEFT JOIN versions v ON v.number = s.version
               WHERE t.state = 'scored' AND t.group_id IN (SELECT value FROM json_each(?))
               ORDER BY t.id, s.start"""
    found: Stretches = {}
    for group, task, num_tokens, step, is_abandoned in db.execute(query, (json.dumps(list(groups)),)):
        stretch = Stretch(num_tokens, None if is_abandoned else step)
        found.setdefault(group, []).append((task, stretch, bool(is_abandoned)))
    return found


def _store(
    db: Database, step: int, from_version: int | None, bound: int, groups: Sequence[int], stretches: Stretches
) -> int:
    """Writes a batch and what becomes of each of its sampled tokens."""
    sums: dict[int, list[int]] = {}
    oldest = 0
    for task, stretch, is_abandoned in itertools.chain.from_iterable(stretches[group] for group in groups):
        tokens = sums.setdefault(task, [0, 0, 0])
        if is_trainable(stretch.step, step, bound):
            tokens[0] += stretch.num_tokens
            oldest = max(oldest, staleness(stretch.step, step) or 0)
        elif stretch.step is not None:
            tokens[1] += stretch.num_tokens
        elif is_abandoned:
            tokens[2] += stretch.num_tokens
    totals = [sum(column) for column in zip(*sums.values(), strict=True)]
    batch = db.execute(
        "INSERT INTO batches (step, bound, state, from_version, num_trained_tokens, num_stale_tokens, "
        "num_abandoned_tokens, max_staleness, claimed_at) VALUES (?, ?, 'claimed', ?, ?, ?, ?, ?, ?)",
        (step, bound, from_version, *totals, oldest, db.wall_clock()),
    ).lastrowid
    assert batch is not None
    db.executemany(
        "INSERT INTO batch_members (batch, task, num_trained_tokens, num_stale_tokens, num_abandoned_tokens) "
        "VALUES (?, ?, ?, ?, ?)",
        [(batch, task, *tokens) for task, tokens in sums.items()],
    )
    db.executemany("UPDATE groups SET state = 'claimed', batch = ? WHERE id = ?", [(batch, g) for g in groups])
    return batch


def load(db: Database, bodies: Bodies, batch: int) -> Batch:
    """A batch as it was claimed, by ordinal and member."""
    step, from_version, bound = db.execute(
        "SELECT step, from_version, bound FROM batches WHERE id = ?", (batch,)
    ).fetchone()
    query = """SELECT g.id, g.ordinal, g.source, t.id, t.member, j.digest, r.parts, r.value
               FROM batch_members m JOIN tasks t ON t.id = m.task JOIN groups g ON g.id = t.group_id
               JOIN trajectories j ON j.task = t.id JOIN rewards r ON r.task = t.id
               WHERE m.batch = ? ORDER BY g.ordinal, t.member"""
    rows = db.execute(query, (batch,)).fetchall()
    trajectories = bodies.load((row[3], row[5]) for row in rows)
    numbers = {s.version for trajectory in trajectories.values() for s in trajectory.segments if s.version is not None}
    steps = {number: version.living_step for number, version in versions.lineage(db, numbers).items()}
    parts = {text: msgspec.json.decode(text, type=tuple[Reward, ...]) for text in {row[6] for row in rows}}
    groups = []
    for (group, ordinal, source), members in itertools.groupby(rows, key=operator.itemgetter(0, 1, 2)):
        loaded = [
            Member(task, member, trajectories[task], parts[text], value, _ages(trajectories[task], steps, step, bound))
            for *_, task, member, _, text, value in members
        ]
        groups.append(BatchGroup(group, ordinal, source, tuple(loaded)))
    return Batch(step, from_version, tuple(groups))


def _ages(trajectory: Trajectory, steps: dict[int, int | None], step: int, bound: int) -> np.ndarray:
    """The staleness of each response token; -1 where it may not be trained."""
    ages = np.full(trajectory.num_tokens, -1, np.int32)
    for s in trajectory.segments:
        if s.origin is Origin.SAMPLED and s.version is not None:
            age = staleness(steps[s.version], step)
            ages[s.start : s.end] = -1 if age is None or age > bound else age
    return ages


def commit(db: Database, step: int, version: Version, audited: Sequence[int] = ()) -> None:
    batch = _living_batch(db, step)
    if batch is None:
        raise Unknown(f"step {step}: nothing was claimed for it")
    if batch["to_version"] is not None:
        if batch["to_version"] == version.number and versions.is_recorded(db, version):
            return
        raise Conflict(f"step {step} was committed as version {batch['to_version']}, not {version.number}")
    parent = versions.living_parent(db, version)
    if parent.step != step or version.step != step + 1:
        raise Refused(
            f"commit of step {step}: version {version.number} must be of step {step + 1}, with a parent of step "
            f"{step}; it is of step {version.step}, its parent of step {parent.step}"
        )
    if versions.is_recorded(db, version):
        raise Conflict(f"version {version.number} is published already, and not by this commit")
    mark_trained(db, batch["id"])
    _leave_out(db, batch["id"], audited)
    workers.count_audits(db, batch["id"])
    versions.record(db, version)


def _leave_out(db: Database, batch: int, tasks: Sequence[int]) -> None:
    """The trainer could not believe these members' log-probs and gave them no part in the update."""
    unique = json.dumps(sorted(set(tasks)))
    query = """UPDATE batch_members SET num_audit_tokens = num_trained_tokens, num_trained_tokens = 0
               WHERE batch = ? AND task IN (SELECT value FROM json_each(?))"""
    found = db.execute(query, (batch, unique)).rowcount
    if found != len(set(tasks)):
        raise Refused(f"audit of tasks {unique}: not all of them are in this batch")
    if found:
        sum_up(db, batch)


def sum_up(db: Database, batch: int) -> None:
    """Brings a batch's sums in line with its members', after an audit left some out or took them in again."""
    db.execute(
        "UPDATE batches SET (num_trained_tokens, num_audit_tokens) = (SELECT SUM(num_trained_tokens), "
        "SUM(num_audit_tokens) FROM batch_members WHERE batch = :batch), max_staleness = ("
        "SELECT COALESCE(MAX(batches.step - v.step), 0) FROM batch_members m JOIN segments s ON s.task = m.task "
        "JOIN versions v ON v.number = s.version WHERE m.batch = :batch AND m.num_trained_tokens > 0 "
        "AND v.abandoned = 0 AND batches.step - v.step BETWEEN 0 AND batches.bound) WHERE id = :batch",
        {"batch": batch},
    )


def mark_trained(db: Database, batch: int) -> None:
    now = db.wall_clock()
    db.execute("UPDATE batches SET state = 'trained', trained_at = ? WHERE id = ?", (now, batch))
    db.execute("UPDATE groups SET state = 'trained', ended_at = ? WHERE batch = ?", (now, batch))
