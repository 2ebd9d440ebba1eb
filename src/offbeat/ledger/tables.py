"""Tables and indices of the ledger, and the constraints that SQLite itself checks."""

from __future__ import annotations

SCHEMA = 7
"""Number of the schema in `TABLES`, raised with every change. `Database` refuses a file with another number. Resuming
a run upgrades an older file (`migrations`)."""


TABLES = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;

CREATE TABLE versions (
    number INTEGER PRIMARY KEY,
    step INTEGER NOT NULL CHECK (step >= 0),
    parent INTEGER REFERENCES versions (number) CHECK (parent < number),
    digest TEXT NOT NULL,
    path TEXT NOT NULL,
    -- Digest of its manifest; empty if it was published as whole files.
    manifest TEXT NOT NULL DEFAULT '',
    abandoned INTEGER NOT NULL DEFAULT 0 CHECK (abandoned IN (0, 1)),
    published_at REAL NOT NULL
);

CREATE INDEX versions_living ON versions (step) WHERE abandoned = 0;
CREATE INDEX versions_abandoned ON versions (number) WHERE abandoned = 1;

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
    -- NULL while the step is claimed ahead of its version.
    from_version INTEGER REFERENCES versions (number) CHECK (state <> 'trained' OR from_version IS NOT NULL),
    to_version INTEGER REFERENCES versions (number),
    num_trained_tokens INTEGER NOT NULL,
    num_stale_tokens INTEGER NOT NULL,
    num_abandoned_tokens INTEGER NOT NULL,
    num_audit_tokens INTEGER NOT NULL DEFAULT 0,
    max_staleness INTEGER NOT NULL,
    -- Latest reward when it was claimed: later ones stay unknown to it, however often it is loaded.
    last_reward INTEGER NOT NULL,
    claimed_at REAL NOT NULL,
    trained_at REAL
);
CREATE UNIQUE INDEX batches_by_step ON batches (step) WHERE state <> 'undone';

-- The num_ columns are sums over a group's tasks, so that decisions and counts need not read them. States that change
-- often are compared one by one: SQLite builds a table for a longer IN in every statement.
CREATE TABLE groups (
    id INTEGER PRIMARY KEY,
    purpose TEXT NOT NULL CHECK (purpose IN ('train', 'eval')),
    eval INTEGER REFERENCES evals (id) CHECK ((purpose = 'eval') = (eval IS NOT NULL)),
    ordinal INTEGER NOT NULL,
    retry INTEGER NOT NULL,
    reissue_of INTEGER REFERENCES groups (id),
    source TEXT NOT NULL,
    source_ordinal INTEGER NOT NULL,
    -- Index among the groups of its prompt, if a prompt is drawn as several groups.
    sibling INTEGER NOT NULL CHECK (sibling >= 0),
    seed INTEGER NOT NULL,
    size INTEGER NOT NULL CHECK (size >= 1),
    require_step INTEGER,
    require_version INTEGER REFERENCES versions (number),
    -- Step of the oldest version that a member was begun with; none before the first lease.
    first_step INTEGER,
    state TEXT NOT NULL CHECK (
        state = 'open' OR state = 'ready' OR state = 'claimed' OR state = 'trained' OR state = 'evaluated'
        OR state = 'dropped'
    ),
    reason TEXT CHECK ((state = 'dropped') = (reason IS NOT NULL)),
    -- First step without a batch when it was dropped without a signal.
    dropped_at_step INTEGER CHECK ((dropped_at_step IS NOT NULL) = (reason IS 'no_signal')),
    batch INTEGER REFERENCES batches (id),
    num_open INTEGER NOT NULL,
    num_scored INTEGER NOT NULL DEFAULT 0,
    num_failed INTEGER NOT NULL DEFAULT 0,
    num_trajectories INTEGER NOT NULL DEFAULT 0,
    num_pruned INTEGER NOT NULL DEFAULT 0,
    num_sampled_tokens INTEGER NOT NULL DEFAULT 0,
    admitted_at REAL NOT NULL,
    ended_at REAL,
    reward TEXT NOT NULL,
    sampling TEXT NOT NULL,
    prompt BLOB NOT NULL,
    problem TEXT NOT NULL
);
CREATE UNIQUE INDEX groups_living ON groups (ordinal) WHERE purpose = 'train' AND state <> 'dropped';
CREATE UNIQUE INDEX groups_drawn ON groups (source, source_ordinal, sibling)
    WHERE purpose = 'train' AND reissue_of IS NULL;
CREATE UNIQUE INDEX groups_reissued ON groups (reissue_of) WHERE reissue_of IS NOT NULL;
CREATE UNIQUE INDEX groups_of_eval ON groups (eval, ordinal) WHERE eval IS NOT NULL;
CREATE INDEX groups_by_ordinal ON groups (purpose, ordinal);
CREATE INDEX groups_by_batch ON groups (batch) WHERE batch IS NOT NULL;
CREATE INDEX groups_of_step ON groups (purpose, require_step, ordinal) WHERE require_step IS NOT NULL;
CREATE INDEX groups_without_signal ON groups (dropped_at_step) WHERE dropped_at_step IS NOT NULL;
CREATE INDEX groups_required ON groups (require_step) WHERE state = 'open' AND require_step IS NOT NULL;
-- Covering indices for decisions and counts, whose rows hold prompts. None has a column that a submission changes while
-- its group is open: each such index would be one more page to write.
-- Groups with open tasks, in the order of leasing (`OpenGroup.order`).
CREATE INDEX groups_open ON groups (purpose <> 'eval', num_open = size, ordinal, id, purpose, size, num_open,
                                    require_step, require_version, first_step, state)
    WHERE state = 'open' AND num_open > 0;
-- Groups not trained yet, by age.
CREATE INDEX groups_alive ON groups (state, purpose, first_step, ordinal, require_step)
    WHERE state = 'open' OR state = 'ready' OR state = 'claimed';
-- Groups no longer open, with their sums.
CREATE INDEX groups_closed ON groups (state, purpose, reason, num_trajectories, num_scored, num_sampled_tokens)
    WHERE state <> 'open';
-- Ended groups that still have the bytes of their trajectories.
CREATE INDEX groups_unpruned ON groups (id)
    WHERE (state = 'trained' OR state = 'evaluated' OR state = 'dropped') AND num_pruned < num_trajectories;

CREATE TABLE tasks (
    id INTEGER PRIMARY KEY,
    group_id INTEGER NOT NULL REFERENCES groups (id),
    member INTEGER NOT NULL,
    seed INTEGER NOT NULL,
    state TEXT NOT NULL CHECK (
        state = 'open' OR state = 'leased' OR state = 'accepted' OR state = 'scored' OR state = 'failed'
        OR state = 'dropped'
    ),
    -- Current or last holder, and its fence: the number of leases so far.
    worker TEXT CHECK ((state = 'leased') <= (worker IS NOT NULL)),
    fence INTEGER NOT NULL DEFAULT 0,
    -- Wall time at which that lease began; deadlines are the coordinator's.
    leased_at REAL CHECK ((state = 'leased') <= (leased_at IS NOT NULL)),
    num_failures INTEGER NOT NULL DEFAULT 0,
    -- Fence of the last failed attempt: an attempt fails once, however often it is reported.
    failed_fence INTEGER NOT NULL DEFAULT 0 CHECK (failed_fence <= fence),
    -- Workers that vanished while they held it, whether or not it was to blame.
    num_losses INTEGER NOT NULL DEFAULT 0,
    reason TEXT CHECK ((state IN ('failed', 'dropped')) = (reason IS NOT NULL)),
    detail TEXT,
    UNIQUE (group_id, member)
);
CREATE INDEX tasks_leased ON tasks (worker, num_losses, state) WHERE state = 'leased';
CREATE INDEX tasks_lost ON tasks (group_id, num_losses) WHERE state = 'open' AND num_losses > 0;
CREATE INDEX tasks_failed ON tasks (reason) WHERE state = 'failed';
-- Open tasks whose last attempt failed.
CREATE INDEX tasks_to_retry ON tasks (worker, group_id) WHERE state = 'open' AND fence > 0 AND failed_fence = fence;

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
    -- Turns that were handed over, the time that the episode waited for its environment, and the sum of what the
    -- environment claims was earned; an answer without an environment is one turn.
    num_turns INTEGER NOT NULL DEFAULT 1,
    wait_ms REAL NOT NULL DEFAULT 0,
    claimed REAL,
    worker TEXT NOT NULL,
    fence INTEGER NOT NULL,
    accepted_at REAL NOT NULL,
    pruned INTEGER NOT NULL DEFAULT 0 CHECK (pruned IN (0, 1) AND (pruned = 0 OR body IS NULL)),
    -- NULL if the body is a file, or was pruned. Last, because columns after a long value are slow to reach.
    body BLOB,
    UNIQUE (task, trajectory_index)
);

CREATE INDEX trajectories_in_files ON trajectories (digest) WHERE body IS NULL AND pruned = 0;

-- Partials that were handed back. At most one of a task is kept; once the task continues it, its tokens belong to the
-- trajectory or the next partial.
CREATE TABLE partials (
    seq INTEGER PRIMARY KEY,
    task INTEGER NOT NULL REFERENCES tasks (id),
    digest BLOB NOT NULL,
    -- Of these, the tokens that were not sampled are an environment's.
    num_tokens INTEGER NOT NULL,
    num_sampled_tokens INTEGER NOT NULL,
    first_version INTEGER NOT NULL REFERENCES versions (number),
    last_version INTEGER NOT NULL REFERENCES versions (number),
    worker TEXT NOT NULL,
    fence INTEGER NOT NULL,
    state TEXT NOT NULL CHECK (state = 'kept' OR state = 'continued' OR state = 'wasted'),
    reason TEXT CHECK ((state = 'wasted') = (reason IS NOT NULL)),
    stored_at REAL NOT NULL,
    -- NULL if the body is a file, or no longer needed.
    body BLOB CHECK (state = 'kept' OR body IS NULL)
);
CREATE UNIQUE INDEX partials_kept ON partials (task) WHERE state = 'kept';
CREATE INDEX partials_by_task ON partials (task);

CREATE TABLE segments (
    task INTEGER NOT NULL,
    trajectory_index INTEGER NOT NULL,
    start INTEGER NOT NULL,
    num_tokens INTEGER NOT NULL CHECK (num_tokens >= 1),
    version INTEGER REFERENCES versions (number),
    -- Worker that handed it in first; a continued trajectory has several.
    worker TEXT NOT NULL,
    -- Tokens that an audit compared with the weights of their version, and how many of them are off.
    num_compared INTEGER NOT NULL DEFAULT 0 CHECK (num_compared BETWEEN 0 AND num_tokens),
    num_off INTEGER NOT NULL DEFAULT 0 CHECK (num_off BETWEEN 0 AND num_compared),
    PRIMARY KEY (task, trajectory_index, start),
    FOREIGN KEY (task, trajectory_index) REFERENCES trajectories (task, trajectory_index)
) WITHOUT ROWID;
CREATE INDEX segments_compared ON segments (worker, task, start, num_compared, num_off) WHERE num_compared > 0;

CREATE TABLE rewards (
    seq INTEGER PRIMARY KEY,
    task INTEGER NOT NULL UNIQUE REFERENCES tasks (id),
    value REAL,
    parts TEXT,
    error TEXT CHECK ((error IS NULL) = (value IS NOT NULL)),
    -- Digest of the columns above, to detect a changed value.
    digest BLOB NOT NULL,
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
    joined_at REAL NOT NULL
) WITHOUT ROWID;

-- Trainers in order of their begin; only the last may change what is trained.
CREATE TABLE trainers (
    generation INTEGER PRIMARY KEY,
    name TEXT NOT NULL,
    host TEXT NOT NULL,
    -- Identity of the folder of its checkpoints.
    home TEXT NOT NULL,
    began_at REAL NOT NULL,
    -- Step of its latest durable checkpoint; none before the first.
    checkpoint_step INTEGER
);

-- Failed attempts. Those of a worker that was set aside do not count.
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

-- Workers that got no tasks for a while because they failed too many, whether they joined or not.
CREATE TABLE set_aside (
    seq INTEGER PRIMARY KEY,
    worker TEXT NOT NULL,
    why TEXT NOT NULL,
    since REAL NOT NULL,
    until REAL NOT NULL
);

-- Public keys of the trainers that sign manifests.
CREATE TABLE signers (key TEXT PRIMARY KEY, worker TEXT NOT NULL, added_at REAL NOT NULL) WITHOUT ROWID;

-- Tokens expire by the wall clock, because another process may redeem them.
CREATE TABLE join_tokens (
    hash BLOB PRIMARY KEY,
    role TEXT NOT NULL CHECK (role IN ('rollout', 'reward', 'trainer')),
    issued_at REAL NOT NULL,
    expires_at REAL NOT NULL,
    used_by TEXT REFERENCES workers (name),
    used_at REAL
) WITHOUT ROWID;
"""
