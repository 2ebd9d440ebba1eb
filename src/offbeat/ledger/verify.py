"""Verifies the ledger's invariants, independently of the code that maintains them.

Verification reads one snapshot, so it can be done while the run continues. It checks the consistency of the file, the
`RULES`, and that each generated token is counted exactly once. It compares the bytes of every trajectory with the
tables, every reward with its digest, and every seed with the one derived from its group's seed.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from blake3 import blake3

from offbeat.errors import OffbeatError
from offbeat.ledger.bodies import read
from offbeat.ledger.database import Database
from offbeat.ledger.records import Counts, derive_seed
from offbeat.ledger.reports import Reports
from offbeat.ledger.rewards import reward_digest
from offbeat.rules.groups import EQUAL_WITHIN
from offbeat.trajectory import Trajectory


class Rule(NamedTuple):
    """An invariant of the tables. Rules recompute each stored sum from the rows that it adds up."""

    message: str
    """Message about an offending row, as a format string: {0} stands for the first column of the row."""
    query: str
    """SQL that returns the offending rows."""


TASKS = (
    Rule(
        "task {0} is in state {1}, but has {2} trajectories",
        """SELECT t.id, t.state, COUNT(j.task) AS n FROM tasks t LEFT JOIN trajectories j ON j.task = t.id
           GROUP BY t.id HAVING n > 1 OR (t.state IN ('open', 'leased') AND n > 0)
               OR (t.state IN ('accepted', 'scored') AND n = 0)
               OR (t.state = 'failed' AND t.reason = 'reward' AND n = 0)""",
    ),
    Rule(
        "task {0} is in state {1} (reason {2}), which contradicts its stored reward ({3}) or reward error ({4})",
        """SELECT t.id, t.state, t.reason, r.value, r.error FROM tasks t LEFT JOIN rewards r ON r.task = t.id
           WHERE (t.state = 'scored') <> (r.value IS NOT NULL)
               OR (t.state = 'failed' AND t.reason = 'reward') <> (r.error IS NOT NULL)""",
    ),
    Rule(
        "task {0} of group {1} is {2}, but its group is {3}",
        """SELECT t.id, g.id, t.state, g.state FROM tasks t JOIN groups g ON g.id = t.group_id
           WHERE g.state <> 'open' AND t.state IN ('open', 'leased', 'accepted')""",
    ),
    Rule(
        "task {0} was dropped, but its group {1} is {2}",
        """SELECT t.id, g.id, g.state FROM tasks t JOIN groups g ON g.id = t.group_id
           WHERE t.state = 'dropped' AND g.state <> 'dropped'""",
    ),
    Rule(
        "task {0} ended as failed ({1}) without a failed attempt",
        "SELECT id, reason FROM tasks WHERE state = 'failed' AND reason <> 'reward' AND num_failures = 0",
    ),
)

GROUPS = (
    Rule(
        "group {0} has {1} tasks instead of {2}, or their numbers are not 0 to {2} - 1",
        """SELECT g.id, COUNT(t.id) AS n, g.size FROM groups g LEFT JOIN tasks t ON t.group_id = g.id
           GROUP BY g.id HAVING n <> g.size OR MIN(t.member) <> 0 OR MAX(t.member) <> g.size - 1""",
    ),
    Rule(
        "group {0} counts {1} open, {2} scored and {3} failed tasks, but the states of its tasks give other counts",
        """SELECT g.id, g.num_open, g.num_scored, g.num_failed FROM groups g JOIN tasks t ON t.group_id = g.id
           GROUP BY g.id HAVING g.num_open <> SUM(t.state = 'open') OR g.num_scored <> SUM(t.state = 'scored')
               OR g.num_failed <> SUM(t.state = 'failed')""",
    ),
    Rule(
        "group {0} counts {1} trajectories with {2} tokens, but {3} with {4} tokens are stored",
        """SELECT g.id, g.num_trajectories, g.num_sampled_tokens, COUNT(j.task) AS n,
                  COALESCE(SUM(j.num_sampled_tokens), 0) AS tokens
           FROM groups g JOIN tasks t ON t.group_id = g.id LEFT JOIN trajectories j ON j.task = t.id
           GROUP BY g.id HAVING g.num_trajectories <> n OR g.num_sampled_tokens <> tokens""",
    ),
    Rule(
        "group {0} is still open, though all of its members have ended",
        "SELECT id FROM groups WHERE state = 'open' AND num_scored + num_failed = size",
    ),
    Rule(
        "group {0} is {1}, but has no scored member",
        "SELECT id, state FROM groups WHERE state IN ('ready', 'claimed', 'trained', 'evaluated') AND num_scored = 0",
    ),
    Rule(
        "group {0} is {1}, but the state of its batch is {2}",
        """SELECT g.id, g.state, b.state FROM groups g LEFT JOIN batches b ON b.id = g.batch
           WHERE (g.state IN ('claimed', 'trained') AND g.state IS NOT b.state)
               OR (g.state NOT IN ('claimed', 'trained') AND g.batch IS NOT NULL)""",
    ),
    Rule(
        "group {0} has purpose {1}, but is in state {2}, which that purpose never reaches",
        """SELECT id, purpose, state FROM groups
           WHERE (purpose = 'eval' AND state IN ('ready', 'claimed', 'trained'))
               OR (purpose = 'train' AND state = 'evaluated')""",
    ),
    Rule(
        "ordinal {0} has {1} groups that are not dropped; it must have at most 1",
        """SELECT ordinal, COUNT(*) FROM groups WHERE purpose = 'train' AND state <> 'dropped'
           GROUP BY ordinal HAVING COUNT(*) > 1""",
    ),
    Rule(
        "group {0} (ordinal {1}) was dropped as {2}, but its prompt was never issued again",
        """SELECT g.id, g.ordinal, g.reason FROM groups g LEFT JOIN groups n ON n.reissue_of = g.id
           WHERE g.purpose = 'train' AND g.state = 'dropped' AND g.reason <> 'no_signal'
               AND (g.reason <> 'failed' OR g.retry = 0) AND n.id IS NULL""",
    ),
    Rule(
        "group {0} (ordinal {1}) was dropped for equal rewards, but its prompt was issued again as group {2}",
        "SELECT g.id, g.ordinal, n.id FROM groups g JOIN groups n ON n.reissue_of = g.id WHERE g.reason = 'no_signal'",
    ),
    Rule(
        "group {0} (purpose {1}) was dropped for equal rewards, but its {2} rewards differ by {3}, a member has not "
        "ended, or the group is not for training",
        f"""SELECT g.id, g.purpose, g.num_scored, MAX(r.value) - MIN(r.value) AS spread FROM groups g
            JOIN tasks t ON t.group_id = g.id LEFT JOIN rewards r ON r.task = t.id AND t.state = 'scored'
            WHERE g.reason = 'no_signal' GROUP BY g.id
            HAVING g.purpose <> 'train' OR spread IS NULL OR spread > {EQUAL_WITHIN}
                OR g.num_scored + g.num_failed <> g.size""",
    ),
    Rule(
        "group {0} re-issues group {1}, which is {2}, not dropped",
        """SELECT n.id, g.id, g.state FROM groups n JOIN groups g ON g.id = n.reissue_of WHERE g.state <> 'dropped'""",
    ),
    Rule(
        "group {0} re-issues group {1}, but differs from it in prompt, ordinal, size, retry count or seed",
        """SELECT n.id, g.id FROM groups n JOIN groups g ON g.id = n.reissue_of
           WHERE (n.ordinal, n.source, n.source_ordinal, n.sibling, n.size, n.prompt, n.problem, n.reward, n.sampling)
               <> (g.ordinal, g.source, g.source_ordinal, g.sibling, g.size, g.prompt, g.problem, g.reward, g.sampling)
               OR n.retry <> g.retry + (g.reason = 'failed')
               OR (g.reason = 'abandoned' AND n.seed <> g.seed)""",
    ),
    Rule(
        "group {0} requires step {1}, but names version {2} (step {3}), which is of another step or abandoned",
        """SELECT g.id, g.require_step, v.number, v.step FROM groups g JOIN versions v ON v.number = g.require_version
           WHERE v.step IS NOT g.require_step OR (v.abandoned = 1 AND g.state IN ('open', 'ready', 'claimed'))""",
    ),
    Rule(
        "{0} training groups were drawn, but the next ordinal is {1}: an ordinal is missing",
        """SELECT COUNT(*) AS n, COALESCE(MAX(ordinal) + 1, 0) AS next FROM groups
           WHERE purpose = 'train' AND reissue_of IS NULL HAVING n <> next""",
    ),
    Rule(
        "the {2} groups of prompt {1} of source {0!r} are not siblings 0 to {2} - 1, drawn one after another",
        """SELECT source, source_ordinal, COUNT(*) AS n FROM groups WHERE purpose = 'train' AND reissue_of IS NULL
           GROUP BY source, source_ordinal HAVING MIN(sibling) <> 0 OR MAX(sibling) <> n - 1
               OR MIN(ordinal - sibling) <> MAX(ordinal - sibling) OR COUNT(DISTINCT prompt) > 1""",
    ),
    Rule(
        "the data cursor counts {1} prompts drawn from source {0!r}, but the groups of this source show {2}",
        """SELECT s.name, s.drawn, COALESCE(MAX(g.source_ordinal) + 1, 0) AS seen FROM sources s
           LEFT JOIN groups g ON g.source = s.name AND g.purpose = 'train' GROUP BY s.name HAVING s.drawn <> seen""",
    ),
    Rule(
        "groups were drawn from source {0!r}, but the data cursor has no entry for it",
        "SELECT DISTINCT source FROM groups WHERE purpose = 'train' AND source NOT IN (SELECT name FROM sources)",
    ),
)

BATCHES = (
    Rule(
        "task {0} is in {1} batches that were not undone; it must be in at most 1",
        """SELECT m.task, COUNT(*) FROM batch_members m JOIN batches b ON b.id = m.batch
           WHERE b.state <> 'undone' GROUP BY m.task HAVING COUNT(*) > 1""",
    ),
    Rule(
        "task {0} is in the batch of step {1}, but its group is not, or the task is not scored",
        """SELECT m.task, b.step FROM batch_members m JOIN batches b ON b.id = m.batch JOIN tasks t ON t.id = m.task
           JOIN groups g ON g.id = t.group_id
           WHERE b.state <> 'undone' AND (g.batch IS NOT b.id OR t.state <> 'scored')""",
    ),
    Rule(
        "task {0} was scored, but is missing from the batch of step {1} that holds its group",
        """SELECT t.id, b.step FROM batches b JOIN groups g ON g.batch = b.id JOIN tasks t ON t.group_id = g.id
           LEFT JOIN batch_members m ON m.batch = b.id AND m.task = t.id
           WHERE b.state <> 'undone' AND t.state = 'scored' AND m.task IS NULL""",
    ),
    Rule(
        "task {0} in the batch of step {1}: {2} tokens count as trained or left out by an audit, {3} as stale, {4} as "
        "abandoned, but their versions and max_staleness {5} give {6}, {7} and {8}",
        """SELECT m.task, b.step, m.num_trained_tokens + m.num_audit_tokens AS taken, m.num_stale_tokens,
                  m.num_abandoned_tokens, b.bound,
                  SUM(s.num_tokens * (v.abandoned = 0 AND b.step - v.step BETWEEN 0 AND b.bound)) AS may_train,
                  SUM(s.num_tokens * (v.abandoned = 0 AND b.step - v.step NOT BETWEEN 0 AND b.bound)) AS too_old,
                  SUM(s.num_tokens * v.abandoned) AS left_behind
           FROM batch_members m JOIN batches b ON b.id = m.batch JOIN segments s ON s.task = m.task
           JOIN versions v ON v.number = s.version WHERE b.state <> 'undone' GROUP BY m.batch, m.task
           HAVING taken <> may_train OR m.num_stale_tokens <> too_old OR m.num_abandoned_tokens <> left_behind
               OR (m.num_audit_tokens > 0 AND m.num_trained_tokens > 0)""",
    ),
    Rule(
        "task {0} is in the batch of step {1}, but was scored after the batch was claimed",
        """SELECT m.task, b.step FROM batch_members m JOIN batches b ON b.id = m.batch JOIN rewards r ON r.task = m.task
           WHERE r.seq > b.last_reward""",
    ),
    Rule(
        "the token counts of the batch of step {0} differ from the sums over its members",
        """SELECT b.step FROM batches b JOIN batch_members m ON m.batch = b.id GROUP BY b.id
           HAVING b.num_trained_tokens <> SUM(m.num_trained_tokens) OR b.num_stale_tokens <> SUM(m.num_stale_tokens)
               OR b.num_abandoned_tokens <> SUM(m.num_abandoned_tokens)
               OR b.num_audit_tokens <> SUM(m.num_audit_tokens)""",
    ),
    Rule(
        "the batch of step {0} trained tokens of staleness {1}, above its max_staleness {2}",
        "SELECT step, max_staleness, bound FROM batches WHERE max_staleness > bound",
    ),
    Rule(
        "the oldest trained token of the batch of step {0} has staleness {1}, but the batch records {2}",
        """SELECT b.step, COALESCE(MAX(b.step - v.step), 0) AS oldest, b.max_staleness FROM batches b
           LEFT JOIN batch_members m ON m.batch = b.id AND m.num_trained_tokens > 0
           LEFT JOIN segments s ON s.task = m.task LEFT JOIN versions v ON v.number = s.version
               AND v.abandoned = 0 AND b.step - v.step BETWEEN 0 AND b.bound
           WHERE b.state <> 'undone' GROUP BY b.id HAVING oldest <> b.max_staleness""",
    ),
    Rule(
        "the batch of step {0} was trained from version {1} (step {2}), but that version is abandoned or of another "
        "step",
        """SELECT b.step, v.number, v.step FROM batches b JOIN versions v ON v.number = b.from_version
           WHERE b.state <> 'undone' AND (v.step <> b.step OR v.abandoned = 1)""",
    ),
    Rule(
        "the batch of step {0} produced version {1} (step {2}, parent {3}), but that version is abandoned or has "
        "a wrong step or parent",
        """SELECT b.step, v.number, v.step, v.parent FROM batches b JOIN versions v ON v.number = b.to_version
           WHERE b.state <> 'undone' AND (v.step <> b.step + 1 OR v.parent <> b.from_version OR v.abandoned = 1)""",
    ),
    Rule(
        "the batch of step {0} ({1}) has produced no version, but the batch of a later step already has a version to "
        "train from",
        """SELECT step, state FROM batches WHERE state <> 'undone' AND (state <> 'trained' OR to_version IS NULL)
           AND step < (SELECT MAX(step) FROM batches WHERE state <> 'undone' AND from_version IS NOT NULL)""",
    ),
    Rule(
        "steps {1} and {0} have batches, but the steps between them have none",
        """SELECT step, before FROM (SELECT step, LAG(step) OVER (ORDER BY step) AS before FROM batches
           WHERE state <> 'undone') WHERE step <> before + 1""",
    ),
    Rule(
        "the batch of step {0} contains no group",
        """SELECT b.step FROM batches b LEFT JOIN groups g ON g.batch = b.id
           WHERE b.state <> 'undone' AND g.id IS NULL""",
    ),
)

VERSIONS = (
    Rule(
        "version {0} of step {1} has parent {2} of step {3}, but that parent is abandoned or of the wrong step",
        """SELECT v.number, v.step, p.number, p.step FROM versions v JOIN versions p ON p.number = v.parent
           WHERE v.step - p.step NOT IN (0, 1) OR (v.abandoned = 0 AND p.abandoned = 1)""",
    ),
    Rule(
        "version {0} has no parent, but is not the run's first version",
        "SELECT number FROM versions WHERE parent IS NULL AND number > (SELECT MIN(number) FROM versions)",
    ),
    Rule(
        "versions {0} and {1} of step {2} have different weights, but neither is abandoned",
        """SELECT MIN(number), MAX(number), step FROM versions WHERE abandoned = 0
           GROUP BY step HAVING COUNT(DISTINCT digest) > 1""",
    ),
    Rule(
        "version {0} of step {1} is not abandoned, but follows version {2} of the later step {3}",
        """SELECT number, step, before, before_step FROM (
               SELECT number, step, LAG(number) OVER line AS before, LAG(step) OVER line AS before_step
               FROM versions WHERE abandoned = 0 WINDOW line AS (ORDER BY number)) WHERE step < before_step""",
    ),
    Rule(
        "task {0} was sampled from version {1}, which was never published",
        """SELECT s.task, s.version FROM segments s LEFT JOIN versions v ON v.number = s.version
           WHERE s.version IS NOT NULL AND v.number IS NULL""",
    ),
    Rule(
        "task {0} requires step {1}, but was sampled from version {2} of step {3}",
        """SELECT t.id, g.require_step, v.number, v.step FROM segments s JOIN tasks t ON t.id = s.task
           JOIN groups g ON g.id = t.group_id JOIN versions v ON v.number = s.version
           WHERE t.state IN ('accepted', 'scored') AND g.require_step <> v.step""",
    ),
)

TRAJECTORIES = (
    Rule(
        "the trajectory of task {0} has {1} tokens, {2} of them sampled, but its segments have {3} and {4}",
        """SELECT j.task, j.num_tokens, j.num_sampled_tokens, COALESCE(SUM(s.num_tokens), 0) AS n,
                  COALESCE(SUM(s.num_tokens * (s.version IS NOT NULL)), 0) AS sampled
           FROM trajectories j
           LEFT JOIN segments s ON s.task = j.task AND s.trajectory_index = j.trajectory_index
           GROUP BY j.seq HAVING j.num_tokens <> n OR j.num_sampled_tokens <> sampled""",
    ),
    Rule(
        "the segment of task {0} at position {1} is recorded for worker {2}, but that worker submitted no answer long "
        "enough to contain it",
        """SELECT s.task, s.start, s.worker FROM segments s JOIN trajectories j
               ON j.task = s.task AND j.trajectory_index = s.trajectory_index
           WHERE s.worker <> j.worker AND NOT EXISTS (
               SELECT 1 FROM partials p WHERE p.task = s.task AND p.worker = s.worker
               AND p.num_tokens >= s.num_tokens)""",
    ),
    Rule(
        "the segments of task {0} have a gap or an overlap before position {1}",
        """SELECT task, start FROM (SELECT task, start, COALESCE(LAG(start + num_tokens) OVER (
               PARTITION BY task, trajectory_index ORDER BY start), 0) AS ought FROM segments) WHERE start <> ought""",
    ),
)

PRUNED = (
    Rule(
        "group {0} counts {1} pruned trajectories, but {2} are pruned",
        """SELECT g.id, g.num_pruned, COALESCE(SUM(j.pruned), 0) AS n
           FROM groups g JOIN tasks t ON t.group_id = g.id LEFT JOIN trajectories j ON j.task = t.id
           GROUP BY g.id HAVING g.num_pruned <> n""",
    ),
    Rule(
        "the trajectory of task {0} was pruned, but its group {1} is {2}",
        """SELECT t.id, g.id, g.state FROM trajectories j JOIN tasks t ON t.id = j.task
           JOIN groups g ON g.id = t.group_id
           WHERE j.pruned = 1 AND g.state NOT IN ('trained', 'evaluated', 'dropped')""",
    ),
)

PARTIALS = (
    Rule(
        "task {0} is {1}, but a partial trajectory is still stored for it to continue",
        """SELECT t.id, t.state FROM partials p JOIN tasks t ON t.id = p.task
           WHERE p.state = 'kept' AND t.state NOT IN ('open', 'leased')""",
    ),
    Rule(
        "task {0} has a partial marked as continued, but no later partial or trajectory continues it",
        """SELECT p.task FROM partials p WHERE p.state = 'continued'
           AND NOT EXISTS (SELECT 1 FROM partials n WHERE n.task = p.task AND n.seq > p.seq)
           AND NOT EXISTS (SELECT 1 FROM trajectories j WHERE j.task = p.task)""",
    ),
    Rule(
        "the partial stored for task {0} ends with tokens of version {1}, which is abandoned",
        """SELECT p.task, p.last_version FROM partials p JOIN versions v ON v.number = p.last_version
           WHERE p.state = 'kept' AND v.abandoned = 1""",
    ),
    Rule(
        "task {0} counts {1} failed attempts, but was leased only {2} times",
        "SELECT id, num_failures, fence FROM tasks WHERE num_failures > fence",
    ),
    Rule(
        "task {0} counts {1} failed attempts, but {2} failures that count against it are stored",
        """SELECT t.id, t.num_failures, COUNT(f.task) AS n FROM tasks t
           LEFT JOIN failures f ON f.task = t.id AND f.forgiven = 0 GROUP BY t.id HAVING t.num_failures <> n""",
    ),
)

RULES = (*TASKS, *GROUPS, *BATCHES, *VERSIONS, *TRAJECTORIES, *PRUNED, *PARTIALS)


MAX_EXAMPLES = 5
"""Number of offending rows listed for each broken rule."""


@dataclass(frozen=True)
class VerifyReport:
    violations: tuple[str, ...]
    """Descriptions of what is wrong; empty if the ledger is sound."""
    counts: Counts
    """All zero if the file is too damaged to count."""

    @property
    def holds(self) -> bool:
        return not self.violations


class Verification(Reports):
    def verify(self, *, with_bodies: bool = True) -> VerifyReport:
        """Checks the whole ledger; `with_bodies` includes the bytes of trajectories and partials."""
        damage = _damage(self)
        if damage:
            return VerifyReport(damage, Counts())
        with self.snapshot():
            found = [*_broken_references(self), *_broken_rules(self), *_broken_seeds(self), *_changed_rewards(self)]
            if with_bodies:
                found += _shortened([*_broken_bodies(self), *_broken_partials(self)])
            counted = self.counts()
            return VerifyReport((*found, *_broken_sums(self, counted)), counted)


def _damage(db: Database) -> tuple[str, ...]:
    try:
        lines = [row[0] for row in db.execute(f"PRAGMA integrity_check({MAX_EXAMPLES})") if row[0] != "ok"]
    except sqlite3.DatabaseError as error:
        lines = [str(error)]
    return tuple(f"the file is damaged: {line}" for line in lines)


def _broken_references(db: Database) -> list[str]:
    return _shortened(
        [
            f"table {table}, row {row or 'unknown'}: it refers to a missing row of table {parent}"
            for table, row, parent, _ in db.execute("PRAGMA foreign_key_check")
        ]
    )


def _broken_rules(db: Database) -> list[str]:
    broken = ([rule.message.format(*row) for row in db.execute(rule.query)] for rule in RULES)
    return [message for found in broken for message in _shortened(found)]


def _broken_seeds(db: Database) -> list[str]:
    query = "SELECT t.id, t.seed, g.seed, t.member FROM tasks t JOIN groups g ON g.id = t.group_id"
    return _shortened(
        [
            f"the seed of task {task} is not the one derived from the seed of its group"
            for task, seed, group_seed, member in db.execute(query)
            if seed != derive_seed(group_seed, member)
        ]
    )


def _changed_rewards(db: Database) -> list[str]:
    query = "SELECT task, value, parts, error, digest FROM rewards"
    changed = [
        f"the reward of task {row[0]} was changed after it was stored: its digest differs"
        for *row, digest in db.execute(query)
        if reward_digest(*row) != digest
    ]
    return _shortened(changed)


def _broken_bodies(db: Database) -> Iterator[str]:
    query = """SELECT j.task, j.digest, j.ended_by, j.num_tokens, j.num_sampled_tokens, j.num_turns, j.wait_ms,
                      j.claimed, j.body, g.prompt
               FROM trajectories j JOIN tasks t ON t.id = j.task JOIN groups g ON g.id = t.group_id
               WHERE j.pruned = 0"""
    for task, digest, ended_by, num_tokens, num_sampled, *noted, row_body, prompt in db.execute(query):
        try:
            body = read(db.blobs, digest, row_body)
            if blake3(body).digest() != digest:
                yield f"the trajectory of task {task} was changed after it was accepted: its digest differs"
                continue
            trajectory = Trajectory.decode(body)
        except (OffbeatError, ValueError, KeyError) as error:
            yield f"the trajectory of task {task} cannot be read: {error}"
            continue
        segments = db.execute("SELECT start, num_tokens, version FROM segments WHERE task = ? ORDER BY start", (task,))
        stored = (task, ended_by, num_tokens, num_sampled, prompt, segments.fetchall())
        if stored != _facts(trajectory):
            yield f"the trajectory of task {task} differs from the tables in its tokens, versions, prompt or end"
        elif tuple(noted) != _notes(trajectory):
            yield f"the trajectory of task {task} differs from the tables in its turns, waiting time or claims"


def _broken_partials(db: Database) -> Iterator[str]:
    query = (
        "SELECT task, digest, num_tokens, num_sampled_tokens, first_version, last_version, body FROM partials "
        "WHERE state = 'kept'"
    )
    for task, digest, num_tokens, num_sampled, first, last, row_body in db.execute(query):
        try:
            body = read(db.blobs, digest, row_body)
        except OffbeatError as error:
            yield f"the partial of task {task} cannot be read: {error}"
            continue
        if blake3(body).digest() != digest:
            yield f"the partial of task {task} was changed after it was submitted: its digest differs"
            continue
        trajectory = Trajectory.decode(body)
        versions = [s.version for s in trajectory.segments if s.version is not None]
        stored = (task, num_tokens, num_sampled, first, last, None)
        counted = (trajectory.num_tokens, trajectory.sampled_mask.sum())
        if stored != (trajectory.task, *counted, versions[0], versions[-1], trajectory.end):
            yield f"the partial of task {task} differs from the tables in its task, tokens, versions or end"


def _facts(trajectory: Trajectory) -> tuple[object, ...]:
    segments = [(s.start, len(s.tokens), s.version) for s in trajectory.segments]
    num_sampled = sum(count for _, count, version in segments if version is not None)
    end = trajectory.end.value if trajectory.end else None
    return trajectory.task, end, trajectory.num_tokens, num_sampled, trajectory.prompt.tobytes(), segments


def _notes(trajectory: Trajectory) -> tuple[object, ...]:
    record = trajectory.episode
    if record is None:
        return 1, 0.0, None
    return record.num_turns, record.wait_ms, sum(claim.value for claim in record.claims) if record.claims else None


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
