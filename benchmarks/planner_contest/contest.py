"""Plans one cluster with our planner and with every reading of Algorithm 1, and has the judge score the plans."""

from __future__ import annotations

import multiprocessing
import statistics
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

from benchmarks import report
from benchmarks.planner_contest.judge.plan import Sync
from benchmarks.planner_contest.judge.score import score
from benchmarks.planner_contest.rivals import ours
from benchmarks.planner_contest.rivals.answer import Answer
from benchmarks.planner_contest.rivals.clusters import Case
from benchmarks.planner_contest.rivals.hex import COPIES, Hex
from offbeat.planner.problem import PlanningProblem

SEED = 2511
NUM_RANDOM = 200
NUM_QUICK = 2
PUBLISHED, ONE_COPY, SAME = "as published", "one blocking copy", "same sync"
BLOCKING = {PUBLISHED: COPIES, ONE_COPY: 1.0, SAME: 0.0}
"""Copies of the weights that AReaL-Hex sends while all wait, by way of sync; 0: relayed like ours."""
READINGS = ("literal", "charitable", "evident")
TIE = 1e-9
"""Largest relative difference between the speeds of equal plans, whose terms are added in different orders."""


@dataclass(frozen=True)
class Outcome:
    case: Case
    plan_s: float
    gap: float
    speeds: dict[str, dict[str, float]]
    """Tokens per second, by way of sync, then by contestant."""
    masked: dict[str, float]
    """Tokens per second with the same sync if the bound is kept by masking tokens instead of by pacing steps, by
    contestant."""

    def over_best(self, sync: str) -> float:
        return self.speeds[sync]["ours"] / max(self.speeds[sync][name] for name in READINGS)

    def over_literal(self, sync: str) -> float | None:
        """Our speed over that of Algorithm 1 as printed; None if the latter finds no working plan."""
        literal = self.speeds[sync]["literal"]
        return self.speeds[sync]["ours"] / literal if literal else None

    def over_best_masked(self) -> float:
        return self.masked["ours"] / max(self.masked[name] for name in READINGS if name in self.masked)

    def row(self) -> dict[str, Any]:
        return {
            "case": self.case.name,
            "plan_s": round(self.plan_s, 3),
            "gap": self.gap,
            "speeds": self.speeds,
            "masked": self.masked,
        }


def contest(case: Case) -> Outcome | None:
    """Returns the outcome of a case; None if no reading of Algorithm 1 finds a plan to compare with."""
    started_s = time.monotonic()
    problem = ours.problem(case.inventory, case.workload)
    mine = ours.answer(problem, case.inventory, case.workload)
    plan_s = time.monotonic() - started_s
    assert mine is not None, f"{case.name}: no plan"
    assert mine.gap is not None
    same = {name: answers(case, problem, copies) for name, copies in BLOCKING.items()}
    if not any(same[PUBLISHED].values()):
        return None
    speeds = {
        sync: {
            "ours": _speed(case, problem, mine, 0.0),
            **{name: _speed(case, problem, one, BLOCKING[sync]) for name, one in found.items()},
        }
        for sync, found in same.items()
    }
    masked = {
        name: score(case.inventory, case.workload, one.plan(problem, Sync.RELAY)).masked_tokens_per_s
        for name, one in {"ours": mine, **same[SAME]}.items()
        if one
    }
    return Outcome(case, plan_s, mine.gap, speeds, masked)


def contests(cases: Sequence[Case], jobs: int) -> Iterator[Outcome | None]:
    """Yields the outcome of each case, in the order of `cases`, with `jobs` of them computed at a time."""
    if jobs == 1:
        yield from map(contest, cases)
        return
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(contest, cases)


def answers(case: Case, problem: PlanningProblem, copies: float) -> dict[str, Answer | None]:
    rival = Hex(case.inventory, case.workload, problem, copies)
    return {"literal": rival.literal(), "charitable": rival.charitable(), "evident": rival.evident()}


def _speed(case: Case, problem: PlanningProblem, answer: Answer | None, copies: float) -> float:
    """Tokens per second if `copies` of the weights are sent while all wait (0: they are relayed meanwhile)."""
    if answer is None:
        return 0.0
    sync = Sync.BLOCKING if copies else Sync.RELAY
    return score(case.inventory, case.workload, answer.plan(problem, sync, copies)).tokens_per_s


def bars(outcomes: Sequence[Outcome]) -> dict[str, report.Bar]:
    """Medians on the paper's clusters come first. Means are over all cases; their spread is that of the cases."""
    found = {}
    for sync in BLOCKING:
        paper = [one.over_best(sync) for one in outcomes if one.case.is_paper]
        median = statistics.median(paper)
        found[f"{sync}: over the best reading, paper's median"] = _bar(1.0, median, median >= 1.0 - TIE, paper)
    for sync in (PUBLISHED, SAME):
        best = [one.over_best(sync) for one in outcomes]
        literal = [ratio for one in outcomes if (ratio := one.over_literal(sync)) is not None]
        found[f"{sync}: over the best reading, mean"] = _mean_bar(1.03, best)
        found[f"{sync}: over the best reading, least"] = _bar(1.0, min(best), min(best) >= 1.0 - TIE, best)
        found[f"{sync}: over Algorithm 1 as printed, mean"] = _mean_bar(1.10, literal)
    gaps = [one.gap for one in outcomes]
    found["proven gap, largest"] = _bar(0.01, max(gaps), max(gaps) <= 0.01, gaps)
    return found


def _mean_bar(target: float, values: Sequence[float]) -> report.Bar:
    mean = statistics.fmean(values)
    return _bar(target, mean, mean >= target, values)


def _bar(target: float, value: float, holds: bool, values: Sequence[float]) -> report.Bar:
    return report.Bar(round(value, 4), target, holds, (round(min(values), 4), round(max(values), 4)))
