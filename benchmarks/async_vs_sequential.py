"""Overlapped against alternating schedules: `python -m benchmarks.async_vs_sequential [--quick] [--only PART]`.

- paced: two workers, one three times as fast as the other, answers of very unequal length, and a trainer, all at a
  modelled pace (`schedules.paced`): how many samples a second are trained when workers never stop (`overlap`) over when
  generating and training take turns (`alternate`), and how much of the time the fast worker has nothing to do. Beside
  them, `alternate` with each worker given half of the tasks;
- learning: real engines on a hard level of arithmetic (`schedules.learning`): how many samples `overlap` needs, over
  `alternate`, for the same held-out reward.

A quick run trains for a few steps and decides nothing about learning.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.load import Load
from benchmarks.peers.learning import rounded
from benchmarks.schedules.learning import Classroom, Learned, Size, interval, threshold_of
from benchmarks.schedules.paced import Pace, Plan, measure

SPEED_TARGET, IDLE_TARGET, SAMPLES_TARGET = 1.3, 0.05, 1.1
ALTERNATE, OVERLAP = "alternate", "overlap"
FULL, QUICK = Size(seeds=5, steps=40, save_every=4, prompts=2000), Size(seeds=1, steps=4, save_every=2, prompts=100)

Paces = Mapping[Plan, Sequence[Pace]]
Lessons = Mapping[str, Sequence[Learned]]
Rows = list[tuple[str, str, str]]


def say(text: str) -> None:
    print(f"async_vs_sequential: {text}", file=sys.stderr, flush=True)


# Paced


def paces_of(folder: Path, quick: bool) -> Paces:
    num_seeds, num_warmup, num_steps = (1, 1, 3) if quick else (5, 4, 12)
    paces: dict[Plan, list[Pace]] = {plan: [] for plan in Plan}
    for seed in range(num_seeds):
        for plan in Plan:
            pace = measure(plan, seed, folder / f"{plan.name}-{seed}", num_warmup, num_steps)
            paces[plan].append(pace)
            say(f"{plan.value}, seed {seed}: {pace.samples_per_s:.1f} samples/s, fast idle {pace.idle['fast']:.1%}")
    return paces


def paced_bars(paces: Paces, quick: bool) -> dict[str, report.Bar]:
    pairs = zip(paces[Plan.OVERLAP], paces[Plan.ALTERNATE], strict=True)
    ratios = [ours.samples_per_s / other.samples_per_s for ours, other in pairs]
    idle = [pace.idle["fast"] for pace in paces[Plan.OVERLAP]]
    return {
        "trained samples/s, overlap over alternate": report.at_least(SPEED_TARGET, ratios, quick=quick),
        "idle share of the fast worker, overlap": report.at_most(IDLE_TARGET, idle, quick=quick),
    }


def paced_rows(paces: Paces) -> Rows:
    rows = []
    for plan, values in paces.items():
        rate = statistics.median(pace.samples_per_s for pace in values)
        shares = [
            f"{name} idle {statistics.median(pace.idle[name] for pace in values):.0%}, slots used "
            f"{statistics.median(pace.slots_used[name] for pace in values):.0%}"
            for name in values[0].idle
        ]
        rows.append((plan.value, f"{rate:.1f} samples/s", "; ".join(shares)))
    return rows


# Learning


def lessons_of(folder: Path, size: Size) -> Lessons:
    classroom = Classroom(size, folder)
    lessons: dict[str, list[Learned]] = {ALTERNATE: [], OVERLAP: []}
    for seed in range(1, size.seeds + 1):
        for schedule, learned in lessons.items():
            learned.append(classroom.learn(schedule, seed))
            last = learned[-1]
            say(
                f"{schedule}, seed {seed}: held-out reward {last.curve.start:.3f} to {last.curve.rewards[-1]:.3f}, "
                f"tokens up to {last.max_staleness} steps old"
            )
    return lessons


def ratios_of(lessons: Lessons) -> list[float]:
    threshold = threshold_of(lessons[ALTERNATE])
    pairs = zip(lessons[OVERLAP], lessons[ALTERNATE], strict=True)
    return [ours.needed(threshold) / other.needed(threshold) for ours, other in pairs]


def learning_bars(lessons: Lessons, quick: bool) -> dict[str, report.Bar]:
    bar = report.at_most(SAMPLES_TARGET, ratios_of(lessons), quick=quick)
    return {"samples to 80% of the gain, overlap over alternate": replace(bar, holds=None) if quick else bar}


def learning_rows(lessons: Lessons) -> Rows:
    threshold = threshold_of(lessons[ALTERNATE])
    rows = []
    for schedule, learned in lessons.items():
        needed = statistics.median(one.needed(threshold) for one in learned)
        last = statistics.median(one.curve.rewards[-1] for one in learned)
        oldest = max(one.max_staleness for one in learned)
        told = f"held out at the end {last:.3f}; tokens up to {oldest} steps old"
        rows.append((f"{schedule}, to {threshold:.3f} held out", f"{needed:,.0f} samples", told))
    return rows


def learning_raw(lessons: Lessons) -> dict[str, Any]:
    threshold = threshold_of(lessons[ALTERNATE])
    return {
        "threshold": round(threshold, 4),
        "ratio_interval_95": interval(ratios_of(lessons)),
        "samples": list(lessons[ALTERNATE][0].curve.samples),
        "held_out": {name: [rounded(one.curve.rewards, 4) for one in learned] for name, learned in lessons.items()},
        "samples_needed": {
            name: [round(one.needed(threshold)) for one in learned] for name, learned in lessons.items()
        },
        "max_staleness": {name: [one.max_staleness for one in learned] for name, learned in lessons.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Overlapped against alternating schedules.")
    parser.add_argument("--quick", action="store_true", help="a few steps of each: ends within a minute")
    parser.add_argument("--only", choices=("paced", "learning"), help="one part alone")
    options = parser.parse_args()
    load, quick = Load(), options.quick
    rows: Rows = []
    bars: dict[str, report.Bar] = {}
    raw: dict[str, Any] = {}
    cache = report.REPOSITORY / ".cache"
    cache.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache, prefix="async_vs_sequential-") as folder:
        if options.only != "learning":
            paces = paces_of(Path(folder), quick)
            rows += paced_rows(paces)
            bars |= paced_bars(paces, quick)
            raw["paced"] = {plan.value: [asdict(pace) for pace in values] for plan, values in paces.items()}
        if options.only != "paced":
            lessons = lessons_of(Path(folder), QUICK if quick else FULL)
            rows += learning_rows(lessons)
            bars |= learning_bars(lessons, quick)
            raw["learning"] = learning_raw(lessons)
    report.show(
        "async_vs_sequential", ("schedule", "median", "beside"), rows, bars, quick=quick, **load.shares(), **raw
    )


if __name__ == "__main__":
    main()
