"""A ledger and a bare SQLite table, filled with the same data."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np

from offbeat.ledger.ledger import Ledger
from offbeat.ledger.records import Batch, LedgerTerms, NewGroup, Outcome, Scored, Submission
from offbeat.trajectory import End, Reward, Sampling, Segment, Task, Trajectory
from offbeat.weights.version import Version

GROUP_SIZE, GROUPS_PER_CLAIM = 8, 64
NUM_TOKENS = 4
"""Tokens of an answer. A body then has some 220 bytes; the less there is to write, the more the ledger's own work
shows."""
PROMPT = np.arange(1, 4, dtype=np.int32)
SAMPLING = Sampling(max_new_tokens=NUM_TOKENS)
WORKER = "worker"
BOUND = 1000
"""Staleness bound, so large that no row becomes stale while rows wait for many claims."""
FILL_GROUPS = 512
"""Number of groups of a step while a ledger is filled."""


class Plain:
    """One table of bodies, and nothing else."""

    def __init__(self, path: Path):
        self.connection = sqlite3.connect(path, isolation_level=None)
        self.connection.executescript(
            "PRAGMA journal_mode = WAL; PRAGMA synchronous = FULL;"
            "CREATE TABLE bodies (seq INTEGER PRIMARY KEY, state TEXT NOT NULL DEFAULT 'waiting', body BLOB NOT NULL);"
            "CREATE INDEX waiting ON bodies (seq) WHERE state = 'waiting';"
        )

    def insert(self, bodies: Iterable[bytes]) -> None:
        self.connection.execute("BEGIN IMMEDIATE")
        self.connection.executemany("INSERT INTO bodies (body) VALUES (?)", [(body,) for body in bodies])
        self.connection.execute("COMMIT")

    def claim(self, count: int) -> list[tuple[int, bytes]]:
        self.connection.execute("BEGIN IMMEDIATE")
        query = "SELECT seq, body FROM bodies WHERE state = 'waiting' ORDER BY seq LIMIT ?"
        rows = self.connection.execute(query, (count,)).fetchall()
        self.connection.execute(
            "UPDATE bodies SET state = 'claimed' WHERE seq IN (SELECT value FROM json_each(?))",
            (json.dumps([seq for seq, _ in rows]),),
        )
        self.connection.execute("COMMIT")
        return rows


class Run:
    """A ledger with the operations of a run: groups are drawn, answered, scored and trained."""

    def __init__(self, path: Path):
        self.ledger = Ledger(path, LedgerTerms(max_staleness=BOUND))
        self.ledger.publish(Version(0, 0, None, "weights 0", Path("weights/0")))
        self.step = 0

    def admit(self, count: int) -> None:
        first = self.ledger.cursor().next_ordinal
        self.ledger.admit([_group(ordinal) for ordinal in range(first, first + count)])

    def lease(self, count: int) -> list[Task]:
        return self.ledger.lease(WORKER, count, self.step)

    def submit(self, submissions: Sequence[Submission]) -> None:
        outcomes = self.ledger.submit(submissions)
        assert outcomes == [Outcome.STORED] * len(submissions), outcomes

    def score(self) -> None:
        found = self.ledger.unscored(1_000_000)
        self.ledger.score([Scored(unscored.task, [Reward(1.0)]) for unscored in found])

    def claim(self, num_groups: int = GROUPS_PER_CLAIM) -> Batch:
        terms = self.ledger.terms
        self.ledger.terms = replace(terms, groups_per_step=num_groups)
        batch = self.ledger.claim(self.step, in_order=False)
        self.ledger.terms = terms  # without groups_per_step, so that leases are not paced
        assert batch is not None
        assert len(batch.groups) == num_groups
        return batch

    def commit(self) -> None:
        self.step += 1
        number, parent = self.ledger.next_version_number(), self.ledger.latest_version()
        assert parent is not None
        path = Path(f"weights/{number}")
        self.ledger.commit(self.step - 1, Version(number, self.step, parent.number, f"weights {number}", path))

    def fill(self, num_trajectories: int, *, trained: bool) -> None:
        """Adds waiting or trained trajectories as a run would, through every state before."""
        left = num_trajectories // GROUP_SIZE
        while left > 0:
            num_groups = min(FILL_GROUPS, left)
            self.admit(num_groups)
            self.submit(answers(self.lease(num_groups * GROUP_SIZE), self.step))
            self.score()
            if trained:
                self.claim(num_groups)
                self.commit()
            left -= num_groups


def _group(ordinal: int) -> NewGroup:
    return NewGroup(
        ordinal=ordinal,
        source="sums",
        source_ordinal=ordinal,
        prompt_tokens=PROMPT,
        problem={"prompt": "1+1=", "answer": "2", "info": {}},
        reward="number",
        seed=ordinal,
        size=GROUP_SIZE,
        sampling=SAMPLING,
    )


def answers(tasks: Iterable[Task], version: int) -> list[Submission]:
    return [Submission(_answer(task, version), WORKER, task.fence) for task in tasks]


def _answer(task: Task, version: int) -> Trajectory:
    trajectory = task.new_trajectory()
    segment = Segment(
        start=0,
        tokens=np.full(NUM_TOKENS, task.id % 1000),
        logprobs=np.full(NUM_TOKENS, -0.5),
        version=version,
        kv_version=version,
        worker=WORKER,
        engine="paced 1",
    )
    trajectory.append(segment, End.LENGTH)
    return trajectory


@contextmanager
def opened(folder: Path, name: str) -> Iterator[Run]:
    run = Run(folder / f"{name}.sqlite")
    try:
        yield run
    finally:
        run.ledger.close()
