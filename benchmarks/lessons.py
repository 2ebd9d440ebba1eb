"""Gives lessons several at a time, each in a process of its own, and keeps what came of each as a line of a file.

A lesson is given by a function of its plan; both are told apart by the plan alone, so that one which a file holds
already is not given again: a benchmark of hours can be stopped and gone on with.
"""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any, Protocol, TypeVar


class Lesson(Protocol):
    """What came of a plan."""

    @property
    def plan(self) -> Any: ...

    def row(self) -> dict[str, Any]: ...


L = TypeVar("L", bound=Lesson)


def give(
    plans: Sequence[Any],
    teach: Callable[[Any], L],
    jobs: int,
    kept: Path | None,
    from_row: Callable[[dict[str, Any]], L],
    on_given: Callable[[L, int], None],
) -> list[L]:
    """The lessons of these plans, in their order; `on_given` hears of each, and how many there are by then."""
    given = _read(kept, from_row)
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        for done in as_completed([pool.submit(teach, plan) for plan in plans if plan not in given]):
            lesson = done.result()
            given[lesson.plan] = lesson
            on_given(lesson, sum(plan in given for plan in plans))
            if kept is not None:
                with kept.open("a") as file:
                    file.write(json.dumps(lesson.row()) + "\n")
    return [given[plan] for plan in plans]


def _read(kept: Path | None, from_row: Callable[[dict[str, Any]], L]) -> dict[Any, L]:
    if kept is None or not kept.exists():
        return {}
    lessons = [from_row(json.loads(line)) for line in kept.read_text().splitlines()]
    return {lesson.plan: lesson for lesson in lessons}
