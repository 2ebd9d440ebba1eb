"""Times the ledger and bare SQLite in turn: submissions, claims, and growth."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from benchmarks import report
from benchmarks.ledger.contestants import GROUP_SIZE, GROUPS_PER_CLAIM, PROMPT, SAMPLING, Plain, Run, answers, opened
from offbeat.trajectory import Task

T = TypeVar("T")

SUBMIT_TARGET, CLAIM_TARGET, GROWTH_TARGET = 0.7, 3.0, 1.3
ROWS_PER_COMMIT = (1, 16)
TRAJECTORIES_PER_CLAIM = GROUP_SIZE * GROUPS_PER_CLAIM
LEASE_TASKS = 16
say = partial(report.say, "ledger")


def seconds_of(call: Callable[[], T]) -> tuple[float, T]:
    start_s = time.perf_counter()
    result = call()
    return time.perf_counter() - start_s, result


def in_turn(calls: Sequence[Callable[[], object]]) -> list[float]:
    """Makes calls one after the other and returns the seconds of each."""
    return [seconds_of(call)[0] for call in calls]


def slices_of(items: Sequence[T], size: int) -> list[Sequence[T]]:
    return [items[i : i + size] for i in range(0, len(items), size)]


# Submissions


def submissions(folder: Path, rows_per_commit: int, num_commits: int, num_rounds: int) -> list[tuple[float, float]]:
    """Returns submissions per second of the ledger and of the bare table, a pair per round."""
    plain = Plain(folder / f"plain-{rows_per_commit}.sqlite")
    rates = []
    with opened(folder, f"submit-{rows_per_commit}") as run:
        for _ in range(num_rounds + 1):
            num_rows = rows_per_commit * num_commits
            run.admit(-(-num_rows // GROUP_SIZE))
            ready = answers(run.lease(num_rows), run.step)
            spent_s = [0.0, 0.0]
            for rows in slices_of(ready, rows_per_commit):
                bodies = [submission.trajectory.encode() for submission in rows]
                both_s = in_turn([lambda r=rows: run.submit(r), lambda b=bodies: plain.insert(b)])  # type: ignore[misc]
                spent_s = [before + now for before, now in zip(spent_s, both_s, strict=True)]
            rates.append((num_rows / spent_s[0], num_rows / spent_s[1]))
    plain.connection.close()
    return rates[1:]  # the first round warms up


# Claims


def claims(folder: Path, num_waiting: int, num_rounds: int) -> list[tuple[float, float]]:
    """Returns the seconds of a claim in the ledger and in the bare table, a pair per round."""
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
    """Returns the seconds of a submission, a lease and a claim in a small and in a large ledger, a pair per round."""
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
    """Runs one step in both ledgers, with calls in turn, and returns the median of each kind of call."""
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


# Bars


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
