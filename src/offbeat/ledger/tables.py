"""The ledger's tables and indices: what is where, and which rules SQLite itself holds."""

from __future__ import annotations

SCHEMA = 6
"""Grows with every change of what follows; a file of another one is refused."""

TABLES = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;

CREATE TABLE versions (
    number INTEGER PRIMARY KEY,
    step INTEGER NOT NULL CHECK (step >= 0),
    parent INTEGER REFERENCES versions (number) CHECK (parent < number),
    digest TEXT NOT NULL,
    path TEXT NOT NULL,
    -- The digest of its manifest; empty where it was published as whole files.
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
    -- Without one while the step is claimed ahead of its version.
    from_version INTEGER REFERENCES versions (number) CHECK (state <> 'trained' OR from_version IS NOT NULL),
    to_version INTEGER REFERENCES versions (number),
    num_trained_tokens INTEGER NOT NULL,
    num_stale_tokens INTEGER NOT NULL,
    num_abandoned_tokens INTEGER NOT NULL,
    num_audit_tokens INTEGER NOT NULL DEFAULT 0,
    max_staleness INTEGER NOT NULL,
    -- The reward stored last when it was claimed: later ones are not known to it, however often it is loaded.
    last_reward INTEGER NOT NULL,
    claimed_at REAL NOT NULL,
    trained_at REAL
);
CREATE UNIQUE INDEX batches_by_step ON batches (step) WHERE state <> 'undone';

-- The num_ columns sum up a group's tasks, so that no decision and no count has to read them all. States that often
-- change are checked one by one: SQLite makes a table of a longer IN, at every statement anew.
CREATE TABLE groups (
    id INTEGER PRIMARY KEY,
    purpose TEXT NOT NULL CHECK (purpose IN ('train', 'eval')),
    eval INTEGER REFERENCES evals (id) CHECK ((purpose = 'eval') = (eval IS NOT NULL)),
    ordinal INTEGER NOT NULL,
    retry INTEGER NOT NULL,
    reissue_of INTEGER REFERENCES groups (id),
    source TEXT NOT NULL,
    source_ordinal INTEGER NOT NULL,
    -- Which of its prompt's groups it is, where a prompt is drawn as several groups.
    sibling INTEGER NOT NULL CHECK (sibling >= 0),
    seed INTEGER NOT NULL,
    size INTEGER NOT NULL CHECK (size >= 1),
    require_step INTEGER,
    require_version INTEGER REFERENCES versions (number),
    -- Of the oldest version that a member was begun with; none before the first lease.
    first_step INTEGER,
    state TEXT NOT NULL CHECK (
        state = 'open' OR state = 'ready' OR state = 'claimed' OR state = 'trained' OR state = 'evaluated'
        OR state = 'dropped'
    ),
    reason TEXT CHECK ((state = 'dropped') = (reason IS NOT NULL)),
    -- The first step without a batch, when it was dropped for want of a signal.
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
-- Groups as decisions and counts ask for them, without a look at their rows, which hold prompts. What a submission
-- changes stands in none of these while its group is open: an index that it touched would be one more page to write.
-- With open tasks, in the order in which those are handed out (`OpenGroup.order`).
CREATE INDEX groups_open ON groups (purpose <> 'eval', num_open = size, ordinal, id, purpose, size, num_open,
                                    require_step, require_version, first_step, state)
    WHERE state = 'open' AND num_open > 0;
-- Not trained yet, in the order in which they are where age decides.
CREATE INDEX groups_alive ON groups (state, purpose, first_step, ordinal, require_step)
    WHERE state = 'open' OR state = 'ready' OR state = 'claimed';
-- Not open any more, with their sums.
CREATE INDEX groups_closed ON groups (state, purpose, reason, num_trajectories, num_scored, num_sampled_tokens)
    WHERE state <> 'open';
-- Over, but with the bytes of their trajectories.
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
CREATE INDEX tasks_leased ON tasks (worker, num_losses, state) WHERE state = 'leased';
CREATE INDEX tasks_lost ON tasks (group_id, num_losses) WHERE state = 'open' AND num_losses > 0;
CREATE INDEX tasks_failed ON tasks (reason) WHERE state = 'failed';
-- Open again because the worker that held it last failed it.
CREATE INDEX tasks_to_retry ON tasks (worker, group_id) WHERE state = 'open' AND fence > 0 AND failed_fence = fence;

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

CREATE INDEX trajectories_in_files ON trajectories (digest) WHERE body IS NULL AND pruned = 0;

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
    state TEXT NOT NULL CHECK (state = 'kept' OR state = 'continued' OR state = 'wasted'),
    reason TEXT CHECK ((state = 'wasted') = (reason IS NOT NULL)),
    stored_at REAL NOT NULL,
    -- None where the body is a file, or nobody needs it any more.
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
    -- Who handed it in first: a trajectory that was carried on has several.
    worker TEXT NOT NULL,
    -- Tokens that an audit compared with the weights of their own version, and those that are off.
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
    -- Of the columns above, so that a value that was changed since is noticed.
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

-- Trainers that began, in order; the last of them alone may change what is trained.
CREATE TABLE trainers (
    generation INTEGER PRIMARY KEY,
    name TEXT NOT NULL,
    host TEXT NOT NULL,
    -- Which folder its checkpoints are in.
    home TEXT NOT NULL,
    began_at REAL NOT NULL,
    -- Of its latest durable checkpoint; none before the first.
    checkpoint_step INTEGER
);

-- Attempts that failed, whoever made them. Those of a worker that was set aside count against no task.
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

-- Workers that were given nothing for a while because they failed what they were given, whether they joined or not.
CREATE TABLE set_aside (
    seq INTEGER PRIMARY KEY,
    worker TEXT NOT NULL,
    why TEXT NOT NULL,
    since REAL NOT NULL,
    until REAL NOT NULL
);

-- Public keys of the trainers that sign manifests.
CREATE TABLE signers (key TEXT PRIMARY KEY, worker TEXT NOT NULL, added_at REAL NOT NULL) WITHOUT ROWID;

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
