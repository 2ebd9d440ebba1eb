"""Join tokens, workers and their secrets.

A join token is issued to a person, expires soon and is exchanged once for a worker's name. The worker draws its own
secret and sends only its hash. Tokens and secrets are 256 random bits, stored as hashes: the file lets no reader
impersonate a worker. The exchange is one transaction, so that a token used twice, by any number of processes, makes one
worker; used again with the hash of the same secret, it returns that worker, so that a lost response can be requested
again.

Every change of a worker's state is counted, so that a process that caches workers notices changes by other processes.
"""

from __future__ import annotations

import hmac
import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from blake3 import blake3

from offbeat.errors import UserError
from offbeat.ledger.database import Database, array, transactional
from offbeat.ledger.errors import Forbidden, Unknown
from offbeat.rules.quarantine import AUDIT_WINDOW, Compared, is_proven

SECRET_BYTES = 32
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
"""A name is used verbatim in logs, metrics and file names."""
COLUMNS = "name, role, state, reason, capabilities, joined_at"
MAX_MINUTES = 7 * 24 * 60
"""A token that is valid for more than a week is a password."""


class Role(StrEnum):
    """Role that a worker joins in."""

    ROLLOUT = "rollout"
    REWARD = "reward"
    TRAINER = "trainer"


class WorkerState(StrEnum):
    """Life of a worker."""

    ACTIVE = "active"
    LEFT = "left"
    """Signed off; it may return with its secret."""
    QUARANTINED = "quarantined"
    """Refused, because its results could not be trusted."""
    REVOKED = "revoked"
    """Its secret is invalid for ever."""


ACTIVE, LEFT, QUARANTINED, REVOKED = WorkerState
MOVES = {
    ACTIVE: {LEFT, QUARANTINED, REVOKED},
    LEFT: {ACTIVE, QUARANTINED, REVOKED},
    QUARANTINED: {ACTIVE, REVOKED},
    REVOKED: set[WorkerState](),
}
"""QUARANTINED -> LEFT is missing on purpose: leaving and returning must not restore trust."""


@dataclass(frozen=True)
class WorkerRecord:
    name: str
    role: Role
    state: WorkerState
    reason: str | None = None
    capabilities: Mapping[str, Any] = field(default_factory=dict)
    joined_at: float = 0.0
    num_compared: int = 0
    """Its tokens that audits compared with the weights of their version; set by `list_workers` only."""
    num_off: int = 0
    """Compared tokens with other log-probs than those weights give."""
    num_leased: int = 0
    """Tasks that it holds; set by `list_workers` only."""


@dataclass(frozen=True)
class JoinedWorker:
    """Name and role of a worker that joined."""

    name: str
    role: Role


class Workers(Database):
    @transactional
    def issue_token(self, role: Role, minutes: float) -> str:
        """Issues a token that one worker may join with, once, within `minutes`; only its hash is stored."""
        if not 0 < minutes <= MAX_MINUTES:
            raise UserError(f"minutes = {minutes:g}: a join token lives more than 0 and at most {MAX_MINUTES} minutes")
        token, now = secrets.token_urlsafe(SECRET_BYTES), self.wall_clock()
        self.execute(
            "INSERT INTO join_tokens (hash, role, issued_at, expires_at) VALUES (?, ?, ?, ?)",
            (secret_hash(token), role.value, now, now + 60 * minutes),
        )
        return token

    def is_token(self, token: str) -> bool:
        """Whether a join token was ever issued; it may be used up or expired."""
        return bool(
            self.execute("SELECT EXISTS (SELECT 1 FROM join_tokens WHERE hash = ?)", (secret_hash(token),)).fetchone()[
                0
            ]
        )

    @transactional
    def redeem(self, token: str, name: str, capabilities: Mapping[str, Any], hashed_secret: bytes) -> JoinedWorker:
        """Exchanges a join token for a worker named `name`, or with the next free number after it. Repeated with the
        same secret, it returns the same worker; otherwise `Forbidden` gives the reason."""
        found = self.execute(
            "SELECT role, expires_at, used_by FROM join_tokens WHERE hash = ?", (secret_hash(token),)
        ).fetchone()
        if found is None:
            raise Forbidden("join token: never issued for this run")
        role, expires_at, used_by = found
        owner = self.execute("SELECT name FROM workers WHERE secret_hash = ?", (hashed_secret,)).fetchone()
        if used_by is not None:
            if owner == (used_by,):
                return JoinedWorker(name=used_by, role=Role(role))
            raise Forbidden(f"join token: already used, by {used_by}")
        if owner is not None:
            raise Forbidden(f"secret: already that of {owner[0]}; draw a new one")
        now = self.wall_clock()
        if now >= expires_at:
            raise Forbidden("join token: expired")
        name = _free_name(self, name)
        self.execute(
            "INSERT INTO workers (name, role, secret_hash, state, capabilities, joined_at) VALUES (?, ?, ?, ?, ?, ?)",
            (name, role, hashed_secret, ACTIVE.value, json.dumps(dict(capabilities)), now),
        )
        self.execute("UPDATE join_tokens SET used_by = ?, used_at = ? WHERE hash = ?", (name, now, secret_hash(token)))
        return JoinedWorker(name=name, role=Role(role))

    def worker_by_secret(self, secret: str) -> WorkerRecord | None:
        """Worker that a secret belongs to, in any state; None if there is none."""
        hashed = secret_hash(secret)
        row = self.execute(f"SELECT secret_hash, {COLUMNS} FROM workers WHERE secret_hash = ?", (hashed,)).fetchone()
        if row is None or not hmac.compare_digest(row[0], hashed):
            return None
        return _worker(row[1:])

    def num_worker_moves(self) -> int:
        """Number of changes of any worker's state, by any process."""
        found = self.execute("SELECT value FROM meta WHERE key = 'worker_moves'").fetchone()
        return 0 if found is None else int(found[0])

    @transactional
    def move_worker(self, name: str, state: WorkerState, reason: str | None = None) -> WorkerState:
        """Brings a worker to `state` if `MOVES` allows it; returns the state that it is in then."""
        found = self.execute("SELECT state FROM workers WHERE name = ?", (name,)).fetchone()
        if found is None:
            raise Unknown(f"worker {name}: never joined")
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
        """Keys of all trainers that were not revoked, the latest first."""
        query = """SELECT s.key FROM signers s LEFT JOIN workers w ON w.name = s.worker
                   WHERE w.state IS NULL OR w.state <> 'revoked' ORDER BY s.added_at DESC, s.key"""
        return [key for (key,) in self.execute(query)]

    def active_workers(self) -> set[str]:
        """Names of the active workers."""
        return {name for (name,) in self.execute("SELECT name FROM workers WHERE state = ?", (ACTIVE.value,))}

    def list_workers(self) -> list[WorkerRecord]:
        """All workers that ever joined, in order."""
        leased, compared = self.num_leased(), num_compared(self)
        rows = self.execute(f"SELECT {COLUMNS} FROM workers ORDER BY joined_at, name")
        return [_worker(row, leased.get(row[0], 0), compared.get(row[0], (0, 0))) for row in rows]

    def audit_results(self, tasks: Sequence[int]) -> dict[str, list[Compared]]:
        """Latest audit results, oldest first, of each worker that handed in a compared segment of these tasks and is
        neither quarantined nor revoked."""
        query = """SELECT DISTINCT s.worker FROM segments s JOIN workers w ON w.name = s.worker
                   WHERE s.task IN (SELECT value FROM json_each(?)) AND s.num_compared > 0
                   AND w.state IN ('active', 'left')"""
        return {name: _latest_compared(self, name) for (name,) in self.execute(query, (array(tasks),))}

    def num_leased(self) -> dict[str, int]:
        """Number of tasks that each worker holds, whether it joined or runs in process."""
        return dict(self.execute("SELECT worker, count(*) FROM tasks WHERE state = 'leased' GROUP BY worker"))


def new_secret() -> str:
    """Draws a secret for a worker that is about to join."""
    return secrets.token_urlsafe(SECRET_BYTES)


def unproven_tasks(db: Database, batch: int) -> set[int]:
    """Tasks of a batch with a segment of a worker that audits have not found honest so far."""
    query = """SELECT s.worker, s.task FROM batch_members m CROSS JOIN segments s ON s.task = m.task
               WHERE m.batch = ? AND s.version IS NOT NULL"""
    tasks: dict[str, list[int]] = {}
    for worker, task in db.execute(query, (batch,)).fetchall():
        tasks.setdefault(worker, []).append(task)
    return {task for worker in tasks if not is_proven(_latest_compared(db, worker)) for task in tasks[worker]}


def _latest_compared(db: Database, worker: str) -> list[Compared]:
    """Latest audit results of a worker, oldest first."""
    query = """SELECT num_compared, num_off FROM segments INDEXED BY segments_compared
               WHERE worker = ? AND num_compared > 0 ORDER BY task DESC, start DESC LIMIT ?"""
    return [Compared(*row) for row in db.execute(query, (worker, AUDIT_WINDOW))][::-1]


def num_compared(db: Database) -> dict[str, tuple[int, int]]:
    """Tokens of each worker that audits compared, and how many of them are off."""
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
    """`wanted`, or the first free name of the form `wanted-2`. A name that was ever given a task is taken, also by an
    in-process engine that never joined: tasks are stored with their worker's name."""
    if NAME.fullmatch(wanted) is None:
        raise UserError(f"worker name {wanted!r}: allowed are up to 63 letters, digits, '.', '_' and '-'")
    query = """SELECT EXISTS (SELECT 1 FROM workers WHERE name = :name)
                      OR EXISTS (SELECT 1 FROM tasks WHERE worker = :name)"""
    name, number = wanted, 1
    while db.execute(query, {"name": name}).fetchone()[0]:
        number += 1
        name = f"{wanted}-{number}"
    return name


def secret_hash(secret: str) -> bytes:
    """Hash under which a secret or a token is stored and sent."""
    return blake3(secret.encode()).digest()
