"""The ledger's file: its tables, how it is opened, and where it may lie.

Guarantees: a committed transaction survives `kill -9` and a power cut (WAL, `synchronous=FULL`); a file of a newer
schema, a file that is no ledger and a network file system are refused before anything is written.
"""

from __future__ import annotations

import re
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from offbeat.errors import UserError
from offbeat.ledger.blobs import FOLDER, Blobs
from offbeat.ledger.errors import LedgerError

SCHEMA = 2
BUSY_TIMEOUT_S = 10.0
"""How long a write waits for another process, such as one that reads the ledger to verify it."""
NETWORK_FILE_SYSTEMS = {
    *("nfs", "nfs3", "nfs4", "cifs", "smb2", "smb3", "smbfs", "afs", "ncpfs", "coda", "davfs", "fuse.davfs2"),
    *("ceph", "fuse.ceph", "lustre", "gpfs", "beegfs", "glusterfs", "fuse.glusterfs", "orangefs", "pvfs2", "wekafs"),
    *("gfs2", "ocfs2", "fuse.sshfs", "fuse.s3fs", "fuse.gcsfuse", "fuse.rclone", "fuse.goofys", "fuse.juicefs"),
}
"""Their locks and shared memory do not carry SQLite's write-ahead log."""

REMEDIES = {
    "FULL": "free space on its disk",
    "IOERR": "see that its disk works and has space",
    "CORRUPT": "bring back a copy (offbeat ledger verify tells what is damaged)",
    "NOTADB": "bring back a copy",
    "BUSY": "end the process that holds it",
    "LOCKED": "end the process that holds it",
    "READONLY": "make it writable",
    "CANTOPEN": "make its folder writable",
}
"""What to do, by the kind of error that SQLite reports about a file."""

TABLES = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;

CREATE TABLE versions (
    number INTEGER PRIMARY KEY,
    step INTEGER NOT NULL CHECK (step >= 0),
    parent INTEGER REFERENCES versions (number) CHECK (parent < number),
    digest TEXT NOT NULL,
    path TEXT NOT NULL,
    abandoned INTEGER NOT NULL DEFAULT 0 CHECK (abandoned IN (0, 1)),
    published_at REAL NOT NULL
);

CREATE INDEX versions_living ON versions (step) WHERE abandoned = 0;

CREATE TABLE sources (name TEXT PRIMARY KEY, drawn INTEGER NOT NULL) WITHOUT ROWID;

CREATE TABLE evals (
    id INTEGER PRIMARY KEY,
    step INTEGER NOT NULL,
    abandoned INTEGER NOT NULL DEFAULT 0 CHECK (abandoned IN (0, 1)),
    opened_at REAL NOT NULL
);
CREATE UNIQUE INDEX evals_by_step ON evals (step) WHERE abandoned = 0;

CREATE TABLE batches (
    id INTEGER PRIMARY KEY,
    step INTEGER NOT NULL,
    bound INTEGER NOT NULL,
    state TEXT NOT NULL CHECK (state IN ('claimed', 'trained', 'undone')),
    -- Without one while the step is claimed ahead of its version.
    from_version INTEGER REFERENCES versions (number) CHECK (state <> 'trained' OR from_version IS NOT NULL),
    to_version INTEGER REFERENCES versions (number),
    num_trained_tokens INTEGER NOT NULL,
    num_stale_tokens INTEGER NOT NULL,
    num_abandoned_tokens INTEGER NOT NULL,
    num_audit_tokens INTEGER NOT NULL DEFAULT 0,
    max_staleness INTEGER NOT NULL,
    claimed_at REAL NOT NULL,
    trained_at REAL
);
CREATE UNIQUE INDEX batches_by_step ON batches (step) WHERE state <> 'undone';

-- The num_ columns sum up a group's tasks, so that no decision and no count has to read them all.
CREATE TABLE groups (
    id INTEGER PRIMARY KEY,
    purpose TEXT NOT NULL CHECK (purpose IN ('train', 'eval')),
    eval INTEGER REFERENCES evals (id) CHECK ((purpose = 'eval') = (eval IS NOT NULL)),
    ordinal INTEGER NOT NULL,
    retry INTEGER NOT NULL,
    reissue_of INTEGER REFERENCES groups (id),
    source TEXT NOT NULL,
    source_ordinal INTEGER NOT NULL,
    seed INTEGER NOT NULL,
    size INTEGER NOT NULL CHECK (size >= 1),
    require_step INTEGER,
    require_version INTEGER REFERENCES versions (number),
    -- Of the oldest version that a member was begun with; none before the first lease.
    first_step INTEGER,
    state TEXT NOT NULL CHECK (state IN ('open', 'ready', 'claimed', 'trained', 'evaluated', 'dropped')),
    reason TEXT CHECK ((state = 'dropped') = (reason IS NOT NULL)),
    batch INTEGER REFERENCES batches (id),
    num_open INTEGER NOT NULL,
    num_scored INTEGER NOT NULL DEFAULT 0,
    num_failed INTEGER NOT NULL DEFAULT 0,
    num_trajectories INTEGER NOT NULL DEFAULT 0,
    num_sampled_tokens INTEGER NOT NULL DEFAULT 0,
    admitted_at REAL NOT NULL,
    ended_at REAL,
    reward TEXT NOT NULL,
    sampling TEXT NOT NULL,
    prompt BLOB NOT NULL,
    problem TEXT NOT NULL
);
CREATE UNIQUE INDEX groups_living ON groups (ordinal) WHERE purpose = 'train' AND state <> 'dropped';
CREATE UNIQUE INDEX groups_drawn ON groups (source, source_ordinal) WHERE purpose = 'train' AND reissue_of IS NULL;
CREATE UNIQUE INDEX groups_reissued ON groups (reissue_of) WHERE reissue_of IS NOT NULL;
CREATE UNIQUE INDEX groups_of_eval ON groups (eval, ordinal) WHERE eval IS NOT NULL;
CREATE INDEX groups_by_state ON groups (state, purpose, reason, num_trajectories, num_scored, num_sampled_tokens);
CREATE INDEX groups_by_ordinal ON groups (purpose, ordinal);
CREATE INDEX groups_by_batch ON groups (batch) WHERE batch IS NOT NULL;

CREATE TABLE tasks (
    id INTEGER PRIMARY KEY,
    group_id INTEGER NOT NULL REFERENCES groups (id),
    member INTEGER NOT NULL,
    seed INTEGER NOT NULL,
    state TEXT NOT NULL CHECK (state IN ('open', 'leased', 'accepted', 'scored', 'failed', 'dropped')),
    -- Who holds it, or held it last, and under which fence: the number of its leases so far.
    worker TEXT CHECK ((state = 'leased') <= (worker IS NOT NULL)),
    fence INTEGER NOT NULL DEFAULT 0,
    -- When that lease began, by the clock for people; deadlines are the coordinator's.
    leased_at REAL CHECK ((state = 'leased') <= (leased_at IS NOT NULL)),
    num_failures INTEGER NOT NULL DEFAULT 0,
    -- The fence of the attempt that failed last: an attempt fails once, however often it is told.
    failed_fence INTEGER NOT NULL DEFAULT 0 CHECK (failed_fence <= fence),
    -- Workers that vanished while they held it, whoever is to blame.
    num_losses INTEGER NOT NULL DEFAULT 0,
    reason TEXT CHECK ((state IN ('failed', 'dropped')) = (reason IS NOT NULL)),
    detail TEXT,
    UNIQUE (group_id, member)
);
CREATE INDEX tasks_leased ON tasks (worker) WHERE state = 'leased';
CREATE INDEX tasks_lost ON tasks (group_id, num_losses) WHERE state = 'open' AND num_losses > 0;
CREATE INDEX tasks_accepted ON tasks (id) WHERE state = 'accepted';
CREATE INDEX tasks_failed ON tasks (reason) WHERE state = 'failed';

CREATE TABLE trajectories (
    seq INTEGER PRIMARY KEY,
    task INTEGER NOT NULL REFERENCES tasks (id),
    trajectory_index INTEGER NOT NULL,
    digest BLOB NOT NULL,
    ended_by TEXT NOT NULL CHECK (ended_by IN ('stop', 'length')),
    num_tokens INTEGER NOT NULL,
    num_sampled_tokens INTEGER NOT NULL,
    worker TEXT NOT NULL,
    fence INTEGER NOT NULL,
    accepted_at REAL NOT NULL,
    pruned INTEGER NOT NULL DEFAULT 0 CHECK (pruned IN (0, 1) AND (pruned = 0 OR body IS NULL)),
    -- None where the body is a file, or was pruned. Last, because what follows a long value is slow to reach.
    body BLOB,
    UNIQUE (task, trajectory_index)
);

-- Beginnings that were handed back. One of a task is kept at most; when the task goes on from it, its tokens become the
-- trajectory's or the next partial's.
CREATE TABLE partials (
    seq INTEGER PRIMARY KEY,
    task INTEGER NOT NULL REFERENCES tasks (id),
    digest BLOB NOT NULL,
    num_sampled_tokens INTEGER NOT NULL,
    first_version INTEGER NOT NULL REFERENCES versions (number),
    last_version INTEGER NOT NULL REFERENCES versions (number),
    worker TEXT NOT NULL,
    fence INTEGER NOT NULL,
    state TEXT NOT NULL CHECK (state IN ('kept', 'continued', 'wasted')),
    reason TEXT CHECK ((state = 'wasted') = (reason IS NOT NULL)),
    stored_at REAL NOT NULL,
    -- None where the body is a file, or nobody needs it any more.
    body BLOB CHECK (state = 'kept' OR body IS NULL)
);
CREATE UNIQUE INDEX partials_kept ON partials (task) WHERE state = 'kept';
CREATE INDEX partials_by_task ON partials (task);

CREATE INDEX trajectories_kept ON trajectories (task) WHERE pruned = 0;

CREATE TABLE segments (
    task INTEGER NOT NULL,
    trajectory_index INTEGER NOT NULL,
    start INTEGER NOT NULL,
    num_tokens INTEGER NOT NULL CHECK (num_tokens >= 1),
    version INTEGER REFERENCES versions (number),
    PRIMARY KEY (task, trajectory_index, start),
    FOREIGN KEY (task, trajectory_index) REFERENCES trajectories (task, trajectory_index)
) WITHOUT ROWID;

CREATE TABLE rewards (
    seq INTEGER PRIMARY KEY,
    task INTEGER NOT NULL UNIQUE REFERENCES tasks (id),
    value REAL,
    parts TEXT,
    error TEXT CHECK ((error IS NULL) = (value IS NOT NULL)),
    scored_at REAL NOT NULL
);

CREATE TABLE batch_members (
    batch INTEGER NOT NULL REFERENCES batches (id),
    task INTEGER NOT NULL REFERENCES tasks (id),
    num_trained_tokens INTEGER NOT NULL,
    num_stale_tokens INTEGER NOT NULL,
    num_abandoned_tokens INTEGER NOT NULL,
    num_audit_tokens INTEGER NOT NULL DEFAULT 0,
    PRIMARY KEY (batch, task)
) WITHOUT ROWID;

CREATE TABLE workers (
    name TEXT PRIMARY KEY,
    role TEXT NOT NULL CHECK (role IN ('rollout', 'reward', 'trainer')),
    secret_hash BLOB NOT NULL UNIQUE,
    state TEXT NOT NULL CHECK (state IN ('active', 'left', 'revoked', 'quarantined')),
    reason TEXT,
    capabilities TEXT NOT NULL,
    joined_at REAL NOT NULL,
    num_audited INTEGER NOT NULL DEFAULT 0,
    num_audit_failures INTEGER NOT NULL DEFAULT 0
) WITHOUT ROWID;

-- The wall clock decides how long a token lives, because another process than the one that issued it asks.
CREATE TABLE join_tokens (
    hash BLOB PRIMARY KEY,
    role TEXT NOT NULL CHECK (role IN ('rollout', 'reward', 'trainer')),
    issued_at REAL NOT NULL,
    expires_at REAL NOT NULL,
    used_by TEXT REFERENCES workers (name),
    used_at REAL
) WITHOUT ROWID;
"""

INDEXES = """
CREATE INDEX IF NOT EXISTS groups_ready ON groups (first_step, ordinal) WHERE state = 'ready' AND purpose = 'train';
"""
"""What a file of this schema may have been made without."""


class Database:
    """One connection, its clock for people, and its transactions."""

    def __init__(self, path: Path, *, read_only: bool = False, wall_clock: Callable[[], float] = time.time):
        self.path, self.wall_clock = path, wall_clock
        self.blobs = Blobs(path.parent / FOLDER)
        self.connection = _connect(path, read_only)
        self.execute, self.executemany = self.connection.execute, self.connection.executemany

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """All of the block is on disk when it ends, or none of it."""
        self.execute("BEGIN IMMEDIATE")
        try:
            yield
            self.execute("COMMIT")
        except BaseException:
            if self.connection.in_transaction:
                self.execute("ROLLBACK")
            raise

    @contextmanager
    def snapshot(self) -> Iterator[None]:
        """All reads of the block see the same moment, whoever writes meanwhile."""
        self.execute("BEGIN")
        try:
            yield
        finally:
            self.execute("ROLLBACK")

    @contextmanager
    def naming_damage(self) -> Iterator[None]:
        """Turns what SQLite says of the disk or the file into a `LedgerError`; what it says of our queries is a bug."""
        try:
            yield
        except (sqlite3.IntegrityError, sqlite3.ProgrammingError):
            raise
        except sqlite3.DatabaseError as error:
            kind = getattr(error, "sqlite_errorname", "").removeprefix("SQLITE_").partition("_")[0]
            if kind not in REMEDIES:
                raise
            raise LedgerError(f"{self.path}: {error}; {REMEDIES[kind]}, then --resume the run") from error

    def close(self) -> None:
        self.connection.close()


def network_file_system(path: Path, mounts: Path = Path("/proc/mounts")) -> str | None:
    """The kind of network file system that `path` lies on; None where it is local, or where nobody can tell."""
    if not mounts.exists():
        return None
    place = str(path.resolve())
    best, kind = "", None
    for line in mounts.read_text(errors="replace").splitlines():
        fields = line.split(" ")
        if len(fields) < 3:
            continue
        mount = re.sub(r"\\([0-7]{3})", lambda m: chr(int(m.group(1), 8)), fields[1])
        inside = place == mount or place.startswith(mount.rstrip("/") + "/")
        if inside and len(mount) >= len(best):  # of two mounts on one place the later one hides the earlier
            best, kind = mount, fields[2]
    return kind if kind in NETWORK_FILE_SYSTEMS else None


def _connect(path: Path, read_only: bool) -> sqlite3.Connection:
    kind = network_file_system(path)
    if kind is not None:
        raise UserError(
            f"{path}: lies on a network file system ({kind}), where SQLite can lose data; set run.dir local"
        )
    if read_only and not path.exists():
        raise UserError(f"{path}: no ledger here")
    try:
        # One thread writes, but it need not be the thread that opened the ledger.
        connection = sqlite3.connect(path, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False)
        try:
            _prepare(connection, path, read_only)
        except BaseException:
            connection.close()
            raise
    except sqlite3.DatabaseError as error:
        raise UserError(f"{path}: cannot be used as a ledger: {error}") from error
    return connection


def _prepare(connection: sqlite3.Connection, path: Path, read_only: bool) -> None:
    found = _schema_of(connection, path)
    if found is not None and found > SCHEMA:
        raise UserError(f"{path}: written by a newer Offbeat (schema {found}; this one reads {SCHEMA}); upgrade")
    if found is not None and found < SCHEMA:
        raise UserError(
            f"{path}: written by an older Offbeat (schema {found}; this one reads {SCHEMA}); finish the run with it"
        )
    connection.execute("PRAGMA foreign_keys = ON")
    if read_only:
        connection.execute("PRAGMA query_only = ON")
        if found is None:
            raise UserError(f"{path}: holds no ledger")
        return
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    if found is None:
        connection.executescript(f"BEGIN IMMEDIATE; {TABLES} INSERT INTO meta VALUES ('schema', '{SCHEMA}'); COMMIT;")
    connection.executescript(INDEXES)


def _schema_of(connection: sqlite3.Connection, path: Path) -> int | None:
    """The file's schema; None where it is empty."""
    tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    if not tables:
        return None
    if "meta" not in tables:
        raise UserError(f"{path}: an SQLite file, but no ledger of Offbeat")
    return int(connection.execute("SELECT value FROM meta WHERE key = 'schema'").fetchone()[0])
