"""The cost of staleness, with and without correction: `python -m benchmarks.staleness [--quick] [--jobs N]`.

The arithmetic task is so hard that training on fresh data ends at a held-out reward between 0.5 and 0.85. Runs with the
same seeds and problems are then trained with data held back by 1, 2, 4 and 8 steps, with the default correction and
without any. Compares the samples needed for 80 % of the gain of training on fresh data.

The set-up counts only if staleness hurts in it, which means that the uncorrected run at 8 steps is clearly worse.
`--lessons FILE` appends each trial to a file as a line and does not repeat trials in it; `--plot FILE.png` draws the
curves.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from benchmarks import report
from benchmarks.common.learning import Curve, Learned, interval, rounded, threshold_of
from benchmarks.common.load import Load
from benchmarks.common.trials import run_trials
from benchmarks.staleness.picture import draw
from benchmarks.staleness.trial import Plan, Size, Trial, run_trial

HELD_BACK = (0, 1, 2, 4, 8)
CORRECTED, UNCORRECTED = "tis", "off"
SAMPLES_TARGET = 1.15
WORSE_TARGET = 1.15
"""Ratio of samples, uncorrected over corrected at 8 steps, that is needed for the set-up to count."""
END_FROM, END_TO = 0.5, 0.85
FIRST_SEED = 11
"""First seed of the trials; the set-up was chosen with seeds 1 to 5, so others judge it."""
FULL = Size(steps=160, judge_every=8, prompts=2000, seeds=5)
QUICK = Size(steps=4, judge_every=2, prompts=100, seeds=1)

Ways = Mapping[tuple[int, str], Sequence[Learned]]

say = partial(report.say, "staleness")


def plans_of(size: Size) -> list[Plan]:
    """Returns the plans; on fresh data, with and without correction are the same, so only one plan is included."""
    seeds = range(FIRST_SEED, FIRST_SEED + size.seeds)
    ways = [(0, UNCORRECTED), *itertools.product(HELD_BACK[1:], (CORRECTED, UNCORRECTED))]
    return [Plan(held_back, way, seed) for seed in seeds for held_back, way in ways]


def trials_of(size: Size, jobs: int, kept: Path | None) -> list[Trial]:
    """Returns every trial. Trials in the file `kept` are not run again; the others run on one thread each."""
    wanted = plans_of(size)

    def tell(trial: Trial, num_given: int) -> None:
        plan = trial.plan
        say(
            f"held back {plan.held_back}, {plan.correction}, seed {plan.seed}: {trial.rewards[0]:.3f} to "
            f"{trial.rewards[-1]:.3f}, effective samples {trial.ess:.2f} ({num_given} of {len(wanted)})"
        )

    return run_trials(wanted, partial(run_trial, size=size), jobs, kept, Trial.from_row, tell)


def by_way(trials: Sequence[Trial]) -> Ways:
    found: dict[tuple[int, str], list[Learned]] = {}
    for trial in trials:
        plan = trial.plan
        learned = Learned(Curve(trial.samples, trial.rewards), plan.held_back)
        found.setdefault((plan.held_back, plan.correction), []).append(learned)
    return found


def ratios(ways: Ways, above: tuple[int, str], below: tuple[int, str]) -> list[float]:
    """Returns for each seed the samples needed in one way over those needed in the other."""
    threshold = threshold_of(ways[0, UNCORRECTED])
    pairs = zip(ways[above], ways[below], strict=True)
    return [one.needed(threshold) / other.needed(threshold) for one, other in pairs]


def bars_of(ways: Ways, quick: bool) -> dict[str, report.Bar]:
    fresh = (0, UNCORRECTED)
    ends = [learned.curve.rewards[-1] for learned in ways[fresh]]
    bars = {
        "samples to 80% of the gain, held back 4 and corrected, over fresh": report.at_most(
            SAMPLES_TARGET, ratios(ways, (4, CORRECTED), fresh), quick=quick
        ),
        "the same, held back 8, uncorrected over corrected (the set-up counts)": report.at_least(
            WORSE_TARGET, ratios(ways, (8, UNCORRECTED), (8, CORRECTED)), quick=quick
        ),
        "held-out reward at the end on fresh data, at least": report.at_least(END_FROM, ends, quick=quick),
        "held-out reward at the end on fresh data, at most": report.at_most(END_TO, ends, quick=quick),
    }
    return {name: replace(bar, holds=None) for name, bar in bars.items()} if quick else bars


def rows_of(ways: Ways) -> list[tuple[str, ...]]:
    threshold = threshold_of(ways[0, UNCORRECTED])
    rows: list[tuple[str, ...]] = []
    for (held_back, correction), learned in sorted(ways.items()):
        over = ratios(ways, (held_back, correction), (0, UNCORRECTED))
        last = statistics.median(one.curve.rewards[-1] for one in learned)
        reached = sum(one.curve.highest >= threshold for one in learned)
        rows.append(
            (
                "fresh" if not held_back else f"held back {held_back}, {correction}",
                f"{statistics.median(one.needed(threshold) for one in learned):,.0f}",
                f"{statistics.median(over):.3f} ({min(over):.3f} to {max(over):.3f})",
                f"{reached} of {len(learned)}",
                f"{last:.3f}",
            )
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description="How much staleness costs, with and without correction.")
    parser.add_argument("--quick", action="store_true", help="a few steps of each: ends within a minute")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="trials at a time")
    parser.add_argument("--lessons", type=Path, help="a file that keeps trials; those in it are not repeated")
    parser.add_argument("--plot", type=Path, help="a PNG to draw the curves to")
    options = parser.parse_args()
    load, size = Load(), QUICK if options.quick else FULL
    trials = trials_of(size, options.jobs, options.lessons)
    ways = by_way(trials)
    if options.plot is not None:
        draw(ways, threshold_of(ways[0, UNCORRECTED]), options.plot)
    report.show(
        "staleness",
        ("data", "samples needed", "over fresh", "reached", "held out at the end"),
        rows_of(ways),
        bars_of(ways, options.quick),
        quick=options.quick,
        threshold=round(threshold_of(ways[0, UNCORRECTED]), 4),
        interval_95_at_4=interval(ratios(ways, (4, CORRECTED), (0, UNCORRECTED))),
        lessons=[{**trial.row(), "rewards": rounded(trial.rewards, 4)} for trial in trials],
        **load.shares(),
    )


if __name__ == "__main__":
    main()
