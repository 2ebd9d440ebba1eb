"""Single trajectories, for people: which there are, and one of them with all that happened to its task.

Reads only, and may be asked while the run goes on. Texts are the caller's affair: the ledger knows tokens. A trajectory
whose bytes were pruned is still told with everything but its tokens.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

import msgspec
import numpy as np

from offbeat.control.select import is_trainable, staleness
from offbeat.ledger import partials, versions
from offbeat.ledger.bodies import Bodies
from offbeat.ledger.database import Database, array
from offbeat.ledger.errors import Unknown
from offbeat.trajectory import Reward, Trajectory

ROWS = """
SELECT j.seq, t.id, g.id, g.ordinal, t.member, g.purpose, g.source, g.state, b.step, r.value, r.error, j.num_tokens,
       (SELECT MIN(version) FROM segments s WHERE s.task = t.id),
       (SELECT MAX(version) FROM segments s WHERE s.task = t.id),
       j.worker, j.ended_by, j.accepted_at, j.pruned
FROM trajectories j JOIN tasks t ON t.id = j.task JOIN groups g ON g.id = t.group_id
LEFT JOIN batches b ON b.id = g.batch LEFT JOIN rewards r ON r.task = t.id
"""
ORDERS = {
    "latest": "ORDER BY j.seq DESC",
    "best": "AND r.value IS NOT NULL ORDER BY r.value DESC, j.seq DESC",
    "worst": "AND r.value IS NOT NULL ORDER BY r.value, j.seq DESC",
    "oldest": "ORDER BY j.seq",
}
SLICE = 500
PLAIN = ("group", "ordinal", "member", "purpose", "source", "state", "reason", "group_state", "group_reason")
"""What a look takes from its row as it is."""


@dataclass(frozen=True)
class Row:
    """A trajectory in a list."""

    seq: int
    task: int
    group: int
    ordinal: int
    member: int
    purpose: str
    source: str
    state: str
    """Of its group."""
    step: int | None
    """Claimed or trained at; None before that."""
    reward: float | None
    error: str | None
    num_tokens: int
    first_version: int | None
    last_version: int | None
    worker: str
    ended_by: str
    accepted_at: float
    is_pruned: bool


@dataclass(frozen=True)
class Event:
    """Something that happened to a task; `at` is wall time, None where nobody noted it."""

    at: float | None
    what: str


@dataclass(frozen=True)
class Stretch:
    """A segment as it was trained, or would be."""

    start: int
    num_tokens: int
    version: int | None
    """None: given, not sampled."""
    step: int | None
    """Of that version."""
    is_abandoned: bool = False
    staleness: int | None = None
    """None where it was not trained, or is not claimed yet."""


@dataclass(frozen=True)
class Look:
    """A task, and its trajectory as far as there is one."""

    task: int
    group: int
    ordinal: int
    member: int
    purpose: str
    source: str
    state: str
    reason: str | None
    group_state: str
    group_reason: str | None
    prompt: np.ndarray
    problem: dict[str, Any]
    trajectory: Trajectory | None
    """A kept partial where it is not finished; None where nothing is there, or it was pruned."""
    is_pruned: bool
    reward: float | None
    rewards: tuple[Reward, ...]
    error: str | None
    step: int | None
    stretches: tuple[Stretch, ...] = ()
    history: tuple[Event, ...] = ()


def rows(db: Database, limit: int, order: str = "latest", step: int | None = None, after: int = 0) -> list[Row]:
    """Trajectories of a step, or all; `after` is the `seq` of the last one seen, where they come oldest first."""
    query = f"{ROWS} WHERE (:step IS NULL OR b.step = :step) AND j.seq > :after {ORDERS[order]} LIMIT :limit"
    found = db.execute(query, {"step": step, "limit": limit, "after": after})
    names = [column.name for column in fields(Row)]
    return [Row(**dict(zip(names, (*row[:-1], bool(row[-1])), strict=True))) for row in found]


def walk(db: Database, bodies: Bodies, step: int | None = None) -> Iterator[tuple[Row, Trajectory | None]]:
    """All trajectories in order of acceptance, those of a step or all, however many there are."""
    after = 0
    while found := rows(db, SLICE, "oldest", step, after):
        yield from zip(found, load(db, bodies, found), strict=True)
        after = found[-1].seq


def load(db: Database, bodies: Bodies, found: list[Row]) -> list[Trajectory | None]:
    """The trajectories of rows; None where one was pruned."""
    wanted = array([row.seq for row in found if not row.is_pruned])
    query = "SELECT seq, digest FROM trajectories WHERE seq IN (SELECT value FROM json_each(?))"
    loaded = bodies.load(db.execute(query, (wanted,)).fetchall())
    return [loaded.get(row.seq) for row in found]


def look(db: Database, bodies: Bodies, task: int) -> Look:
    query = """SELECT g.id, g.ordinal, t.member, g.purpose, g.source, t.state, t.reason, g.state, g.reason, g.prompt,
                      g.problem, j.seq, j.digest, j.pruned, r.value, r.parts, r.error, b.step, b.bound
               FROM tasks t JOIN groups g ON g.id = t.group_id LEFT JOIN trajectories j ON j.task = t.id
               LEFT JOIN rewards r ON r.task = t.id LEFT JOIN batches b ON b.id = g.batch WHERE t.id = ?"""
    row = db.execute(query, (task,)).fetchone()
    if row is None:
        (last,) = db.execute("SELECT MAX(id) FROM tasks").fetchone()
        raise Unknown(f"task {task}: there are 1 to {last}" if last else f"task {task}: there are none yet")
    prompt, problem, seq, digest, is_pruned, value, parts, error, step, bound = row[9:]
    trajectory = None if digest is None or is_pruned else bodies.load([(seq, digest)])[seq]
    if digest is None:
        query = "SELECT digest, body FROM partials WHERE task = ? AND state = 'kept'"
        trajectory = partials.load(db, *(db.execute(query, (task,)).fetchone() or (None, None)))
    return Look(
        task=task,
        **dict(zip(PLAIN, row[:9], strict=True)),
        prompt=np.frombuffer(prompt, np.int32),
        problem=json.loads(problem),
        trajectory=trajectory,
        is_pruned=bool(is_pruned),
        reward=value,
        rewards=() if parts is None else msgspec.json.decode(parts, type=tuple[Reward, ...]),
        error=error,
        step=step,
        stretches=_stretches(db, task, trajectory, step, bound),
        history=_history(db, task, row[0]),
    )


def _stretches(
    db: Database, task: int, trajectory: Trajectory | None, step: int | None, bound: int | None
) -> tuple[Stretch, ...]:
    query = "SELECT start, num_tokens, version FROM segments WHERE task = ? ORDER BY start"
    segments = db.execute(query, (task,)).fetchall()
    if not segments and trajectory is not None:
        segments = [(s.start, len(s.tokens), s.version) for s in trajectory.segments]
    known = versions.lineage(db, {number for _, _, number in segments if number is not None})
    found = []
    for start, num_tokens, number in segments:
        line = None if number is None else known[number]
        age = None
        if line is not None and step is not None and is_trainable(line.living_step, step, bound or 0):
            age = staleness(line.living_step, step)
        gone = line is not None and line.is_abandoned
        found.append(Stretch(start, num_tokens, number, None if line is None else line.step, gone, age))
    return tuple(found)


def _history(db: Database, task: int, group: int) -> tuple[Event, ...]:
    """What happened, in order; what nobody noted the time of stands where it must have been."""
    state, ended_at, admitted_at, again, reissued = db.execute(
        "SELECT g.state, g.ended_at, g.admitted_at, g.reissue_of, (SELECT id FROM groups n WHERE n.reissue_of = g.id) "
        "FROM groups g WHERE g.id = ?",
        (group,),
    ).fetchone()
    events = [Event(admitted_at, "issued" + (f" again for group {again}" if again is not None else ""))]
    events += _task_events(db, task)
    query = """SELECT b.step, b.state, b.claimed_at, b.trained_at, b.from_version, m.num_trained_tokens,
                      m.num_audit_tokens FROM batch_members m JOIN batches b ON b.id = m.batch
               WHERE m.task = ? ORDER BY b.id"""
    for step, batch, claimed_at, trained_at, number, num_trained, num_audited in db.execute(query, (task,)):
        undone = ", which a resume took back" if batch == "undone" else ""
        events.append(Event(claimed_at, f"claimed for step {step}{undone}"))
        if trained_at is not None:
            left_out = f"; an audit left out {num_audited} tokens" if num_audited else ""
            told = f"trained at step {step} from version {number}: {num_trained} tokens{left_out}{undone}"
            events.append(Event(trained_at, told))
    if state == "dropped":
        events.append(
            Event(ended_at, "its group was dropped" + (f"; issued again as group {reissued}" if reissued else ""))
        )
    return tuple(sorted(events, key=lambda event: event.at or admitted_at))


def _task_events(db: Database, task: int) -> list[Event]:
    worker, fence, leased_at, num_failures, num_losses, detail = db.execute(
        "SELECT worker, fence, leased_at, num_failures, num_losses, detail FROM tasks WHERE id = ?", (task,)
    ).fetchone()
    events = []
    if fence:
        before = f", after {fence - 1} leases before" if fence > 1 else ""
        events.append(Event(leased_at, f"leased by {worker}{before}"))
    if num_failures or num_losses:
        why = f": {detail}" if detail else ""
        events.append(Event(None, f"{num_failures} attempts failed, {num_losses} workers vanished with it{why}"))
    query = "SELECT stored_at, worker, num_sampled_tokens, state, reason FROM partials WHERE task = ? ORDER BY seq"
    for at, who, num_tokens, state, reason in db.execute(query, (task,)):
        fate = f"{state} ({reason})" if reason else state
        events.append(Event(at, f"handed back unfinished by {who} after {num_tokens} tokens: {fate}"))
    query = "SELECT accepted_at, worker, ended_by, num_tokens FROM trajectories WHERE task = ?"
    for at, who, ended_by, num_tokens in db.execute(query, (task,)):
        events.append(Event(at, f"accepted from {who}: {num_tokens} tokens, ended by {ended_by}"))
    query = "SELECT scored_at, value, error FROM rewards WHERE task = ?"
    for at, value, error in db.execute(query, (task,)):
        events.append(Event(at, f"scored: {value:g}" if error is None else f"could not be scored: {error}"))
    return events
