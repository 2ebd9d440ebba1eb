"""The ledger against SQLite alone: what durability with its checks costs over bare rows of the same bytes.

All files lie on the repository's disk, with the same settings (WAL, `synchronous=FULL`); compared calls take turns, one
by one, so that a slow moment of the disk meets both. Measured are

- submissions: `Ledger.submit` (fences, prompts, versions, digests, segments, sums) over bare inserts of the same bodies
  into one table, at 1 and at 16 rows per commit;
- a claim of 512 trajectories out of 100,000 that wait, over a bare SELECT and UPDATE of as many of as many. The claim
  also chooses by age, checks the bound and returns trajectories ready to train;
- growth: what a submission, a lease and a claim cost in a ledger with a million trained trajectories, over one with ten
  thousand.

A quick run has fewer rows waiting and trained, so its claims and growth decide nothing.
"""

from __future__ import annotations

import argparse
import json
import sqlite3
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from benchmarks import report
from benchmarks.load import Load
from offbeat.ledger.ledger import Ledger
from offbeat.ledger.records import Batch, NewGroup, Outcome, Scored, Submission
from offbeat.trajectory import End, Reward, Sampling, Segment, Task, Trajectory
from offbeat.weights.version import Version

T = TypeVar("T")

SUBMIT_TARGET, CLAIM_TARGET, GROWTH_TARGET = 0.7, 3.0, 1.3
ROWS_PER_COMMIT = (1, 16)
GROUP_SIZE, GROUPS_PER_CLAIM = 8, 64
TRAJECTORIES_PER_CLAIM = GROUP_SIZE * GROUPS_PER_CLAIM
LEASE_TASKS = 16
NUM_TOKENS = 4
"""With which a body has some 220 bytes: the less there is to write, the more the ledger's own work shows."""
PROMPT = np.arange(1, 4, dtype=np.int32)
SAMPLING = Sampling(max_new_tokens=NUM_TOKENS)
WORKER = "worker"
BOUND = 1000
"""So that nothing goes stale while the same rows wait for one claim after the other."""
FILL_GROUPS = 512
"""Groups of one step while a ledger is filled."""


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
    """A ledger and what happens to it: groups drawn, answered, scored, trained."""

    def __init__(self, path: Path):
        self.ledger = Ledger(path, max_staleness=BOUND)
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
        batch = self.ledger.claim(self.step, num_groups, BOUND, in_order=False)
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
        """Adds trajectories, waiting or trained, as a run would: through every state on the way."""
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


def seconds_of(call: Callable[[], T]) -> tuple[float, T]:
    start_s = time.perf_counter()
    result = call()
    return time.perf_counter() - start_s, result


def in_turn(calls: Sequence[Callable[[], object]]) -> list[float]:
    """Seconds of each call, made one after the other."""
    return [seconds_of(call)[0] for call in calls]


def portions(items: Sequence[T], size: int) -> list[Sequence[T]]:
    return [items[i : i + size] for i in range(0, len(items), size)]


# Submissions


def submissions(folder: Path, rows_per_commit: int, num_commits: int, num_rounds: int) -> list[tuple[float, float]]:
    """Submissions per second, ledger's and bare, a pair per round."""
    plain = Plain(folder / f"plain-{rows_per_commit}.sqlite")
    rates = []
    with opened(folder, f"submit-{rows_per_commit}") as run:
        for _ in range(num_rounds + 1):
            num_rows = rows_per_commit * num_commits
            run.admit(-(-num_rows // GROUP_SIZE))
            ready = answers(run.lease(num_rows), run.step)
            spent_s = [0.0, 0.0]
            for portion in portions(ready, rows_per_commit):
                bodies = [submission.trajectory.encode() for submission in portion]
                both_s = in_turn([lambda p=portion: run.submit(p), lambda b=bodies: plain.insert(b)])  # type: ignore[misc]
                spent_s = [before + now for before, now in zip(spent_s, both_s, strict=True)]
            rates.append((num_rows / spent_s[0], num_rows / spent_s[1]))
    plain.connection.close()
    return rates[1:]  # the first round warms up


# Claims


def claims(folder: Path, num_waiting: int, num_rounds: int) -> list[tuple[float, float]]:
    """Seconds of a claim, ledger's and bare, a pair per round."""
    plain = Plain(folder / "plain-claim.sqlite")
    taken = []
    with opened(folder, "claim") as run:
        run.fill(num_waiting, trained=False)
        body = answers([Task(1, 1, PROMPT, 1, SAMPLING)], 0)[0].trajectory.encode()
        plain.insert([body] * num_waiting)
        for _ in range(num_rounds + 1):
            ours_s, bare_s = in_turn([run.claim, lambda: plain.claim(TRAJECTORIES_PER_CLAIM)])
            taken.append((ours_s, bare_s))
            run.commit()
    plain.connection.close()
    return taken[1:]


# Growth


def growth(folder: Path, sizes: tuple[int, int], num_rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Seconds of a submission, a lease and a claim in a small and in a large ledger, a pair per round."""
    taken: dict[str, list[tuple[float, float]]] = {"submit": [], "lease": [], "claim": []}
    with opened(folder, "small") as small, opened(folder, "large") as large:
        for run, size in zip((small, large), sizes, strict=True):
            start_s = time.perf_counter()
            run.fill(size, trained=True)
            say(f"{size:,} trained trajectories in {time.perf_counter() - start_s:.0f} s")
        for _ in range(num_rounds + 1):
            for operation, pair in _step_of_both(small, large).items():
                taken[operation].append(pair)
    return {operation: pairs[1:] for operation, pairs in taken.items()}


def _step_of_both(small: Run, large: Run) -> dict[str, tuple[float, float]]:
    """One step in both ledgers, call by call in turn; medians of each kind of call."""
    both = (small, large)
    leases: tuple[list[float], list[float]] = ([], [])
    submits: tuple[list[float], list[float]] = ([], [])
    for run in both:
        run.admit(GROUPS_PER_CLAIM)
    for _ in range(TRAJECTORIES_PER_CLAIM // LEASE_TASKS):
        for run, lease_s, submit_s in zip(both, leases, submits, strict=True):
            taken_s, tasks = seconds_of(lambda run=run: run.lease(LEASE_TASKS))  # type: ignore[misc]
            lease_s.append(taken_s)
            ready = answers(tasks, run.step)
            submit_s += in_turn([lambda run=run, ready=ready: run.submit(ready)])  # type: ignore[misc]
    for run in both:
        run.score()
    small_s, large_s = in_turn([small.claim, large.claim])
    for run in both:
        run.commit()

    def medians(pair: tuple[list[float], list[float]]) -> tuple[float, float]:
        return statistics.median(pair[0]), statistics.median(pair[1])

    return {"submit": medians(submits), "lease": medians(leases), "claim": (small_s, large_s)}


# The report


def say(text: str) -> None:
    print(f"ledger: {text}", file=sys.stderr, flush=True)


def measure(folder: Path, quick: bool, num_rounds: int) -> dict[str, Any]:
    figures: dict[str, Any] = {"submissions": {}}
    for rows in ROWS_PER_COMMIT:
        figures["submissions"][rows] = submissions(folder, rows, 40 if quick else 200, num_rounds)
        say(f"{rows} rows a commit: done")
    figures["claims"] = claims(folder, 4_000 if quick else 100_000, num_rounds)
    say("claims: done")
    figures["growth"] = growth(folder, (1_000, 8_000) if quick else (10_000, 1_000_000), num_rounds)
    return figures


def bars_of(figures: dict[str, Any], quick: bool) -> dict[str, report.Bar]:
    bars = {}
    for rows, pairs in figures["submissions"].items():
        ratios = [ours / bare for ours, bare in pairs]
        bars[f"submissions/s over bare SQLite, {rows} a commit"] = report.at_least(SUBMIT_TARGET, ratios, quick=quick)
    ratios = [ours_s / bare_s for ours_s, bare_s in figures["claims"]]
    bars["seconds of a claim over bare SQLite"] = undecided(report.at_most(CLAIM_TARGET, ratios, quick=quick), quick)
    for operation, pairs in figures["growth"].items():
        bar = report.at_most(GROWTH_TARGET, [large_s / small_s for small_s, large_s in pairs], quick=quick)
        bars[f"seconds of a {operation}, large over small"] = undecided(bar, quick)
    return bars


def undecided(bar: report.Bar, quick: bool) -> report.Bar:
    """A quick run has too few rows to tell, however clear its figures are."""
    return report.Bar(bar.value, bar.target, None if quick else bar.holds, bar.spread)


def rows_of(figures: dict[str, Any]) -> list[tuple[str, str, str]]:
    def row(name: str, pairs: Sequence[tuple[float, float]], form: str, scale: float = 1.0) -> tuple[str, str, str]:
        ours, other = (statistics.median(values) * scale for values in zip(*pairs, strict=True))
        return name, format(ours, form), format(other, form)

    rows = [
        row(f"submissions/s, {num_rows} a commit", pairs, ",.0f") for num_rows, pairs in figures["submissions"].items()
    ]
    rows.append(row(f"claim of {TRAJECTORIES_PER_CLAIM}, ms", figures["claims"], ".1f", 1e3))
    for operation, pairs in figures["growth"].items():
        swapped = [(large_s, small_s) for small_s, large_s in pairs]
        rows.append(row(f"{operation}, ms: large and small ledger", swapped, ".2f", 1e3))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description="The ledger against SQLite alone.")
    parser.add_argument("--quick", action="store_true", help="fewer rows and rounds: ends within a minute")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    num_rounds, load = 3 if options.quick else options.rounds, Load()
    cache = report.REPOSITORY / ".cache"
    cache.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache, prefix="ledger-") as folder:
        figures = measure(Path(folder), options.quick, num_rounds)
    report.show(
        "ledger",
        ("median of rounds", "ledger", "bare or small"),
        rows_of(figures),
        bars_of(figures, options.quick),
        quick=options.quick,
        **load.shares(),
        **figures,
    )


if __name__ == "__main__":
    main()
