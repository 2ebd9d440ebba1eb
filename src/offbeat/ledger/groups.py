"""Groups from the draw to their end: admission, the data cursor, readiness, dropping and re-issuing.

Guarantees: every ordinal is drawn once, and the siblings of a prompt one after the other; at most one group of an
ordinal is alive or trained (the schema holds it); nothing is reset in place: a prompt that is tried again is a new
group with new tasks. A group without a signal is dropped and not issued again: its place is free for the next prompt.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import numpy as np

from offbeat.control.admit import Standing
from offbeat.control.settle import MAX_RETRIES, Terms, Verdict, settle, settle_ready
from offbeat.ledger import partials, versions
from offbeat.ledger.database import Database, array
from offbeat.ledger.errors import Refused
from offbeat.ledger.records import Cursor, Drawn, Drop, NewGroup, Purpose, derive_seed

INSERT_GROUP = """
INSERT INTO groups (id, purpose, eval, ordinal, retry, reissue_of, source, source_ordinal, sibling, seed, size,
                    num_open, require_step, require_version, state, reward, sampling, prompt, problem, admitted_at)
VALUES (:id, :purpose, :eval, :ordinal, :retry, :reissue_of, :source, :source_ordinal, :sibling, :seed, :size,
        :size, :require_step, :require_version, 'open', :reward, :sampling, :prompt, :problem, :admitted_at)
"""
COPIED = (
    "purpose, eval, ordinal, retry, source, source_ordinal, sibling, seed, size, require_step, reward, sampling, "
    "prompt, problem"
)
"""What a re-issued group takes over."""


def cursor(db: Database) -> Cursor:
    query = """SELECT source, source_ordinal, sibling FROM groups WHERE purpose = 'train'
               ORDER BY ordinal DESC LIMIT 1"""
    row = db.execute(query).fetchone()
    drawn = dict(db.execute("SELECT name, drawn FROM sources ORDER BY name"))
    return Cursor(_next_ordinal(db), drawn, None if row is None else Drawn(*row))


def _next_ordinal(db: Database) -> int:
    return int(db.execute("SELECT COALESCE(MAX(ordinal) + 1, 0) FROM groups WHERE purpose = 'train'").fetchone()[0])


def standing(db: Database) -> Standing:
    """Where the run stands, as admission asks it."""
    newest = versions.latest(db)
    if newest is None:
        return Standing(step=None, num_alive=0)
    query = """SELECT COUNT(*) FROM groups WHERE (state = 'open' OR state = 'ready' OR state = 'claimed')
               AND purpose = 'train' AND (require_step IS NULL OR require_step <= ?)"""
    return Standing(step=newest.step, num_alive=int(db.execute(query, (newest.step,)).fetchone()[0]))


def admit(db: Database, groups: Sequence[NewGroup]) -> list[int]:
    rows = [_row(group) for group in groups]
    known = versions.lineage(db, [g.require_version for g in groups if g.require_version is not None])
    before = cursor(db)
    drawn, next_ordinal, last = dict(before.drawn), before.next_ordinal, before.last
    for row in rows:
        number = row["require_version"]
        if number is not None:
            if number not in known or known[number].is_abandoned:
                raise Refused(f"group {row['ordinal']}: version {number} is not published, or abandoned")
            row["require_step"] = known[number].step
        if row["purpose"] == Purpose.EVAL:
            row["eval"] = _eval_round(db, row)
            continue
        if row["ordinal"] != next_ordinal:
            raise Refused(f"group {row['ordinal']}: the next ordinal to draw is {next_ordinal}")
        source, source_ordinal, sibling = this = Drawn(row["source"], row["source_ordinal"], row["sibling"])
        if sibling and this._replace(sibling=sibling - 1) != last:
            raise Refused(f"group {row['ordinal']}: sibling {sibling} does not follow sibling {sibling - 1}")
        if not sibling and source_ordinal < drawn.get(source, 0):
            raise Refused(f"source {source!r}: {source_ordinal} was drawn already; the next is {drawn[source]}")
        next_ordinal, drawn[source], last = next_ordinal + 1, source_ordinal + 1, this
    db.executemany(
        "INSERT INTO sources VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET drawn = excluded.drawn", drawn.items()
    )
    return _insert(db, rows)


def _row(group: NewGroup) -> dict[str, Any]:
    if group.size < 1 or len(group.prompt_tokens) == 0:
        raise Refused(f"group {group.ordinal}: a group has at least one member and one prompt token")
    try:
        problem = json.dumps(group.problem, ensure_ascii=False)
    except (TypeError, ValueError) as error:
        raise Refused(f"group {group.ordinal} of {group.source!r}: its problem is not JSON: {error}") from error
    return {
        "purpose": Purpose(group.purpose).value,
        "eval": None,
        "ordinal": group.ordinal,
        "retry": 0,
        "reissue_of": None,
        "source": group.source,
        "source_ordinal": group.source_ordinal,
        "sibling": group.sibling,
        "seed": group.seed,
        "size": group.size,
        "require_step": None,
        "require_version": group.require_version,
        "reward": group.reward,
        "sampling": msgspec.json.encode(group.sampling).decode(),
        "prompt": np.asarray(group.prompt_tokens, np.int32).tobytes(),
        "problem": problem,
    }


def _eval_round(db: Database, row: dict[str, Any]) -> int:
    """The round of the step that the group is to judge, opened if it is the first of it."""
    step = row["require_step"]
    if step is None:
        raise Refused(f"evaluation group {row['ordinal']}: needs the version that it judges")
    found = db.execute("SELECT id FROM evals WHERE step = ? AND abandoned = 0", (step,)).fetchone()
    if found is None:
        return int(
            db.execute("INSERT INTO evals (step, opened_at) VALUES (?, ?)", (step, db.wall_clock())).lastrowid or 0
        )
    taken = "SELECT 1 FROM groups WHERE eval = ? AND ordinal = ?"
    if db.execute(taken, (found[0], row["ordinal"])).fetchone():
        raise Refused(f"evaluation of step {step}: group {row['ordinal']} was admitted already")
    return int(found[0])


def _insert(db: Database, rows: Sequence[dict[str, Any]]) -> list[int]:
    if not rows:
        return []
    first = db.execute("SELECT COALESCE(MAX(id), 0) + 1 FROM groups").fetchone()[0]
    now = db.wall_clock()
    for number, row in enumerate(rows, start=first):
        row["id"], row["admitted_at"] = number, now
    db.executemany(INSERT_GROUP, rows)
    db.executemany(
        "INSERT INTO tasks (group_id, member, seed, state) VALUES (?, ?, ?, 'open')",
        [(row["id"], member, derive_seed(row["seed"], member)) for row in rows for member in range(row["size"])],
    )
    return [row["id"] for row in rows]


def settle_groups(db: Database, groups: Iterable[int], terms: Terms) -> int:
    """Ends those of the groups whose members have ended, or too few of which remain; returns how many it dropped."""
    query = """SELECT id, purpose, size, num_scored, num_failed, retry FROM groups
               WHERE +state = 'open' AND id IN (SELECT value FROM json_each(?)) ORDER BY id"""  # by id, not by state
    ended: list[tuple[str, float, int]] = []
    failed: list[tuple[int, bool]] = []
    for group, purpose, size, num_scored, num_failed, retry in db.execute(query, (array(sorted(set(groups))),)):
        is_train = purpose == Purpose.TRAIN
        match settle(size, num_scored, num_failed, terms.min_group if is_train else 1):
            case Verdict.READY:
                ended.append(("ready" if is_train else "evaluated", db.wall_clock(), group))
            case Verdict.FAILED:
                failed.append((group, is_train and retry < MAX_RETRIES))
    db.executemany("UPDATE groups SET state = ?, ended_at = ? WHERE id = ?", ended)
    drop(db, [group for group, _ in failed], Drop.FAILED)
    reissue(db, [group for group, again in failed if again], with_new_seed=True)
    num_dropped = len(failed)
    if terms.max_no_signal > 0:
        num_dropped += _drop_without_signal(db, [group for state, _, group in ended if state == "ready"], terms)
    return num_dropped


def _drop_without_signal(db: Database, groups: Sequence[int], terms: Terms) -> int:
    """Drops those of the groups, which have just become ready, that there is nothing to learn from."""
    query = """SELECT g.id, g.ordinal, g.require_step, (
                   SELECT MAX(r.value) - MIN(r.value) FROM tasks t CROSS JOIN rewards r ON r.task = t.id
                   WHERE t.group_id = g.id AND t.state = 'scored')
               FROM json_each(?) e CROSS JOIN groups g ON g.id = e.value"""
    next_step = _next_step(db)
    num_dropped = num_without_signal(db, next_step)
    dropped = []
    for group, ordinal, require_step, spread in db.execute(query, (array(groups),)).fetchall():
        num_before = num_dropped if require_step is None else _num_drawn_before(db, require_step, ordinal)
        if settle_ready(spread, num_before, terms.max_no_signal) is Verdict.NO_SIGNAL:
            dropped.append(group)
            num_dropped += 1
    drop(db, dropped, Drop.NO_SIGNAL, at_step=next_step)
    return len(dropped)


def _next_step(db: Database) -> int:
    """The first step without a batch."""
    query = """SELECT MAX(COALESCE((SELECT step FROM versions WHERE abandoned = 0 ORDER BY number DESC LIMIT 1), 0),
                          COALESCE((SELECT MAX(step) + 1 FROM batches WHERE state <> 'undone'), 0))"""
    return int(db.execute(query).fetchone()[0])


def num_without_signal(db: Database, step: int) -> int:
    """Groups without a signal that were dropped while the batch of a step was waited for."""
    query = "SELECT COUNT(*) FROM groups WHERE dropped_at_step = ?"
    return int(db.execute(query, (step,)).fetchone()[0])


def _num_drawn_before(db: Database, step: int, ordinal: int) -> int:
    """Prompts of lower ordinals that were drawn for a step, however often they were issued."""
    query = """SELECT COUNT(DISTINCT ordinal) FROM groups
               WHERE purpose = 'train' AND require_step = ? AND ordinal < ?"""
    return int(db.execute(query, (step, ordinal)).fetchone()[0])


def drop(db: Database, groups: Sequence[int], reason: Drop, at_step: int | None = None) -> None:
    """Ends groups without training, and with them their tasks that have not ended. `at_step` is the step whose batch
    they were meant for, told where they had no signal."""
    if not groups:
        return
    query = """SELECT p.task FROM tasks t JOIN partials p ON p.task = t.id AND p.state = 'kept'
               WHERE t.group_id IN (SELECT value FROM json_each(?))"""
    partials.waste(db, [task for (task,) in db.execute(query, (array(groups),))], reason.value)
    db.executemany(
        "UPDATE tasks SET state = 'dropped', reason = ? WHERE group_id = ? AND state IN ('open', 'leased', 'accepted')",
        [(reason.value, group) for group in groups],
    )
    db.executemany(
        "UPDATE groups SET state = 'dropped', reason = ?, dropped_at_step = ?, num_open = 0, ended_at = ? WHERE id = ?",
        [(reason.value, at_step, db.wall_clock(), group) for group in groups],
    )


def reissue(db: Database, groups: Sequence[int], *, with_new_seed: bool, for_step: int | None = None) -> list[int]:
    """Admits dropped prompts again, under their ordinals and as new groups, for the step they were meant for or for
    another one. A group whose step has no version yet waits for it."""
    rows = []
    for group in groups:
        values = db.execute(f"SELECT {COPIED} FROM groups WHERE id = ?", (group,)).fetchone()
        row: dict[str, Any] = dict(zip(COPIED.split(", "), values, strict=True))
        row["reissue_of"], row["require_version"] = group, None
        if with_new_seed:
            row["retry"] += 1
            row["seed"] = derive_seed(row["seed"], "retry", row["retry"])
        if row["require_step"] is not None:
            row["require_step"] = row["require_step"] if for_step is None else for_step
            version = versions.living_at(db, row["require_step"])
            row["require_version"] = None if version is None else version.number
        rows.append(row)
    return _insert(db, rows)
