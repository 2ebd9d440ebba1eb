"""Plays the runs of a contest, several at a time.

By the wall clock, each process has one seed, whose entries take turns on one stepper, so that other load on the machine
affects all of them. In engine time, processes may have any runs.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

from benchmarks.partial.accounts import Figures
from benchmarks.partial.contest import Run
from benchmarks.partial.engines import StepTime, VirtualEngine
from benchmarks.partial.laws import CAP_TOKENS, PROMPT_TOKENS, Lengths
from benchmarks.partial.play import GROUP_SIZE, Size, play
from benchmarks.partial.real import RealEngine, new_stepper, set_torch_up

NUM_SLOTS = 192
"""Number of slots; more than any policy uses at a time, because 5 steps have 160 samples."""
Played = list[tuple[Run, Figures]]


def in_engine_time(
    runs: Sequence[Run], model: StepTime, size: Size, jobs: int, say: Callable[[str], None]
) -> dict[Run, Figures]:
    found: dict[Run, Figures] = {}
    with _mapping(jobs) as mapped:
        for run, figures in mapped(partial(_virtual, model, size), runs):
            found[run] = figures
            if len(found) % 100 == 0:
                say(f"engine time: {len(found)} of {len(runs)} runs")
    return found


def by_the_wall_clock(
    runs: Sequence[Run], model: StepTime, size: Size, jobs: int, say: Callable[[str], None]
) -> dict[Run, Figures]:
    by_seed = [[run for run in runs if run.seed == seed] for seed in sorted({run.seed for run in runs})]
    found: dict[Run, Figures] = {}
    with _mapping(jobs) as mapped:
        for played in mapped(partial(_real, model, size), by_seed):
            found |= dict(played)
            say(f"wall clock: {len(found)} of {len(runs)} runs")
    return {run: found[run] for run in runs}


@contextmanager
def _mapping(jobs: int) -> Iterator[Callable[..., Iterable[Any]]]:
    """Yields a function like `map` that uses this many processes; for one, this process, because starting another takes
    seconds."""
    if jobs == 1:
        yield map
        return
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield pool.map


def _virtual(model: StepTime, size: Size, run: Run) -> tuple[Run, Figures]:
    engine = VirtualEngine(Lengths(run.law, run.seed, GROUP_SIZE), model)
    return run, play(run.entry.policy(), engine, size, model.prefill_s)


def _real(model: StepTime, size: Size, runs: Sequence[Run]) -> Played:
    set_torch_up()
    stepper = new_stepper(NUM_SLOTS, PROMPT_TOKENS + CAP_TOKENS)
    played: Played = []
    for index, run in enumerate([runs[0], *runs]):  # the first once more, to warm up
        engine = RealEngine(Lengths(run.law, run.seed, GROUP_SIZE), stepper)
        figures = play(run.entry.policy(), engine, size if index else Size(3), model.prefill_s)
        engine.abort()
        if index:
            played.append((run, figures))
    return played
