"""Groups from the draw to their end: admission, the data cursor, readiness, dropping and re-issuing.

Guarantees: every ordinal is drawn once; at most one group of an ordinal is alive or trained (the schema holds it);
nothing is reset in place: a prompt that is tried again is a new group with new tasks.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import numpy as np

from offbeat.control.admit import Standing
from offbeat.control.settle import MAX_RETRIES, Verdict, settle
from offbeat.ledger import partials, versions
from offbeat.ledger.errors import Refused
from offbeat.ledger.records import Cursor, Drop, NewGroup, Purpose, derive_seed
from offbeat.ledger.schema import Database

INSERT_GROUP = """
INSERT INTO groups (id, purpose, eval, ordinal, retry, reissue_of, source, source_ordinal, seed, size, num_open,
                    require_step, require_version, state, reward, sampling, prompt, problem, admitted_at)
VALUES (:id, :purpose, :eval, :ordinal, :retry, :reissue_of, :source, :source_ordinal, :seed, :size, :size,
        :require_step, :require_version, 'open', :reward, :sampling, :prompt, :problem, :admitted_at)
"""
COPIED = (
    "purpose, eval, ordinal, retry, source, source_ordinal, seed, size, require_step, reward, sampling, prompt, problem"
)
"""What a re-issued group takes over."""


def cursor(db: Database) -> Cursor:
    return Cursor(_next_ordinal(db), dict(db.execute("SELECT name, drawn FROM sources ORDER BY name")))


def _next_ordinal(db: Database) -> int:
    return int(db.execute("SELECT COALESCE(MAX(ordinal) + 1, 0) FROM groups WHERE purpose = 'train'").fetchone()[0])


def standing(db: Database) -> Standing:
    """Where the run stands, as admission asks it."""
    newest = versions.latest(db)
    if newest is None:
        return Standing(step=None, num_alive=0)
    query = """SELECT COUNT(*) FROM groups WHERE state IN ('open', 'ready', 'claimed') AND purpose = 'train'
               AND (require_step IS NULL OR require_step <= ?)"""
    return Standing(step=newest.step, num_alive=int(db.execute(query, (newest.step,)).fetchone()[0]))


def admit(db: Database, groups: Sequence[NewGroup]) -> list[int]:
    rows = [_row(group) for group in groups]
    known = versions.lineage(db, [g.require_version for g in groups if g.require_version is not None])
    drawn = dict(cursor(db).drawn)
    next_ordinal = _next_ordinal(db)
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
        source, source_ordinal = row["source"], row["source_ordinal"]
        if source_ordinal < drawn.get(source, 0):
            raise Refused(f"source {source!r}: {source_ordinal} was drawn already; the next is {drawn[source]}")
        next_ordinal, drawn[source] = next_ordinal + 1, source_ordinal + 1
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


def settle_groups(db: Database, groups: Iterable[int], min_group: int) -> None:
    """Ends those of the groups whose members have ended, or too few of which remain."""
    query = """SELECT id, purpose, size, num_scored, num_failed, retry FROM groups
               WHERE state = 'open' AND id IN (SELECT value FROM json_each(?)) ORDER BY id"""
    ended: list[tuple[str, float, int]] = []
    failed: list[tuple[int, bool]] = []
    for group, purpose, size, num_scored, num_failed, retry in db.execute(query, (json.dumps(sorted(set(groups))),)):
        is_train = purpose == Purpose.TRAIN
        match settle(size, num_scored, num_failed, min_group if is_train else 1):
            case Verdict.READY:
                ended.append(("ready" if is_train else "evaluated", db.wall_clock(), group))
            case Verdict.FAILED:
                failed.append((group, is_train and retry < MAX_RETRIES))
    db.executemany("UPDATE groups SET state = ?, ended_at = ? WHERE id = ?", ended)
    drop(db, [group for group, _ in failed], Drop.FAILED)
    reissue(db, [group for group, again in failed if again], with_new_seed=True)


def drop(db: Database, groups: Sequence[int], reason: Drop) -> None:
    """Ends groups without training, and with them their tasks that have not ended."""
    query = """SELECT p.task FROM tasks t JOIN partials p ON p.task = t.id AND p.state = 'kept'
               WHERE t.group_id IN (SELECT value FROM json_each(?))"""
    partials.waste(db, [task for (task,) in db.execute(query, (json.dumps(list(groups)),))], reason.value)
    db.executemany(
        "UPDATE tasks SET state = 'dropped', reason = ? WHERE group_id = ? AND state IN ('open', 'leased', 'accepted')",
        [(reason.value, group) for group in groups],
    )
    db.executemany(
        "UPDATE groups SET state = 'dropped', reason = ?, num_open = 0, ended_at = ? WHERE id = ?",
        [(reason.value, db.wall_clock(), group) for group in groups],
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
