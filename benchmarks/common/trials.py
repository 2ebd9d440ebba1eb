"""Runs trials several at a time, each in a process of its own, and appends each result to a file.

A trial is identified by its plan. Trials that the file already holds are not run again, so a benchmark of hours can be
stopped and resumed.
"""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any, Protocol, TypeVar


class Trial(Protocol):
    """Result of one plan."""

    @property
    def plan(self) -> Any: ...

    def row(self) -> dict[str, Any]: ...


T = TypeVar("T", bound=Trial)


def run_trials(
    plans: Sequence[Any],
    run: Callable[[Any], T],
    jobs: int,
    kept: Path | None,
    from_row: Callable[[dict[str, Any]], T],
    on_done: Callable[[T, int], None],
) -> list[T]:
    """Returns results in the order of `plans`. `on_done` gets each new result and the number of results so far."""
    results = _read(kept, from_row)
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        for done in as_completed([pool.submit(run, plan) for plan in plans if plan not in results]):
            trial = done.result()
            results[trial.plan] = trial
            on_done(trial, sum(plan in results for plan in plans))
            if kept is not None:
                with kept.open("a") as file:
                    file.write(json.dumps(trial.row()) + "\n")
    return [results[plan] for plan in plans]


def _read(kept: Path | None, from_row: Callable[[dict[str, Any]], T]) -> dict[Any, T]:
    if kept is None or not kept.exists():
        return {}
    trials = [from_row(json.loads(line)) for line in kept.read_text().splitlines()]
    return {trial.plan: trial for trial in trials}
