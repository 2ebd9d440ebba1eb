"""What a run's ledger says after an attack: whose tokens were trained, who was set aside, what honest workers got done.

A trajectory may have several authors: beginnings that one worker handed back are carried on by another, and stay as
they are. So each sampled token is the work of whoever handed in the first partial that holds it, or else of whoever
handed in the trajectory. What a segment says of its worker is not asked: that is the worker's own word.
"""

from __future__ import annotations

import sqlite3
from collections import defaultdict
from collections.abc import Collection, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from offbeat.ledger.ledger import Ledger

SET_ASIDE = ("quarantined", "revoked")


@dataclass(frozen=True)
class Trained:
    """Tokens with a part in some update."""

    num_tokens: int
    num_forged: int

    @property
    def forged_share(self) -> float:
        return self.num_forged / self.num_tokens if self.num_tokens else 0.0


@dataclass(frozen=True)
class Account:
    trained: Trained
    honest_tokens: int
    """Of honest workers, accepted within the window, and trained or still to be."""
    set_aside: dict[str, str]
    """Workers that are not heard any more, with the reason."""
    submissions: dict[str, int]
    """Answers and beginnings that were accepted, by worker."""
    violations: tuple[str, ...]
    num_steps: int
    """Trained within the window."""


def account(ledger: Path, honest: Collection[str], forgers: Collection[str], since: float, until: float) -> Account:
    """`since` and `until` are the window, by the clock of the ledger's rows; what is trained counts from then on."""
    with Ledger(ledger, read_only=True) as opened:
        violations = opened.verify().violations
    with closing(sqlite3.connect(f"file:{ledger}?mode=ro", uri=True)) as db:
        authors = Authors(db)
        return Account(
            trained=count_trained(db, authors, forgers, since),
            honest_tokens=_honest_tokens(db, authors, honest, since, until),
            set_aside=dict(db.execute(GONE, SET_ASIDE).fetchall()),
            submissions=dict(db.execute(SUBMISSIONS).fetchall()),
            violations=violations,
            num_steps=db.execute(STEPS, (since, until)).fetchone()[0],
        )


SUBMISSIONS = """SELECT worker, COUNT(*) FROM (SELECT worker FROM trajectories UNION ALL SELECT worker FROM partials)
                 GROUP BY worker"""
TRAINED = """SELECT m.task, m.num_trained_tokens, j.worker, b.step, b.bound
             FROM batches b JOIN batch_members m ON m.batch = b.id JOIN trajectories j ON j.task = m.task
             WHERE b.state = 'trained' AND b.trained_at >= ? AND m.num_trained_tokens > 0"""
ACCEPTED = """SELECT j.task, j.worker, j.num_sampled_tokens FROM trajectories j JOIN tasks t ON t.id = j.task
              JOIN groups g ON g.id = t.group_id
              WHERE j.accepted_at BETWEEN ? AND ? AND t.state IN ('accepted', 'scored') AND g.state <> 'dropped'
              AND NOT EXISTS (SELECT 1 FROM batch_members m WHERE m.task = j.task AND m.num_audit_tokens > 0)"""
"""Without what was lost with its group, or not believed."""
SEGMENTS = "SELECT num_tokens, version FROM segments WHERE task = ? ORDER BY start"
GONE = "SELECT name, state || ': ' || COALESCE(reason, '') FROM workers WHERE state IN (?, ?)"
STEPS = "SELECT COUNT(*) FROM batches WHERE state = 'trained' AND trained_at BETWEEN ? AND ?"


class Authors:
    """Who sampled which tokens of a trajectory."""

    def __init__(self, db: sqlite3.Connection):
        self._cuts: defaultdict[int, list[tuple[int, str]]] = defaultdict(list)
        """By task: sampled tokens up to here were handed back by this worker, in order."""
        query = "SELECT task, num_sampled_tokens, worker FROM partials WHERE state = 'continued' ORDER BY seq"
        for task, num_tokens, worker in db.execute(query):
            self._cuts[task].append((num_tokens, worker))

    def of(self, task: int, start: int, stop: int, last: str) -> Iterator[tuple[str, int]]:
        """The authors of a stretch of sampled tokens, and how many of them each one's are; `last` has the rest."""
        for end, worker in [*self._cuts.get(task, ()), (stop, last)]:
            if (count := min(end, stop) - start) > 0:
                yield worker, count
                start += count


def count_trained(db: sqlite3.Connection, authors: Authors, forgers: Collection[str], since: float = 0.0) -> Trained:
    """Tokens that took part in a step trained from `since` on, and how many of them are forgers'.

    Where an audit left out a part of a member, the part that was trained is taken to be the forged one, as far as it
    may be: the count errs against us.
    """
    lineage = {
        number: None if abandoned else step
        for number, step, abandoned in db.execute("SELECT number, step, abandoned FROM versions")
    }
    num_tokens = num_forged = 0
    for task, num_trained, worker, step, bound in db.execute(TRAINED, (since,)).fetchall():
        forged = [
            count
            for start, stop, version in _sampled(db, task)
            if (sampled_at := lineage[version]) is not None and 0 <= step - sampled_at <= bound
            for author, count in authors.of(task, start, stop, worker)
            if author in forgers
        ]
        num_tokens += num_trained
        num_forged += min(num_trained, sum(forged))
    return Trained(num_tokens, num_forged)


def _sampled(db: sqlite3.Connection, task: int) -> Iterator[tuple[int, int, int]]:
    """Stretches of a task's sampled tokens, counted without the given ones, and their versions."""
    start = 0
    for num_tokens, version in db.execute(SEGMENTS, (task,)).fetchall():
        if version is not None:
            yield start, start + num_tokens, version
            start += num_tokens


def _honest_tokens(
    db: sqlite3.Connection, authors: Authors, honest: Collection[str], since: float, until: float
) -> int:
    return sum(
        count
        for task, worker, num_tokens in db.execute(ACCEPTED, (since, until)).fetchall()
        for author, count in authors.of(task, 0, num_tokens, worker)
        if author in honest
    )
