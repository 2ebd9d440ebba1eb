"""Says whether everything that must always hold does hold.

Reads only, and everything at one moment, so it may run beside a living run: the file's own consistency, the rules of
`offbeat.ledger.rules`, the bytes of every trajectory against what the tables say of it, every reward against its
digest, every seed, and the sums in which each generated token has exactly one place.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass

from blake3 import blake3

from offbeat.errors import OffbeatError
from offbeat.ledger.bodies import read
from offbeat.ledger.counts import counts
from offbeat.ledger.database import Database
from offbeat.ledger.records import Counts, derive_seed
from offbeat.ledger.rules import RULES
from offbeat.ledger.scoring import reward_digest
from offbeat.trajectory import Trajectory

MAX_EXAMPLES = 5
"""Rows named for each broken rule; a rule that is broken everywhere need not fill the screen."""


@dataclass(frozen=True)
class Report:
    violations: tuple[str, ...]
    """In plain words; empty where everything holds."""
    counts: Counts
    """Nothing at all where the file is too damaged to count."""

    @property
    def holds(self) -> bool:
        return not self.violations


def verify(db: Database, *, with_bodies: bool = True) -> Report:
    """Checks the whole ledger; without bodies, everything but the bytes of the trajectories."""
    damage = _damage(db)
    if damage:
        return Report(damage, Counts())
    with db.snapshot():
        found = [*_broken_references(db), *_broken_rules(db), *_broken_seeds(db), *_changed_rewards(db)]
        if with_bodies:
            found += _shortened([*_broken_bodies(db), *_broken_partials(db)])
        counted = counts(db)
        return Report((*found, *_broken_sums(db, counted)), counted)


def _damage(db: Database) -> tuple[str, ...]:
    try:
        lines = [row[0] for row in db.execute(f"PRAGMA integrity_check({MAX_EXAMPLES})") if row[0] != "ok"]
    except sqlite3.DatabaseError as error:
        lines = [str(error)]
    return tuple(f"the file is damaged: {line}" for line in lines)


def _broken_references(db: Database) -> list[str]:
    missing = [
        f"table {table}, row {row}: refers to a row of {parent} that is not there"
        for table, row, parent, _ in db.execute("PRAGMA foreign_key_check")
    ]
    return _shortened(missing)


def _broken_rules(db: Database) -> list[str]:
    found: list[str] = []
    for rule in RULES:
        found += _shortened([rule.says.format(*row) for row in db.execute(rule.finds)])
    return found


def _broken_seeds(db: Database) -> list[str]:
    query = "SELECT t.id, t.seed, g.seed, t.member FROM tasks t JOIN groups g ON g.id = t.group_id"
    wrong = [
        f"task {task}: its seed does not follow from its group's"
        for task, seed, group_seed, member in db.execute(query)
        if seed != derive_seed(group_seed, member)
    ]
    return _shortened(wrong)


def _changed_rewards(db: Database) -> list[str]:
    query = "SELECT task, value, parts, error, digest FROM rewards"
    changed = [
        f"the reward of task {row[0]} is not the one that was stored: its digest differs"
        for *row, digest in db.execute(query)
        if reward_digest(*row) != digest
    ]
    return _shortened(changed)


def _broken_bodies(db: Database) -> Iterator[str]:
    query = """SELECT j.task, j.digest, j.ended_by, j.num_tokens, j.num_sampled_tokens, j.body, g.prompt
               FROM trajectories j JOIN tasks t ON t.id = j.task JOIN groups g ON g.id = t.group_id
               WHERE j.pruned = 0"""
    for task, digest, ended_by, num_tokens, num_sampled, row_body, prompt in db.execute(query):
        try:
            body = read(db, digest, row_body)
            if blake3(body).digest() != digest:
                yield f"the trajectory of task {task} is not the one that was accepted: its digest differs"
                continue
            trajectory = Trajectory.decode(body)
        except (OffbeatError, ValueError, KeyError) as error:
            yield f"the trajectory of task {task} cannot be read: {error}"
            continue
        segments = db.execute("SELECT start, num_tokens, version FROM segments WHERE task = ? ORDER BY start", (task,))
        told = (task, ended_by, num_tokens, num_sampled, prompt, segments.fetchall())
        if told != _facts(trajectory):
            yield f"the trajectory of task {task} is not what the tables say of it"


def _broken_partials(db: Database) -> Iterator[str]:
    query = (
        "SELECT task, digest, num_sampled_tokens, first_version, last_version, body FROM partials WHERE state = 'kept'"
    )
    for task, digest, num_sampled, first, last, row_body in db.execute(query):
        try:
            body = read(db, digest, row_body)
        except OffbeatError as error:
            yield f"the partial of task {task} cannot be read: {error}"
            continue
        if blake3(body).digest() != digest:
            yield f"the partial of task {task} is not the one that was handed in: its digest differs"
            continue
        trajectory = Trajectory.decode(body)
        versions = [s.version for s in trajectory.segments if s.version is not None]
        told = (task, num_sampled, first, last, None)
        if told != (trajectory.task, trajectory.sampled_mask.sum(), versions[0], versions[-1], trajectory.end):
            yield f"the partial of task {task} is not what the tables say of it"


def _facts(trajectory: Trajectory) -> tuple[object, ...]:
    segments = [(s.start, len(s.tokens), s.version) for s in trajectory.segments]
    num_sampled = sum(count for _, count, version in segments if version is not None)
    end = trajectory.end.value if trajectory.end else None
    return trajectory.task, end, trajectory.num_tokens, num_sampled, trajectory.prompt.tobytes(), segments


def _broken_sums(db: Database, counted: Counts) -> list[str]:
    found: list[str] = []
    tokens, trajectories = counted.tokens, counted.trajectories
    generated, num_trajectories = db.execute(
        "SELECT COALESCE(SUM(num_sampled_tokens), 0), COUNT(*) FROM trajectories"
    ).fetchone()
    query = "SELECT COALESCE(SUM(num_sampled_tokens), 0) FROM partials WHERE state <> 'continued'"
    generated += db.execute(query).fetchone()[0]
    placed = tokens.trained + tokens.waiting + tokens.partial + tokens.evaluated + sum(tokens.masked.values())
    placed += sum(tokens.wasted.values())
    if generated != placed:
        found.append(
            f"{generated} tokens were generated, but {placed} are accounted for: trained {tokens.trained}, masked "
            f"{dict(tokens.masked)}, waiting {tokens.waiting}, partial {tokens.partial}, wasted {dict(tokens.wasted)}, "
            f"evaluated {tokens.evaluated}"
        )
    ended = trajectories.trained + trajectories.waiting + trajectories.dropped
    if num_trajectories != ended + trajectories.evaluated:
        found.append(
            f"{num_trajectories} trajectories were accepted, but {ended + trajectories.evaluated} are accounted for: "
            f"{trajectories}"
        )
    return found


def _shortened(found: list[str]) -> list[str]:
    if len(found) <= MAX_EXAMPLES:
        return found
    return [*found[:MAX_EXAMPLES], f"... and {len(found) - MAX_EXAMPLES} more like this"]
