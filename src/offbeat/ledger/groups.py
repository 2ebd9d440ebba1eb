"""Groups from the draw to their end: admission, the data cursor, readiness, dropping and re-issuing.

Guarantees: every ordinal (number of a training group) is drawn once, and the groups of one prompt (siblings) are drawn
one after another. At most one group per ordinal is alive (open, ready or claimed) or trained. Groups are never reset: a
prompt that is tried again gets a new group with new tasks. A group without a signal (all rewards equal) may be dropped;
then the next prompt takes its place.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import numpy as np

from offbeat.ledger import partials, versions
from offbeat.ledger.database import Database, array, transactional
from offbeat.ledger.errors import Refused
from offbeat.ledger.records import Cursor, DrawCursor, Drop, NewGroup, Purpose, derive_seed
from offbeat.ledger.versions import Versions
from offbeat.rules.groups import AdmissionState, GroupVerdict, may_retry, settle, settle_ready, unclaimed_step

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
"""Columns that a re-issued group copies from the dropped one."""


class Groups(Versions):
    def cursor(self) -> Cursor:
        """Returns the position in the data: next group's ordinal, next prompt of each source, and last group drawn."""
        query = """SELECT source, source_ordinal, sibling FROM groups WHERE purpose = 'train'
                   ORDER BY ordinal DESC LIMIT 1"""
        row = self.execute(query).fetchone()
        drawn = dict(self.execute("SELECT name, drawn FROM sources ORDER BY name"))
        query = "SELECT COALESCE(MAX(ordinal) + 1, 0) FROM groups WHERE purpose = 'train'"
        (next_ordinal,) = self.execute(query).fetchone()
        return Cursor(next_ordinal, drawn, None if row is None else DrawCursor(*row))

    def admission_state(self) -> AdmissionState:
        """Returns the state from which `offbeat.rules.groups.admit` decides how many groups to admit."""
        newest = self.latest_version()
        if newest is None:
            return AdmissionState(step=None, num_alive=0)
        query = """SELECT COUNT(*) FROM groups WHERE (state = 'open' OR state = 'ready' OR state = 'claimed')
                   AND purpose = 'train' AND (require_step IS NULL OR require_step <= ?)"""
        return AdmissionState(step=newest.step, num_alive=int(self.execute(query, (newest.step,)).fetchone()[0]))

    @transactional
    def admit(self, groups: Sequence[NewGroup]) -> list[int]:
        """Creates groups with their tasks; returns the ids of the groups. Training groups also move the data cursor."""
        rows = [_row(group) for group in groups]
        known = versions.lineage(self, [g.require_version for g in groups if g.require_version is not None])
        before = self.cursor()
        drawn, next_ordinal, last = dict(before.drawn), before.next_ordinal, before.last
        for row in rows:
            number = row["require_version"]
            if number is not None:
                if number not in known or known[number].is_abandoned:
                    raise Refused(
                        f"group {row['ordinal']} requires version {number}, which was never published or is abandoned"
                    )
                row["require_step"] = known[number].step
            if row["purpose"] == Purpose.EVAL:
                row["eval"] = _eval_round(self, row)
                continue
            if row["ordinal"] != next_ordinal:
                raise Refused(
                    f"the group with ordinal {row['ordinal']} cannot be admitted: the next ordinal is {next_ordinal}"
                )
            source, source_ordinal, sibling = this = DrawCursor(row["source"], row["source_ordinal"], row["sibling"])
            if sibling and this._replace(sibling=sibling - 1) != last:
                raise Refused(
                    f"group {row['ordinal']} is sibling {sibling} of its prompt, but does not follow sibling "
                    f"{sibling - 1} of the same prompt directly"
                )
            if not sibling and source_ordinal < drawn.get(source, 0):
                raise Refused(
                    f"prompt {source_ordinal} of source {source!r} was drawn already; the next prompt of this source "
                    f"is {drawn[source]}"
                )
            next_ordinal, drawn[source], last = next_ordinal + 1, source_ordinal + 1, this
        self.executemany(
            "INSERT INTO sources VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET drawn = excluded.drawn", drawn.items()
        )
        return _insert(self, rows)


def _row(group: NewGroup) -> dict[str, Any]:
    if group.size < 1 or len(group.prompt_tokens) == 0:
        raise Refused(
            f"group {group.ordinal} has {group.size} members and {len(group.prompt_tokens)} prompt tokens; it needs at "
            "least one of each"
        )
    try:
        problem = json.dumps(group.problem, ensure_ascii=False)
    except (TypeError, ValueError) as error:
        raise Refused(
            f"the problem of prompt {group.source_ordinal} of source {group.source!r} cannot be stored as JSON: "
            f"{error}; use only text, numbers, true, false, null, lists and dicts in it"
        ) from error
    unchanged = ("ordinal", "source", "source_ordinal", "sibling", "seed", "size", "require_version", "reward")
    return {
        **{name: getattr(group, name) for name in unchanged},
        **dict.fromkeys(("eval", "reissue_of", "require_step")),
        "purpose": Purpose(group.purpose).value,
        "retry": 0,
        "sampling": msgspec.json.encode(group.sampling).decode(),
        "prompt": np.asarray(group.prompt_tokens, np.int32).tobytes(),
        "problem": problem,
    }


def _eval_round(db: Database, row: dict[str, Any]) -> int:
    """Returns the id of the evaluation round for the step that group `row` requires; opens one if there is none."""
    step = row["require_step"]
    if step is None:
        raise Refused(f"evaluation group {row['ordinal']} has no require_version; it must name the version to evaluate")
    found = db.execute("SELECT id FROM evals WHERE step = ? AND abandoned = 0", (step,)).fetchone()
    if found is None:
        return int(
            db.execute("INSERT INTO evals (step, opened_at) VALUES (?, ?)", (step, db.wall_clock())).lastrowid or 0
        )
    taken = "SELECT 1 FROM groups WHERE eval = ? AND ordinal = ?"
    if db.execute(taken, (found[0], row["ordinal"])).fetchone():
        raise Refused(f"evaluation group {row['ordinal']} of step {step} was admitted already")
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


def settle_groups(db: Database, groups: Iterable[int]) -> int:
    """Ends the open groups in `groups` whose tasks are all scored or failed. Drops open groups in which too many tasks
    failed and, as far as `max_no_signal` allows, ended groups with equal rewards. Returns the number of groups
    dropped."""
    query = """SELECT id, purpose, size, num_scored, num_failed, retry FROM groups
               WHERE +state = 'open' AND id IN (SELECT value FROM json_each(?)) ORDER BY id"""  # + avoids state's index
    ended: list[tuple[str, float, int]] = []
    failed: list[tuple[int, bool]] = []
    for group, purpose, size, num_scored, num_failed, retry in db.execute(query, (array(sorted(set(groups))),)):
        is_train = purpose == Purpose.TRAIN
        match settle(size, num_scored, num_failed, db.terms.min_group if is_train else 1):
            case GroupVerdict.READY:
                ended.append(("ready" if is_train else "evaluated", db.wall_clock(), group))
            case GroupVerdict.FAILED:
                failed.append((group, is_train and may_retry(retry)))
    db.executemany("UPDATE groups SET state = ?, ended_at = ? WHERE id = ?", ended)
    drop(db, [group for group, _ in failed], Drop.FAILED)
    reissue(db, [group for group, again in failed if again], with_new_seed=True)
    num_dropped = len(failed)
    if db.terms.max_no_signal > 0:
        num_dropped += _drop_without_signal(db, [group for state, _, group in ended if state == "ready"])
    return num_dropped


def _drop_without_signal(db: Database, groups: Sequence[int]) -> int:
    """Drops the groups with equal rewards among `groups`, which have just become ready, as far as `max_no_signal`
    allows. Returns the number dropped."""
    query = """SELECT g.id, g.ordinal, g.require_step, (
                   SELECT MAX(r.value) - MIN(r.value) FROM tasks t CROSS JOIN rewards r ON r.task = t.id
                   WHERE t.group_id = g.id AND t.state = 'scored')
               FROM json_each(?) e CROSS JOIN groups g ON g.id = e.value"""
    next_step = _next_step(db)
    num_dropped = num_without_signal(db, next_step)
    dropped = []
    for group, ordinal, require_step, spread in db.execute(query, (array(groups),)).fetchall():
        num_before = num_dropped if require_step is None else _num_drawn_before(db, require_step, ordinal)
        if settle_ready(spread, num_before, db.terms.max_no_signal) is GroupVerdict.NO_SIGNAL:
            dropped.append(group)
            num_dropped += 1
    drop(db, dropped, Drop.NO_SIGNAL, at_step=next_step)
    return len(dropped)


def _next_step(db: Database) -> int:
    """Returns the first step without a batch."""
    query = """SELECT (SELECT step FROM versions NOT INDEXED WHERE abandoned = 0 ORDER BY number DESC LIMIT 1),
                      (SELECT MAX(step) + 1 FROM batches WHERE state <> 'undone')"""
    return unclaimed_step(*db.execute(query).fetchone())


def num_without_signal(db: Database, step: int) -> int:
    """Returns how many groups with equal rewards were dropped while the batch of `step` was the next to be claimed."""
    query = "SELECT COUNT(*) FROM groups WHERE dropped_at_step = ?"
    return int(db.execute(query, (step,)).fetchone()[0])


def _num_drawn_before(db: Database, step: int, ordinal: int) -> int:
    """Returns how many training groups that require `step` have an ordinal below `ordinal`. A re-issued group has the
    ordinal of the dropped one and does not count again."""
    query = """SELECT COUNT(DISTINCT ordinal) FROM groups
               WHERE purpose = 'train' AND require_step = ? AND ordinal < ?"""
    return int(db.execute(query, (step, ordinal)).fetchone()[0])


def drop(db: Database, groups: Sequence[int], reason: Drop, at_step: int | None = None) -> None:
    """Drops groups and their unfinished tasks. `at_step`, given only with reason `NO_SIGNAL`, is the step whose batch
    was being collected, so that `num_without_signal` can count the dropped groups of each step."""
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
    """Admits the prompts of dropped groups again, as new groups with the same ordinals; returns the new groups' ids.
    With `with_new_seed`, this counts as a retry and changes the seed. If only the version of one step could sample the
    dropped group (`require_step`), the new group requires step `for_step` or, if `for_step` is None, the same step. It
    waits until the required step has a version."""
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
