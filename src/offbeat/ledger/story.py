"""What a run's ledger tells a person: who made what, how fast, how stale it was trained, what is waited for and since
when, and what looks wrong: tasks that workers vanished with, workers that fail what they are given, tokens that an
audit found to be off, versions left behind.

Reads only. Every figure is a sum over the tables as they stand, so it may be asked while the run goes on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from offbeat.ledger import counts, versions, workers
from offbeat.ledger.database import Database
from offbeat.ledger.records import Counts

MAX_VERSIONS = 8


@dataclass(frozen=True)
class Producer:
    """One worker's part."""

    worker: str
    num_trajectories: int
    num_tokens: int
    """Sampled ones."""
    seconds: float
    """From its first trajectory to its last, by the clock for people."""
    num_leased: int
    num_partials: int = 0
    """Beginnings that it handed back."""
    num_failed: int = 0
    """Attempts of it that failed."""
    num_compared: int = 0
    """Tokens of it that audits compared with the weights of their own version."""
    num_off: int = 0
    """Those whose log-probs are not those of these weights."""

    @property
    def tokens_per_second(self) -> float | None:
        """None where there is too little to tell."""
        return self.num_tokens / self.seconds if self.seconds > 0 else None


@dataclass(frozen=True)
class OldestLease:
    task: int
    worker: str
    seconds: float
    """By the clock for people."""


@dataclass(frozen=True)
class VersionMade:
    """A version, and what was sampled from it in trajectories that were accepted."""

    number: int
    step: int
    is_abandoned: bool
    num_tokens: int


@dataclass(frozen=True)
class Story:
    counts: Counts
    step: int | None
    """Trained from next; None before the first version."""
    version: int | None
    tasks: Mapping[str, int] = field(default_factory=dict)
    """Training tasks by state."""
    producers: tuple[Producer, ...] = ()
    staleness: Mapping[int, int] = field(default_factory=dict)
    """Trained tokens by their staleness."""
    waits_for: str = ""
    oldest_lease: OldestLease | None = None
    num_partials: int = 0
    """Beginnings that wait to be carried on, or are."""
    suspects: Mapping[int, int] = field(default_factory=dict)
    """Unfinished tasks by how many workers vanished with them; without those that none did."""
    set_aside: Mapping[str, str] = field(default_factory=dict)
    """Workers that are given nothing for a while, and why."""
    num_abandoned_versions: int = 0
    versions: tuple[VersionMade, ...] = ()
    """The latest ones."""


def story(db: Database) -> Story:
    with db.snapshot():
        newest = versions.latest(db)
        return Story(
            counts=counts.counts(db),
            step=newest.step if newest else None,
            version=newest.number if newest else None,
            tasks=_tasks(db),
            producers=_producers(db),
            staleness=_staleness(db),
            waits_for=counts.waiting_for(db),
            oldest_lease=_oldest_lease(db),
            num_partials=_one(db, "SELECT COUNT(*) FROM partials WHERE state = 'kept'"),
            suspects=_suspects(db),
            set_aside=_set_aside(db),
            num_abandoned_versions=_one(db, "SELECT COUNT(*) FROM versions WHERE abandoned = 1"),
            versions=_versions(db),
        )


def _tasks(db: Database) -> dict[str, int]:
    query = """SELECT t.state, COUNT(*) FROM tasks t JOIN groups g ON g.id = t.group_id
               WHERE g.purpose = 'train' GROUP BY t.state ORDER BY t.state"""
    return dict(db.execute(query))


def _one(db: Database, query: str) -> int:
    return int(db.execute(query).fetchone()[0])


def _oldest_lease(db: Database) -> OldestLease | None:
    query = "SELECT id, worker, leased_at FROM tasks WHERE state = 'leased' ORDER BY leased_at, id LIMIT 1"
    row = db.execute(query).fetchone()
    return None if row is None else OldestLease(row[0], row[1], max(0.0, db.wall_clock() - row[2]))


def _suspects(db: Database) -> dict[int, int]:
    query = """SELECT num_losses, COUNT(*) FROM tasks WHERE num_losses > 0 AND state IN ('open', 'leased')
               GROUP BY num_losses ORDER BY num_losses"""
    return dict(db.execute(query))


def _set_aside(db: Database) -> dict[str, str]:
    query = "SELECT worker, why, until FROM set_aside WHERE until > ? ORDER BY seq"
    now = db.wall_clock()
    return {worker: f"for another {until - now:.0f} s, {why}" for worker, why, until in db.execute(query, (now,))}


def _versions(db: Database) -> tuple[VersionMade, ...]:
    query = "SELECT number, step, abandoned FROM versions ORDER BY number DESC LIMIT ?"
    latest = db.execute(query, (MAX_VERSIONS,)).fetchall()[::-1]
    query = "SELECT version, SUM(num_tokens) FROM segments WHERE version >= ? GROUP BY version"
    tokens = dict(db.execute(query, (latest[0][0],))) if latest else {}
    return tuple(VersionMade(number, step, bool(gone), tokens.get(number, 0)) for number, step, gone in latest)


def _producers(db: Database) -> tuple[Producer, ...]:
    leased = dict(db.execute("SELECT worker, COUNT(*) FROM tasks WHERE state = 'leased' GROUP BY worker"))
    partials = dict(db.execute("SELECT worker, COUNT(*) FROM partials GROUP BY worker"))
    failed = dict(db.execute("SELECT worker, COUNT(*) FROM failures GROUP BY worker"))
    compared = workers.num_compared(db)
    query = """SELECT worker, COUNT(*), SUM(num_sampled_tokens), MAX(accepted_at) - MIN(accepted_at)
               FROM trajectories GROUP BY worker"""
    made = {worker: (num, tokens, seconds) for worker, num, tokens, seconds in db.execute(query)}
    return tuple(
        Producer(
            worker,
            *made.get(worker, (0, 0, 0.0)),
            num_leased=leased.get(worker, 0),
            num_partials=partials.get(worker, 0),
            num_failed=failed.get(worker, 0),
            num_compared=compared.get(worker, (0, 0))[0],
            num_off=compared.get(worker, (0, 0))[1],
        )
        for worker in sorted({*made, *leased, *partials, *failed})
    )


def _staleness(db: Database) -> dict[int, int]:
    """Only what was trained: tokens above the bound, and of abandoned versions, were masked."""
    query = """SELECT b.step - v.step AS age, SUM(s.num_tokens)
               FROM batches b JOIN batch_members m ON m.batch = b.id
               JOIN segments s ON s.task = m.task JOIN versions v ON v.number = s.version
               WHERE b.state = 'trained' AND m.num_trained_tokens > 0 AND v.abandoned = 0
               AND b.step - v.step BETWEEN 0 AND b.bound
               GROUP BY age ORDER BY age"""
    return dict(db.execute(query))
