"""Who may take part: join tokens, workers and their secrets.

A join token is issued to a person, lives a short time and is exchanged once for a worker's name. The worker draws its
secret itself and tells its hash alone. Tokens and secrets are 256 random bits and are kept as hashes: whoever reads the
file cannot speak for anyone. The exchange is one transaction, so that a token used twice, in however many processes,
makes exactly one worker; used again with the hash of the same secret it names that worker, so that one whose answer was
lost can ask again.

Every move of a worker from one state to another is counted, so that whoever remembers workers sees at a glance, in
whichever process it was made, that there was one.
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

from offbeat.control.trust import WINDOW, Compared
from offbeat.errors import UserError
from offbeat.ledger.database import Database, array
from offbeat.ledger.errors import Forbidden, Unknown

SECRET_BYTES = 32
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
"""It stands in logs, metrics and file names as it is."""
COLUMNS = "name, role, state, reason, capabilities, joined_at"
MAX_MINUTES = 7 * 24 * 60
"""A token that lies about for longer than a week is a password."""


class Role(StrEnum):
    """What a worker may ask for."""

    ROLLOUT = "rollout"
    REWARD = "reward"
    TRAINER = "trainer"


class WorkerState(StrEnum):
    """Where a worker stands."""

    ACTIVE = "active"
    LEFT = "left"
    """It said goodbye; it may come back with its secret."""
    QUARANTINED = "quarantined"
    """It is known and heard no more: what it sends could not be believed."""
    REVOKED = "revoked"
    """Its secret is worth nothing, for ever."""


ACTIVE, LEFT, QUARANTINED, REVOKED = WorkerState
MOVES = {
    ACTIVE: {LEFT, QUARANTINED, REVOKED},
    LEFT: {ACTIVE, QUARANTINED, REVOKED},
    QUARANTINED: {ACTIVE, REVOKED},
    REVOKED: set[WorkerState](),
}
"""QUARANTINED -> LEFT is missing on purpose: leaving and coming back must not make a worker believable."""


@dataclass(frozen=True)
class Worker:
    name: str
    role: Role
    state: WorkerState
    reason: str | None = None
    capabilities: Mapping[str, Any] = field(default_factory=dict)
    joined_at: float = 0.0
    num_compared: int = 0
    """Tokens of it that audits compared with the weights of their own version; counted where workers are listed."""
    num_off: int = 0
    """Those whose log-probs are not those of these weights."""
    num_leased: int = 0
    """Counted where workers are listed."""


@dataclass(frozen=True)
class Joined:
    """Who a worker is."""

    name: str
    role: Role


def issue_token(db: Database, role: Role, minutes: float) -> str:
    if not 0 < minutes <= MAX_MINUTES:
        raise UserError(f"minutes = {minutes:g}: a join token lives more than 0 and at most {MAX_MINUTES} minutes")
    token, now = secrets.token_urlsafe(SECRET_BYTES), db.wall_clock()
    db.execute(
        "INSERT INTO join_tokens (hash, role, issued_at, expires_at) VALUES (?, ?, ?, ?)",
        (secret_hash(token), role.value, now, now + 60 * minutes),
    )
    return token


def new_secret() -> str:
    """A secret for a worker that is about to join."""
    return secrets.token_urlsafe(SECRET_BYTES)


def is_token(db: Database, token: str) -> bool:
    """Whether a token was ever issued."""
    return bool(
        db.execute("SELECT EXISTS (SELECT 1 FROM join_tokens WHERE hash = ?)", (secret_hash(token),)).fetchone()[0]
    )


def redeem(db: Database, token: str, wanted_name: str, capabilities: Mapping[str, Any], hashed_secret: bytes) -> Joined:
    """Makes a worker of a token, or finds the one that was made of both; `Forbidden` says why there will be none."""
    found = db.execute(
        "SELECT role, expires_at, used_by FROM join_tokens WHERE hash = ?", (secret_hash(token),)
    ).fetchone()
    if found is None:
        raise Forbidden("join token: never issued for this run")
    role, expires_at, used_by = found
    owner = db.execute("SELECT name FROM workers WHERE secret_hash = ?", (hashed_secret,)).fetchone()
    if used_by is not None:
        if owner == (used_by,):
            return Joined(name=used_by, role=Role(role))
        raise Forbidden(f"join token: already used, by {used_by}")
    if owner is not None:
        raise Forbidden(f"secret: already that of {owner[0]}; draw a new one")
    now = db.wall_clock()
    if now >= expires_at:
        raise Forbidden("join token: expired")
    name = _free_name(db, wanted_name)
    db.execute(
        "INSERT INTO workers (name, role, secret_hash, state, capabilities, joined_at) VALUES (?, ?, ?, ?, ?, ?)",
        (name, role, hashed_secret, ACTIVE.value, json.dumps(dict(capabilities)), now),
    )
    db.execute("UPDATE join_tokens SET used_by = ?, used_at = ? WHERE hash = ?", (name, now, secret_hash(token)))
    return Joined(name=name, role=Role(role))


def find(db: Database, secret: str) -> Worker | None:
    """The worker that a secret belongs to, whatever its state; None where it is nobody's."""
    hashed = secret_hash(secret)
    row = db.execute(f"SELECT secret_hash, {COLUMNS} FROM workers WHERE secret_hash = ?", (hashed,)).fetchone()
    if row is None or not hmac.compare_digest(row[0], hashed):
        return None
    return _worker(row[1:])


def listed(db: Database) -> list[Worker]:
    """All workers, in the order in which they joined."""
    leased, compared = num_leased(db), num_compared(db)
    rows = db.execute(f"SELECT {COLUMNS} FROM workers ORDER BY joined_at, name")
    return [_worker(row, leased.get(row[0], 0), compared.get(row[0], (0, 0))) for row in rows]


def num_leased(db: Database) -> dict[str, int]:
    """How many tasks each worker holds."""
    return dict(db.execute("SELECT worker, count(*) FROM tasks WHERE state = 'leased' GROUP BY worker"))


def num_compared(db: Database) -> dict[str, tuple[int, int]]:
    """By worker: tokens that audits compared, and those that are off."""
    query = """SELECT worker, SUM(num_compared), SUM(num_off) FROM segments INDEXED BY segments_compared
               WHERE num_compared > 0 GROUP BY worker"""
    return {worker: (compared, off) for worker, compared, off in db.execute(query)}


def audited(db: Database, tasks: Sequence[int]) -> dict[str, list[Compared]]:
    """What speaks for and against the workers that handed in a segment of these tasks and may come back: the latest
    segments of each that were compared, in the order of their tasks."""
    query = """SELECT DISTINCT s.worker FROM segments s JOIN workers w ON w.name = s.worker
               WHERE s.task IN (SELECT value FROM json_each(?)) AND s.num_compared > 0
               AND w.state IN ('active', 'left')"""
    names = [name for (name,) in db.execute(query, (array(tasks),))]
    query = """SELECT num_compared, num_off FROM segments INDEXED BY segments_compared
               WHERE worker = ? AND num_compared > 0 ORDER BY task DESC, start DESC LIMIT ?"""
    return {name: [Compared(*row) for row in db.execute(query, (name, WINDOW))][::-1] for name in names}


def set_aside(db: Database, worker: str, why: str, seconds: float) -> None:
    """Takes down that a worker is given nothing for a while; leases are the coordinator's affair."""
    now = db.wall_clock()
    query = "INSERT INTO set_aside (worker, why, since, until) VALUES (?, ?, ?, ?)"
    db.execute(query, (worker, why, now, now + seconds))


def move(db: Database, name: str, state: WorkerState, reason: str | None = None) -> WorkerState:
    """Brings a worker to a state if it may go there from its own; returns the state that it is in then."""
    found = db.execute("SELECT state FROM workers WHERE name = ?", (name,)).fetchone()
    if found is None:
        raise Unknown(f"worker {name}: never joined")
    now = WorkerState(found[0])
    if state not in MOVES[now]:
        return now
    db.execute("UPDATE workers SET state = ?, reason = ? WHERE name = ?", (state.value, reason, name))
    db.execute(
        "INSERT INTO meta VALUES ('worker_moves', '1') "
        "ON CONFLICT (key) DO UPDATE SET value = CAST(value AS INTEGER) + 1"
    )
    return state


def num_moves(db: Database) -> int:
    """How often any worker's state has changed."""
    found = db.execute("SELECT value FROM meta WHERE key = 'worker_moves'").fetchone()
    return 0 if found is None else int(found[0])


def add_signer(db: Database, key: str, worker: str) -> None:
    """A trainer names the key with which it signs; told twice, it changes nothing."""
    db.execute("INSERT OR IGNORE INTO signers VALUES (?, ?, ?)", (key, worker, db.wall_clock()))


def signers(db: Database) -> list[str]:
    """The keys of all trainers that ever took part and were not revoked since, the latest first."""
    query = """SELECT s.key FROM signers s LEFT JOIN workers w ON w.name = s.worker
               WHERE w.state IS NULL OR w.state <> 'revoked' ORDER BY s.added_at DESC, s.key"""
    return [key for (key,) in db.execute(query)]


def active(db: Database) -> set[str]:
    """The names of those who take part now: neither gone nor set aside."""
    return {name for (name,) in db.execute("SELECT name FROM workers WHERE state = ?", (ACTIVE.value,))}


def _worker(row: tuple[Any, ...], num_leased: int = 0, compared: tuple[int, int] = (0, 0)) -> Worker:
    name, role, state, reason, capabilities, joined_at = row
    return Worker(
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
    """`wanted`, or with the first free number behind it. A name that was given a task is taken, also where it belongs
    to an engine beside the coordinator that never joined: tasks are known by their worker's name."""
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
    """What is kept, and told, of a secret or a token."""
    return blake3(secret.encode()).digest()
