"""What a run's ledger tells a person: who made what, how fast, how stale it was trained, and what is waited for.

Reads only. Every figure is a sum over the tables as they stand, so it may be asked while the run goes on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from offbeat.ledger import counts, versions
from offbeat.ledger.records import Counts
from offbeat.ledger.schema import Database


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

    @property
    def tokens_per_second(self) -> float | None:
        """None where there is too little to tell."""
        return self.num_tokens / self.seconds if self.seconds > 0 else None


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
        )


def _tasks(db: Database) -> dict[str, int]:
    query = """SELECT t.state, COUNT(*) FROM tasks t JOIN groups g ON g.id = t.group_id
               WHERE g.purpose = 'train' GROUP BY t.state ORDER BY t.state"""
    return dict(db.execute(query))


def _producers(db: Database) -> tuple[Producer, ...]:
    leased = dict(db.execute("SELECT worker, COUNT(*) FROM tasks WHERE state = 'leased' GROUP BY worker"))
    query = """SELECT worker, COUNT(*), SUM(num_sampled_tokens), MAX(accepted_at) - MIN(accepted_at)
               FROM trajectories GROUP BY worker"""
    made = {worker: (num, tokens, seconds) for worker, num, tokens, seconds in db.execute(query)}
    producers = []
    for worker in sorted(set(made) | set(leased)):
        num_trajectories, num_tokens, seconds = made.get(worker, (0, 0, 0.0))
        producers.append(Producer(worker, num_trajectories, num_tokens, seconds, leased.get(worker, 0)))
    return tuple(producers)


def _staleness(db: Database) -> dict[int, int]:
    """Only what was trained: tokens above the bound, and of abandoned versions, were masked."""
    query = """SELECT b.step - v.step AS age, SUM(s.num_tokens)
               FROM batches b JOIN batch_members m ON m.batch = b.id
               JOIN segments s ON s.task = m.task JOIN versions v ON v.number = s.version
               WHERE b.state = 'trained' AND m.num_trained_tokens > 0 AND v.abandoned = 0
               AND b.step - v.step BETWEEN 0 AND b.bound
               GROUP BY age ORDER BY age"""
    return dict(db.execute(query))
