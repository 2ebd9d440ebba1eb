"""Upgrades of ledger files that an older Offbeat wrote.

`RunFolder.open` calls `upgrade` while it holds the run's lock, so no other process works with the file. The old file is
kept beside the new one as `ledger.sqlite.before-schema-N`. The upgrade is one transaction: a crash leaves the old file.
Each entry of `MIGRATIONS` upgrades its schema to the next one and is never edited after a release.
"""

from __future__ import annotations

import logging
import os
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from offbeat.errors import UserError
from offbeat.files import fsync_file, fsync_folder
from offbeat.ledger.rewards import reward_digest
from offbeat.ledger.tables import SCHEMA

log = logging.getLogger(__name__)

TO_SCHEMA_6 = """
ALTER TABLE segments RENAME TO old_segments;
CREATE TABLE segments (
    task INTEGER NOT NULL,
    trajectory_index INTEGER NOT NULL,
    start INTEGER NOT NULL,
    num_tokens INTEGER NOT NULL CHECK (num_tokens >= 1),
    version INTEGER REFERENCES versions (number),
    worker TEXT NOT NULL,
    num_compared INTEGER NOT NULL DEFAULT 0 CHECK (num_compared BETWEEN 0 AND num_tokens),
    num_off INTEGER NOT NULL DEFAULT 0 CHECK (num_off BETWEEN 0 AND num_compared),
    PRIMARY KEY (task, trajectory_index, start),
    FOREIGN KEY (task, trajectory_index) REFERENCES trajectories (task, trajectory_index)
) WITHOUT ROWID;
CREATE INDEX segments_compared ON segments (worker, task, start, num_compared, num_off) WHERE num_compared > 0;
-- As `partials.contributors`: the first partial that already had the segment, since the last one that was wasted.
INSERT INTO segments (task, trajectory_index, start, num_tokens, version, worker)
SELECT s.task, s.trajectory_index, s.start, s.num_tokens, s.version, COALESCE((
    SELECT p.worker FROM partials p WHERE p.task = s.task AND p.state <> 'wasted' AND p.num_sampled_tokens >= s.sampled
    AND p.seq > (SELECT COALESCE(MAX(w.seq), 0) FROM partials w WHERE w.task = s.task AND w.state = 'wasted')
    ORDER BY p.seq LIMIT 1), j.worker)
FROM (SELECT *, SUM(IIF(version IS NULL, 0, num_tokens)) OVER (
          PARTITION BY task, trajectory_index ORDER BY start) AS sampled FROM old_segments) s
JOIN trajectories j ON j.task = s.task AND j.trajectory_index = s.trajectory_index;
DROP TABLE old_segments;

ALTER TABLE rewards RENAME TO old_rewards;
CREATE TABLE rewards (
    seq INTEGER PRIMARY KEY,
    task INTEGER NOT NULL UNIQUE REFERENCES tasks (id),
    value REAL,
    parts TEXT,
    error TEXT CHECK ((error IS NULL) = (value IS NOT NULL)),
    digest BLOB NOT NULL,
    scored_at REAL NOT NULL
);
INSERT INTO rewards SELECT seq, task, value, parts, error, reward_digest(task, value, parts, error), scored_at
FROM old_rewards;
DROP TABLE old_rewards;

ALTER TABLE workers DROP COLUMN num_audited;
ALTER TABLE workers DROP COLUMN num_audit_failures;

CREATE TABLE trainers (
    generation INTEGER PRIMARY KEY,
    name TEXT NOT NULL,
    host TEXT NOT NULL,
    home TEXT NOT NULL,
    began_at REAL NOT NULL,
    checkpoint_step INTEGER
);
CREATE TABLE failures (
    task INTEGER NOT NULL REFERENCES tasks (id),
    fence INTEGER NOT NULL,
    worker TEXT NOT NULL,
    reason TEXT NOT NULL,
    detail TEXT,
    failed_at REAL NOT NULL,
    forgiven INTEGER NOT NULL DEFAULT 0 CHECK (forgiven IN (0, 1)),
    PRIMARY KEY (task, fence)
) WITHOUT ROWID;
CREATE INDEX failures_by_worker ON failures (worker, forgiven, task);
-- Schema 5 counted failed attempts without recording who made them.
WITH RECURSIVE attempts (task, fence, num_left, reason, detail, failed_at) AS (
    SELECT t.id, t.failed_fence, t.num_failures, COALESCE(t.reason, 'unknown'), t.detail, g.admitted_at
    FROM tasks t JOIN groups g ON g.id = t.group_id WHERE t.num_failures > 0
    UNION ALL
    SELECT task, fence - 1, num_left - 1, reason, detail, failed_at FROM attempts WHERE num_left > 1)
INSERT INTO failures (task, fence, worker, reason, detail, failed_at)
SELECT task, fence, 'unknown', reason, detail, failed_at FROM attempts;
CREATE INDEX tasks_to_retry ON tasks (worker, group_id) WHERE state = 'open' AND fence > 0 AND failed_fence = fence;

CREATE TABLE set_aside (
    seq INTEGER PRIMARY KEY,
    worker TEXT NOT NULL,
    why TEXT NOT NULL,
    since REAL NOT NULL,
    until REAL NOT NULL
);
"""

TO_SCHEMA_7 = """
ALTER TABLE trajectories RENAME TO old_trajectories;
DROP INDEX trajectories_in_files;
CREATE TABLE trajectories (
    seq INTEGER PRIMARY KEY,
    task INTEGER NOT NULL REFERENCES tasks (id),
    trajectory_index INTEGER NOT NULL,
    digest BLOB NOT NULL,
    ended_by TEXT NOT NULL CHECK (
        ended_by IN ('stop', 'length', 'environment', 'turns', 'time', 'calls', 'overflow')
    ),
    num_tokens INTEGER NOT NULL,
    num_sampled_tokens INTEGER NOT NULL,
    num_turns INTEGER NOT NULL DEFAULT 1,
    wait_ms REAL NOT NULL DEFAULT 0,
    claimed REAL,
    worker TEXT NOT NULL,
    fence INTEGER NOT NULL,
    accepted_at REAL NOT NULL,
    pruned INTEGER NOT NULL DEFAULT 0 CHECK (pruned IN (0, 1) AND (pruned = 0 OR body IS NULL)),
    body BLOB,
    UNIQUE (task, trajectory_index)
);
INSERT INTO trajectories (seq, task, trajectory_index, digest, ended_by, num_tokens, num_sampled_tokens, worker, fence,
                          accepted_at, pruned, body)
SELECT seq, task, trajectory_index, digest, ended_by, num_tokens, num_sampled_tokens, worker, fence, accepted_at,
       pruned, body
FROM old_trajectories;
DROP TABLE old_trajectories;
CREATE INDEX trajectories_in_files ON trajectories (digest) WHERE body IS NULL AND pruned = 0;

ALTER TABLE partials RENAME TO old_partials;
DROP INDEX partials_kept;
DROP INDEX partials_by_task;
CREATE TABLE partials (
    seq INTEGER PRIMARY KEY,
    task INTEGER NOT NULL REFERENCES tasks (id),
    digest BLOB NOT NULL,
    num_tokens INTEGER NOT NULL,
    num_sampled_tokens INTEGER NOT NULL,
    first_version INTEGER NOT NULL REFERENCES versions (number),
    last_version INTEGER NOT NULL REFERENCES versions (number),
    worker TEXT NOT NULL,
    fence INTEGER NOT NULL,
    state TEXT NOT NULL CHECK (state = 'kept' OR state = 'continued' OR state = 'wasted'),
    reason TEXT CHECK ((state = 'wasted') = (reason IS NOT NULL)),
    stored_at REAL NOT NULL,
    body BLOB CHECK (state = 'kept' OR body IS NULL)
);
-- Until schema 6, all tokens of a response were sampled.
INSERT INTO partials (seq, task, digest, num_tokens, num_sampled_tokens, first_version, last_version, worker, fence,
                      state, reason, stored_at, body)
SELECT seq, task, digest, num_sampled_tokens, num_sampled_tokens, first_version, last_version, worker, fence, state,
       reason, stored_at, body
FROM old_partials;
DROP TABLE old_partials;
CREATE UNIQUE INDEX partials_kept ON partials (task) WHERE state = 'kept';
CREATE INDEX partials_by_task ON partials (task);
"""

MIGRATIONS: dict[int, str] = {5: TO_SCHEMA_6, 6: TO_SCHEMA_7}
"""SQL that upgrades a ledger to the next schema, by the number of the old schema."""
FUNCTIONS: tuple[tuple[str, int, Callable[..., bytes]], ...] = (("reward_digest", 4, reward_digest),)
"""Python functions that the SQL calls: name, number of arguments, function."""


def is_old(path: Path) -> bool:
    """Whether the ledger at `path` has an older schema that `upgrade` can upgrade."""
    if not path.is_file():
        return False
    with closing(sqlite3.connect(path)) as connection:
        return _schema(connection) in MIGRATIONS


def upgrade(path: Path) -> None:
    """Upgrades the ledger at `path` to the current schema; does nothing if its schema is current or cannot be
    upgraded."""
    if not is_old(path):
        return
    connection = sqlite3.connect(path, isolation_level=None)
    try:
        found = _schema(connection)
        assert found is not None
        kept = _keep_copy(connection, path)
        for name, num_arguments, function in FUNCTIONS:
            connection.create_function(name, num_arguments, function, deterministic=True)
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA legacy_alter_table = ON")  # else a rename changes other tables' references
        steps = "".join(MIGRATIONS[schema] for schema in range(found, SCHEMA))
        connection.executescript(f"BEGIN IMMEDIATE; {steps} UPDATE meta SET value = '{SCHEMA}' WHERE key = 'schema';")
        broken = connection.execute("PRAGMA foreign_key_check").fetchone()
        assert broken is None, f"{path}: after the upgrade, table {broken[0]} refers to a missing row of {broken[2]}"
        connection.execute("COMMIT")
        log.info("%s: upgraded from schema %d to %d; the old file is %s", path, found, SCHEMA, kept)
    except (sqlite3.DatabaseError, OSError) as error:
        raise UserError(
            f"ledger {path} cannot be upgraded to schema {SCHEMA}: {error}; the file was not changed: correct the "
            "cause, then resume the run again"
        ) from error
    finally:
        connection.close()  # also rolls back an uncommitted transaction


def _schema(connection: sqlite3.Connection) -> int | None:
    """Returns the schema of a ledger; None if the file is empty or not a ledger, which `Database` will report."""
    try:
        return int(connection.execute("SELECT value FROM meta WHERE key = 'schema'").fetchone()[0])
    except (sqlite3.DatabaseError, TypeError, ValueError):
        return None


def _keep_copy(connection: sqlite3.Connection, path: Path) -> Path:
    """Copies the ledger, including its write-ahead log, to a file beside it; returns the path of the copy."""
    kept = path.with_name(f"{path.name}.before-schema-{SCHEMA}")
    draft = kept.with_name(f"{kept.name}.part")
    draft.unlink(missing_ok=True)
    with closing(sqlite3.connect(draft)) as copy:
        connection.backup(copy)
    shutil.copymode(path, draft)
    fsync_file(draft)
    os.replace(draft, kept)
    fsync_folder(path.parent)
    return kept
