"""Figures from a run's ledger after an attack: whose tokens were trained, who was set aside, what honest workers did.

A trajectory may have several authors: if one worker hands back a beginning, another continues it without a change. So
the author of a sampled token is the worker that submitted the first partial with it or, without such a partial, the
trajectory. The worker named in a segment is ignored, because workers can lie about it.
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
    """Numbers of tokens that were used in an update."""

    num_tokens: int
    num_forged: int

    @property
    def forged_share(self) -> float:
        return self.num_forged / self.num_tokens if self.num_tokens else 0.0


@dataclass(frozen=True)
class Account:
    trained: Trained
    honest_tokens: int
    """Tokens of honest workers that were accepted within the window, and were trained or still wait for that."""
    set_aside: dict[str, str]
    """Workers that get no more work, with the reason."""
    submissions: dict[str, int]
    """Number of accepted answers and partials, by worker."""
    violations: tuple[str, ...]
    num_steps: int
    """Number of steps trained within the window."""


def account(ledger: Path, honest: Collection[str], forgers: Collection[str], since: float, until: float) -> Account:
    """Returns the account of a run. The window is from `since` to `until`, by the clock of the ledger's rows; trained
    tokens count from `since` on, without an end."""
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
"""Accepted tokens, without those of dropped groups and of answers that an audit left out."""
SEGMENTS = "SELECT num_tokens, version FROM segments WHERE task = ? ORDER BY start"
GONE = "SELECT name, state || ': ' || COALESCE(reason, '') FROM workers WHERE state IN (?, ?)"
STEPS = "SELECT COUNT(*) FROM batches WHERE state = 'trained' AND trained_at BETWEEN ? AND ?"


class Authors:
    """Finds the workers that sampled the tokens of trajectories."""

    def __init__(self, db: sqlite3.Connection):
        self._cuts: defaultdict[int, list[tuple[int, str]]] = defaultdict(list)
        """Partials by task, in order, each as its number of sampled tokens and the worker that handed it back."""
        query = "SELECT task, num_sampled_tokens, worker FROM partials WHERE state = 'continued' ORDER BY seq"
        for task, num_tokens, worker in db.execute(query):
            self._cuts[task].append((num_tokens, worker))

    def of(self, task: int, start: int, stop: int, last: str) -> Iterator[tuple[str, int]]:
        """Yields the authors of a range of sampled tokens with their numbers of tokens; `last` is the author of tokens
        after all partials."""
        for end, worker in [*self._cuts.get(task, ()), (stop, last)]:
            if (count := min(end, stop) - start) > 0:
                yield worker, count
                start += count


def count_trained(db: sqlite3.Connection, authors: Authors, forgers: Collection[str], since: float = 0.0) -> Trained:
    """Returns the numbers of tokens in steps trained from `since` on, and of those among them by forgers.

    If an audit left out a part of an answer, the trained part is assumed to be the forged one, as far as possible, so
    the count is an upper bound.
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
    """Yields the ranges of a task's sampled tokens, numbered without given tokens, with their versions."""
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
