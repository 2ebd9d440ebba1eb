"""Claims and commits: which data a step trains on, and that it did.

Guarantees: a claim selects, checks the bound against the step really trained from, and stores its answer in one
transaction; asking again for the same step returns the same batch; a commit records the new version with it and is
idempotent by step. No token above the bound, given, or of an abandoned version may be trained.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from offbeat.control.select import Candidate, Stretch, is_trainable, oldest_trainable_step, select, staleness
from offbeat.crash import crash_here
from offbeat.ledger import siblings, versions
from offbeat.ledger.bodies import Bodies
from offbeat.ledger.database import Database, array
from offbeat.ledger.errors import Conflict, Refused, Unknown
from offbeat.ledger.groups import drop, num_without_signal, reissue
from offbeat.ledger.records import Batch, BatchGroup, BatchState, ComparedSegment, Drop, GroupState, Member, Surviving
from offbeat.ledger.versions import Lineage
from offbeat.trajectory import Origin, Reward, Trajectory
from offbeat.weights.version import Version

Piece = tuple[int, int, int, int | None]
"""A segment of a scored member: group, task, number of tokens, and version."""
Pieces = dict[int, list[Piece]]
"""By group."""
_PARTS = msgspec.json.Decoder(tuple[Reward, ...])


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


def under_way(db: Database) -> bool:
    """Whether a batch is claimed and not trained yet: it would be the one of the latest step that has any."""
    row = db.execute("SELECT state FROM batches WHERE state <> 'undone' ORDER BY step DESC LIMIT 1").fetchone()
    return row is not None and row[0] == BatchState.CLAIMED


def survivors(db: Database) -> list[Surviving]:
    query = """SELECT g.id, g.first_step, COALESCE(j.num_tokens, p.num_sampled_tokens, 0), t.state
               FROM groups g JOIN tasks t ON t.group_id = g.id LEFT JOIN trajectories j ON j.task = t.id
               LEFT JOIN partials p ON p.task = t.id AND p.state = 'kept'
               WHERE g.purpose = 'train' AND g.state IN ('open', 'ready') AND g.first_step IS NOT NULL ORDER BY g.id"""
    found = []
    for _, rows in itertools.groupby(db.execute(query), key=lambda row: row[0]):
        members = list(rows)
        ended = tuple(state not in ("open", "leased") for *_, state in members)
        found.append(Surviving(members[0][1], tuple(row[2] for row in members), ended))
    return found


def _living_batch(db: Database, step: int) -> dict[str, Any] | None:
    query = "SELECT id, state, to_version FROM batches WHERE step = ? AND state <> 'undone'"
    row = db.execute(query, (step,)).fetchone()
    return None if row is None else dict(zip(("id", "state", "to_version"), row, strict=True))


def _choose(
    db: Database, bodies: Bodies, step: int, from_version: int | None, count: int, bound: int, in_order: bool
) -> Batch | None:
    if not _is_worth_a_look(db, step, count, bound):
        return None
    stale: list[int] = []
    while True:
        groups = _eligible(db, step, count, bound, in_order)
        pieces = _pieces(db, [group for group, _, state, *_ in groups if state == GroupState.READY])
        known = versions.lineage(db, {piece[3] for found in pieces.values() for piece in found if piece[3] is not None})
        candidates = [
            Candidate(
                group=group,
                ordinal=ordinal,
                ready=state == GroupState.READY,
                require_step=require_step,
                first_step=first_step,
                stretches=_stretches(pieces.get(group, ()), known),
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
    batch = _store(db, step, from_version, bound, {group: pieces[group] for group in selection.take}, known)
    crash_here("claim-chosen")
    return load(db, bodies, batch)


def _is_worth_a_look(db: Database, step: int, count: int, bound: int) -> bool:
    """False where too few groups are ready and none can be too old: then nothing is to be taken, and nothing to be
    dropped. The trainer asks again with every reward that is stored, so that this is what a claim mostly costs."""
    ready = "SELECT 1 FROM groups INDEXED BY groups_alive WHERE state = 'ready' AND purpose = 'train'"
    query = f"""SELECT (SELECT COUNT(*) FROM ({ready} LIMIT :count)) = :count
                    OR EXISTS ({ready} AND first_step IS NULL) OR EXISTS ({ready} AND first_step < :oldest)
                    OR EXISTS (SELECT 1 FROM groups INDEXED BY groups_required
                               WHERE state = 'open' AND require_step < :oldest)
                    OR EXISTS (SELECT 1 FROM versions WHERE abandoned = 1)"""
    return bool(db.execute(query, {"count": count, "oldest": oldest_trainable_step(step, bound)}).fetchone()[0])


def _eligible(db: Database, step: int, count: int, bound: int, in_order: bool) -> list[tuple[Any, ...]]:
    """The groups that selection has to see: the unfinished, the first `count` of the ready ones in the order in which
    they are taken, and all whose tokens may be too old or of an abandoned version. The rest could not be in the batch:
    however much waits, what is read is about as much as is trained."""
    asked = {"step": step, "oldest": oldest_trainable_step(step, bound), "count": count}
    columns, due = "id, ordinal, state, require_step, first_step", "(require_step IS NULL OR require_step <= :step)"
    unfinished = f"SELECT {columns} FROM groups WHERE state = 'open' AND purpose = 'train' AND {due}"
    ready = f"""SELECT {columns} FROM groups INDEXED BY groups_alive
                WHERE state = 'ready' AND purpose = 'train' AND {due}"""
    if db.execute("SELECT 1 FROM versions WHERE abandoned = 1 LIMIT 1").fetchone():
        chosen = [ready]
    else:
        order = "ordinal" if in_order else "first_step, ordinal"  # nothing living shares an ordinal
        first_ones = f"{ready} AND first_step >= :oldest ORDER BY {order} LIMIT :count"
        chosen = [first_ones, f"{ready} AND first_step < :oldest", f"{ready} AND first_step IS NULL"]
    return [row for query in (unfinished, *chosen) for row in db.execute(query, asked)]


def _pieces(db: Database, groups: Sequence[int]) -> Pieces:
    query = """SELECT t.group_id, t.id, s.num_tokens, s.version
               FROM json_each(?) e CROSS JOIN tasks t ON t.group_id = e.value CROSS JOIN segments s ON s.task = t.id
               WHERE t.state = 'scored'"""
    found: Pieces = {}
    for piece in db.execute(query, (array(groups),)):
        found.setdefault(piece[0], []).append(piece)
    return found


def _stretches(pieces: Iterable[Piece], known: Mapping[int, Lineage]) -> tuple[Stretch, ...]:
    """A group as selection sees it: one stretch for all tokens of a version."""
    num_tokens: dict[int | None, int] = {}
    for _, _, count, version in pieces:
        num_tokens[version] = num_tokens.get(version, 0) + count
    return tuple(
        Stretch(count, None if version is None else known[version].living_step) for version, count in num_tokens.items()
    )


def _store(
    db: Database, step: int, from_version: int | None, bound: int, pieces: Pieces, known: Mapping[int, Lineage]
) -> int:
    """Writes a batch and what becomes of each of its sampled tokens: trained, stale or abandoned."""
    fates = {
        number: 0 if is_trainable(version.living_step, step, bound) else 2 if version.is_abandoned else 1
        for number, version in known.items()
    }
    sums: dict[int, list[int]] = {}
    taken: set[int] = set()
    for _, task, num_tokens, number in itertools.chain.from_iterable(pieces.values()):
        tokens = sums.setdefault(task, [0, 0, 0])
        if number is not None:
            tokens[fates[number]] += num_tokens
            taken.add(number)
    ages = (staleness(known[number].living_step, step) or 0 for number in taken if fates[number] == 0)
    totals = [sum(column) for column in zip(*sums.values(), strict=True)]
    batch = db.execute(
        "INSERT INTO batches (step, bound, state, from_version, num_trained_tokens, num_stale_tokens, "
        "num_abandoned_tokens, max_staleness, last_reward, claimed_at) "
        "VALUES (?, ?, 'claimed', ?, ?, ?, ?, ?, (SELECT MAX(seq) FROM rewards), ?)",
        (step, bound, from_version, *totals, max(ages, default=0), db.wall_clock()),
    ).lastrowid
    assert batch is not None
    db.insert(
        "batch_members (batch, task, num_trained_tokens, num_stale_tokens, num_abandoned_tokens)",
        [(batch, task, *tokens) for task, tokens in sums.items()],
    )
    query = "UPDATE groups SET state = 'claimed', batch = ? WHERE id IN (SELECT value FROM json_each(?))"
    db.execute(query, (batch, array(pieces)))
    return batch


def load(db: Database, bodies: Bodies, batch: int) -> Batch:
    """A batch as it was claimed, by ordinal and member."""
    query = "SELECT step, from_version, bound FROM batches WHERE id = ?"
    step, from_version, bound = db.execute(query, (batch,)).fetchone()
    query = """SELECT t.group_id, t.member, t.id, j.seq, j.digest, r.parts, r.value
               FROM batch_members m CROSS JOIN tasks t ON t.id = m.task CROSS JOIN trajectories j ON j.task = t.id
               CROSS JOIN rewards r ON r.task = t.id WHERE m.batch = ?"""
    rows = sorted(db.execute(query, (batch,)))
    trajectories = bodies.load([(row[3], row[4]) for row in rows])
    ages = _ages(db, list(trajectories.values()), step, bound)
    parts = {text: _PARTS.decode(text) for text in {row[5] for row in rows}}
    members: dict[int, list[Member]] = {}
    for (group, member, task, seq, _, text, value), age in zip(rows, ages, strict=True):
        members.setdefault(group, []).append(Member(task, member, trajectories[seq], parts[text], value, age))
    query = "SELECT ordinal, id, source FROM groups WHERE batch = ?"
    kin = siblings.of_batch(db, batch)
    groups = [
        BatchGroup(group, ordinal, source, tuple(members[group]), *kin.get(group, ()))
        for ordinal, group, source in sorted(db.execute(query, (batch,)))
    ]
    return Batch(step, from_version, tuple(groups), num_without_signal(db, step))


def _ages(db: Database, trajectories: Sequence[Trajectory], step: int, bound: int) -> list[np.ndarray]:
    """The staleness of each response token; -1 where it may not be trained. Made as one array for all trajectories,
    because most of them are short."""
    segments = [segment for trajectory in trajectories for segment in trajectory.segments]
    known = versions.lineage(db, {s.version for s in segments if s.version is not None})
    ages: dict[int | None, int] = {}
    for number, version in known.items():
        age = staleness(version.living_step, step)
        ages[number] = age if age is not None and is_trainable(version.living_step, step, bound) else -1
    values = [ages[s.version] if s.origin is Origin.SAMPLED else -1 for s in segments]
    of_all = np.repeat(np.array(values, np.int32), [len(s.tokens) for s in segments])
    ends = itertools.accumulate(trajectory.num_tokens for trajectory in trajectories)
    return [of_all[start:end] for start, end in itertools.pairwise((0, *ends))]


def commit(
    db: Database,
    step: int,
    version: Version,
    audited: Sequence[int] = (),
    compared: Sequence[ComparedSegment] = (),
) -> None:
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
    _compare(db, batch["id"], compared)
    versions.record(db, version)


def _leave_out(db: Database, batch: int, tasks: Sequence[int]) -> None:
    """The trainer could not believe these members' log-probs and gave them no part in the update."""
    unique = sorted(set(tasks))
    query = """UPDATE batch_members SET num_audit_tokens = num_trained_tokens, num_trained_tokens = 0
               WHERE batch = ? AND task IN (SELECT value FROM json_each(?))"""
    found = db.execute(query, (batch, array(unique))).rowcount
    if found != len(unique):
        raise Refused(f"audit of tasks {unique}: not all of them are in this batch")
    if found:
        sum_up(db, batch)


def _compare(db: Database, batch: int, compared: Sequence[ComparedSegment]) -> None:
    """Takes down what an audit found of the batch's segments; where they were audited before, in place of that."""
    query = """UPDATE segments SET num_compared = ?, num_off = ? WHERE task = ? AND start = ? AND version IS NOT NULL
               AND num_tokens >= ? AND task IN (SELECT task FROM batch_members WHERE batch = ?)"""
    for task, start, num_tokens, num_off in compared:
        if not 0 <= num_off <= num_tokens:
            raise Refused(f"audit of task {task}: {num_off} of {num_tokens} tokens are off")
        if db.execute(query, (num_tokens, num_off, task, start, num_tokens, batch)).rowcount != 1:
            raise Refused(f"audit of task {task}: no segment of {num_tokens} tokens begins at {start} in this batch")


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
