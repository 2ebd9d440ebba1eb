"""Join tokens, workers and their secrets.

A join token is issued to a person, expires soon, and makes one worker with a name of its own; a fleet token makes as
many workers as it was issued for. Here, trainers and remote judges (which compute rewards) are workers, too. The worker
draws its own secret and sends only the secret's hash.
Tokens and secrets are 256 random bits, stored as hashes, so that someone who reads the file cannot impersonate a
worker. Joining is one transaction, so that a token makes at most one worker even if several processes use it. Using the
token again with the same secret returns the same worker, so that a worker can repeat a request whose response was lost.

Every change of a worker's state is counted, so that a process that caches workers notices changes by other processes.
"""

from __future__ import annotations

import hmac
import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from blake3 import blake3

from offbeat.errors import UserError
from offbeat.ledger.database import Database, array, transactional
from offbeat.ledger.errors import Forbidden, Unknown
from offbeat.rules.quarantine import AUDIT_WINDOW, Compared, is_proven

SECRET_BYTES = 32
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
"""Allowed names of workers: they are used verbatim in logs, metrics and file names."""
COLUMNS = "name, role, state, reason, capabilities, joined_at"
PRESENT_S = 15.0
"""A worker counts as present until it has made no call for this many seconds, or for the lease time if that is longer.
Even a worker with nothing to do asks for work every few seconds. Only a trainer may be silent for as long as a step
takes."""
SERVED_WITHIN_S = 60.0
"""Seconds for which a coordinator counts as running after it last recorded which workers had called (`note_seen`)."""
SEEN, COORDINATOR = "worker_seen", ""
"""Key in `meta` of a map from each worker's name to the wall time of its latest call; and the name in this map that
stands for the coordinator."""
MAX_MINUTES = 7 * 24 * 60
"""Longest validity of a join token, one week; a longer-lived token would be a password."""
MAX_USES = 1000
"""Most workers that one fleet token lets in."""


class Role(StrEnum):
    """Role in which a worker joins."""

    ROLLOUT = "rollout"
    REWARD = "reward"
    TRAINER = "trainer"


class WorkerState(StrEnum):
    """State of a worker."""

    ACTIVE = "active"
    LEFT = "left"
    """It left the run; it may return with its secret."""
    QUARANTINED = "quarantined"
    """Its calls are refused, because its results could not be trusted."""
    REVOKED = "revoked"
    """Its secret is invalid forever."""


ACTIVE, LEFT, QUARANTINED, REVOKED = WorkerState
MOVES = {
    ACTIVE: {LEFT, QUARANTINED, REVOKED},
    LEFT: {ACTIVE, QUARANTINED, REVOKED},
    QUARANTINED: {ACTIVE, REVOKED},
    REVOKED: set[WorkerState](),
}
"""Allowed changes of state. QUARANTINED to LEFT is missing on purpose: leaving and returning must not restore trust."""


@dataclass(frozen=True)
class WorkerRecord:
    name: str
    role: Role
    state: WorkerState
    reason: str | None = None
    capabilities: Mapping[str, Any] = field(default_factory=dict)
    joined_at: float = 0.0
    num_compared: int = 0
    """Number of its tokens whose log-probs an audit recomputed; set by `list_workers` only."""
    num_off: int = 0
    """Number of compared tokens whose recomputed log-prob differs too much from the worker's; set by `list_workers`
    only."""
    num_leased: int = 0
    """Number of tasks that it holds; set by `list_workers` only."""
    last_seen_at: float | None = None
    """Wall time of its latest known call; calls of the last few seconds may be missing. Set by `list_workers` only.
    None: not known."""
    is_away: bool = False
    """Whether its state is active, although it is no longer present (see `PRESENT_S`; trainers are exempt) or the
    coordinator no longer runs; set by `list_workers` only."""


@dataclass(frozen=True)
class JoinedWorker:
    """Name and role of a worker that joined."""

    name: str
    role: Role


class Workers(Database):
    @transactional
    def issue_token(self, role: Role, minutes: float, uses: int = 1) -> str:
        """Returns a new token with which `uses` workers may join within `minutes`; stores only hashes, one for each
        use."""
        if not 0 < minutes <= MAX_MINUTES:
            raise UserError(
                f"minutes is {minutes:g}; a join token is valid for more than 0 and at most {MAX_MINUTES} minutes"
            )
        if not 1 <= uses <= MAX_USES:
            raise UserError(f"uses is {uses}; a join token lets in at least 1 and at most {MAX_USES} workers")
        token, now = secrets.token_urlsafe(SECRET_BYTES), self.wall_clock()
        for use in range(uses):
            self.execute(
                "INSERT INTO join_tokens (hash, role, issued_at, expires_at) VALUES (?, ?, ?, ?)",
                (_use_hash(token, use), role.value, now, now + 60 * minutes),
            )
        return token

    def is_token(self, token: str) -> bool:
        """Whether this join token was ever issued, even if it is used or expired."""
        query = "SELECT EXISTS (SELECT 1 FROM join_tokens WHERE hash = ?)"
        return bool(self.execute(query, (secret_hash(token),)).fetchone()[0])

    @transactional
    def redeem(self, token: str, name: str, capabilities: Mapping[str, Any], hashed_secret: bytes) -> JoinedWorker:
        """Creates the worker that joins with `token`, named `name`, or `name-2` and so on if taken. A repeated call
        with the same secret returns the same worker. Raises `Forbidden` if token or secret cannot be used."""
        owner = self.execute("SELECT name FROM workers WHERE secret_hash = ?", (hashed_secret,)).fetchone()
        users, row, hashed_use = list[str](), self._use(token, 0), b""
        while row is not None:
            role, expires_at, used_by = row
            hashed_use = _use_hash(token, len(users))
            if used_by is None:
                break
            if owner == (used_by,):
                return JoinedWorker(name=used_by, role=Role(role))
            users.append(used_by)
            row = self._use(token, len(users))
        else:
            if not users:
                raise Forbidden("this join token was never issued for this run")
            if len(users) == 1:
                raise Forbidden(f"this join token was already used by worker {users[0]}")
            raise Forbidden(f"this join token was for {len(users)} workers, and all of them have joined")
        if owner is not None:
            raise Forbidden(f"this secret already belongs to worker {owner[0]}; join with a newly drawn secret")
        now = self.wall_clock()
        if now >= expires_at:
            raise Forbidden("this join token has expired")
        name = _free_name(self, name)
        self.execute(
            "INSERT INTO workers (name, role, secret_hash, state, capabilities, joined_at) VALUES (?, ?, ?, ?, ?, ?)",
            (name, role, hashed_secret, ACTIVE.value, json.dumps(dict(capabilities)), now),
        )
        self.execute("UPDATE join_tokens SET used_by = ?, used_at = ? WHERE hash = ?", (name, now, hashed_use))
        return JoinedWorker(name=name, role=Role(role))

    def _use(self, token: str, use: int) -> tuple[str, float, str | None] | None:
        """Returns role, time of expiry and user of one use of a token; None: it was issued for fewer uses."""
        query = "SELECT role, expires_at, used_by FROM join_tokens WHERE hash = ?"
        return self.execute(query, (_use_hash(token, use),)).fetchone()

    def worker_by_secret(self, secret: str) -> WorkerRecord | None:
        """Returns the worker, in any state, to which a secret belongs; None if the secret is unknown."""
        hashed = secret_hash(secret)
        row = self.execute(f"SELECT secret_hash, {COLUMNS} FROM workers WHERE secret_hash = ?", (hashed,)).fetchone()
        if row is None or not hmac.compare_digest(row[0], hashed):
            return None
        return _worker(row[1:])

    def num_worker_moves(self) -> int:
        """Returns how often workers' states have changed, so that a process that caches workers notices a change."""
        found = self.execute("SELECT value FROM meta WHERE key = 'worker_moves'").fetchone()
        return 0 if found is None else int(found[0])

    @transactional
    def move_worker(self, name: str, state: WorkerState, reason: str | None = None) -> WorkerState:
        """Changes a worker's state to `state` if `MOVES` allows it; returns the resulting state."""
        found = self.execute("SELECT state FROM workers WHERE name = ?", (name,)).fetchone()
        if found is None:
            raise Unknown(f"worker {name} has never joined this run")
        now = WorkerState(found[0])
        if state not in MOVES[now]:
            return now
        self.execute("UPDATE workers SET state = ?, reason = ? WHERE name = ?", (state.value, reason, name))
        self.execute(
            "INSERT INTO meta VALUES ('worker_moves', '1') "
            "ON CONFLICT (key) DO UPDATE SET value = CAST(value AS INTEGER) + 1"
        )
        return state

    @transactional
    def add_signer(self, key: str, worker: str) -> None:
        """Records the public key with which a trainer signs manifests; a repeated call changes nothing."""
        self.execute("INSERT OR IGNORE INTO signers VALUES (?, ?, ?)", (key, worker, self.wall_clock()))

    def signers(self) -> list[str]:
        """Returns the public keys of all trainers that were not revoked, latest first."""
        query = """SELECT s.key FROM signers s LEFT JOIN workers w ON w.name = s.worker
                   WHERE w.state IS NULL OR w.state <> 'revoked' ORDER BY s.added_at DESC, s.key"""
        return [key for (key,) in self.execute(query)]

    def active_workers(self) -> set[str]:
        """Returns the names of the active workers."""
        return {name for (name,) in self.execute("SELECT name FROM workers WHERE state = ?", (ACTIVE.value,))}

    def refused_workers(self) -> set[str]:
        """Returns the names of the workers whose calls are refused: revoked or quarantined ones."""
        query = "SELECT name FROM workers WHERE state IN (?, ?)"
        return {name for (name,) in self.execute(query, (REVOKED.value, QUARANTINED.value))}

    def list_workers(self, lease_s: float = PRESENT_S) -> list[WorkerRecord]:
        """Returns all workers that ever joined, in the order in which they joined. `lease_s` is the lease time."""
        leased, compared, seen = self.num_leased(), num_compared(self), self._seen()
        rows = self.execute(f"SELECT {COLUMNS} FROM workers ORDER BY joined_at, name")
        found = [_worker(row, leased.get(row[0], 0), compared.get(row[0], (0, 0))) for row in rows]
        now = self.wall_clock()
        noted_at = seen.get(COORDINATOR, now)  # later calls are not in `seen`
        is_served = now - noted_at <= SERVED_WITHIN_S
        since = noted_at - max(lease_s, PRESENT_S)
        listed = []
        for worker in found:
            seen_at = seen.get(worker.name)
            is_silent = worker.role is not Role.TRAINER and (seen_at or worker.joined_at) < since
            is_away = worker.state is ACTIVE and (is_silent or not is_served)
            listed.append(replace(worker, last_seen_at=seen_at, is_away=is_away))
        return listed

    @transactional
    def note_seen(self, seen: Mapping[str, float], *, is_last: bool = False) -> None:
        """Records the wall times at which workers called last, and that the coordinator is running now; with `is_last`,
        that it no longer runs."""
        known = {**self._seen(), **seen, COORDINATOR: 0.0 if is_last else self.wall_clock()}
        self.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (SEEN, json.dumps(known)))

    def _seen(self) -> dict[str, float]:
        found = self.execute("SELECT value FROM meta WHERE key = ?", (SEEN,)).fetchone()
        return {} if found is None else json.loads(found[0])

    def audit_results(self, tasks: Sequence[int]) -> dict[str, list[Compared]]:
        """Returns the latest audit results, oldest first, of each worker that submitted an audited segment of `tasks`.
        Leaves out workers that are quarantined or revoked."""
        query = """SELECT DISTINCT s.worker FROM segments s JOIN workers w ON w.name = s.worker
                   WHERE s.task IN (SELECT value FROM json_each(?)) AND s.num_compared > 0
                   AND w.state IN ('active', 'left')"""
        return {name: _latest_compared(self, name) for (name,) in self.execute(query, (array(tasks),))}

    def num_leased(self) -> dict[str, int]:
        """Returns the number of tasks that each worker holds, including in-process workers that never joined."""
        return dict(self.execute("SELECT worker, count(*) FROM tasks WHERE state = 'leased' GROUP BY worker"))


def new_secret() -> str:
    """Returns a random secret for a worker that is about to join."""
    return secrets.token_urlsafe(SECRET_BYTES)


def _use_hash(token: str, use: int) -> bytes:
    """Returns the hash that stands for one use of a token; the first is the hash of the token itself."""
    return secret_hash(f"{token} {use}" if use else token)


def unproven_tasks(db: Database, batch: int) -> set[int]:
    """Returns the tasks of a batch that have tokens of a worker not yet proven honest by audits."""
    query = """SELECT s.worker, s.task FROM batch_members m CROSS JOIN segments s ON s.task = m.task
               WHERE m.batch = ? AND s.version IS NOT NULL"""
    tasks: dict[str, list[int]] = {}
    for worker, task in db.execute(query, (batch,)).fetchall():
        tasks.setdefault(worker, []).append(task)
    return {task for worker in tasks if not is_proven(_latest_compared(db, worker)) for task in tasks[worker]}


def _latest_compared(db: Database, worker: str) -> list[Compared]:
    """Returns the latest `AUDIT_WINDOW` audit results of a worker, oldest first."""
    query = """SELECT num_compared, num_off FROM segments INDEXED BY segments_compared
               WHERE worker = ? AND num_compared > 0 ORDER BY task DESC, start DESC LIMIT ?"""
    return [Compared(*row) for row in db.execute(query, (worker, AUDIT_WINDOW))][::-1]


def num_compared(db: Database) -> dict[str, tuple[int, int]]:
    """Returns two numbers by worker: how many of its tokens' log-probs were recomputed by audits, and how many of the
    recomputed ones differ too much."""
    query = """SELECT worker, SUM(num_compared), SUM(num_off) FROM segments INDEXED BY segments_compared
               WHERE num_compared > 0 GROUP BY worker"""
    return {worker: (compared, off) for worker, compared, off in db.execute(query)}


def _worker(row: tuple[Any, ...], num_leased: int = 0, compared: tuple[int, int] = (0, 0)) -> WorkerRecord:
    name, role, state, reason, capabilities, joined_at = row
    return WorkerRecord(
        name=name,
        role=Role(role),
        state=WorkerState(state),
        reason=reason,
        capabilities=json.loads(capabilities),
        joined_at=joined_at,
        num_compared=compared[0],
        num_off=compared[1],
        num_leased=num_leased,
    )


def _free_name(db: Database, wanted: str) -> str:
    """Returns `wanted`, or the first free one of `wanted-2`, `wanted-3` and so on. The names of workers that ever held
    a task are taken, too: an in-process engine holds tasks without joining."""
    if NAME.fullmatch(wanted) is None:
        raise UserError(
            f"worker name {wanted!r}: use 1 to 63 letters, digits, '.', '_' and '-', with a letter or digit first"
        )
    query = """SELECT EXISTS (SELECT 1 FROM workers WHERE name = :name)
                      OR EXISTS (SELECT 1 FROM tasks WHERE worker = :name)"""
    name, number = wanted, 1
    while db.execute(query, {"name": name}).fetchone()[0]:
        number += 1
        name = f"{wanted}-{number}"
    return name


def secret_hash(secret: str) -> bytes:
    """Returns the hash of a secret or token, which is stored and sent in its place."""
    return blake3(secret.encode()).digest()
