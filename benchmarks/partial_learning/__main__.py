"""Learning with and without partial rollouts: `python -m benchmarks.partial_learning [--quick] [--jobs N]`.

Trains the hard arithmetic task with a long tail with GRPO, DAPO and GSPO. Each trial runs once with partial rollouts
(`max_staleness = 4`, the over-provision factor chosen during the run, keys and values kept over versions) and once
without (`max_staleness = 0`), with the same seed and problems. Compares the samples, and the seconds of training, until
80 % of the gain of training without partial rollouts is reached.

`--lessons FILE` appends each trial to a file as a line and does not repeat trials in it; `--loss NAME` runs the trials
of one loss. If `--jobs` divides the number of trials, all trials share the machine evenly, with equal neighbours.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from benchmarks import report
from benchmarks.common.learning import Curve, Learned, interval, threshold_of
from benchmarks.common.load import Load
from benchmarks.common.trials import run_trials
from benchmarks.partial_learning.trial import Plan, Size, Trial, run_trial

LOSSES = ("grpo", "dapo", "gspo")
SAMPLES_TARGET, SECONDS_TARGET = 1.1, 0.8
FIRST_SEED = 11
FULL = Size(steps=160, judge_every=10, prompts=400, seeds=5)
QUICK = Size(steps=4, judge_every=2, prompts=40, seeds=1)

Ways = Mapping[tuple[str, bool], Sequence[Trial]]

say = partial(report.say, "partial_learning")


def plans_of(size: Size, losses: Sequence[str]) -> list[Plan]:
    """Returns the plans, with both plans of a seed next to each other, so that they run at the same time."""
    seeds = range(FIRST_SEED, FIRST_SEED + size.seeds)
    return [Plan(loss, is_partial, seed) for loss in losses for seed in seeds for is_partial in (False, True)]


def trials_of(size: Size, losses: Sequence[str], jobs: int, kept: Path | None) -> Ways:
    wanted = plans_of(size, losses)

    def tell(trial: Trial, num_given: int) -> None:
        plan, way = trial.plan, "partial" if trial.plan.is_partial else "whole"
        say(
            f"{plan.loss}, {way}, seed {plan.seed}: {trial.rewards[0]:.3f} to {trial.rewards[-1]:.3f} in "
            f"{trial.seconds[-1]:.0f} s, off-policy {trial.off_policy_share:.0%} ({num_given} of {len(wanted)})"
        )

    ways: dict[tuple[str, bool], list[Trial]] = {}
    for trial in run_trials(wanted, partial(run_trial, size=size), jobs, kept, Trial.from_row, tell):
        ways.setdefault((trial.plan.loss, trial.plan.is_partial), []).append(trial)
    return ways


def by_samples(trials: Sequence[Trial]) -> list[Learned]:
    return [Learned(Curve(trial.samples, trial.rewards), trial.max_staleness) for trial in trials]


def by_seconds(trials: Sequence[Trial]) -> list[Learned]:
    return [Learned(Curve(trial.seconds, trial.rewards), trial.max_staleness) for trial in trials]


def ratios(ways: Ways, loss: str) -> tuple[list[float], list[float]]:
    """Returns for each seed the samples and seconds needed with partial rollouts, over those needed without."""
    threshold = threshold_of(by_samples(ways[loss, False]))
    found = []
    for measured in (by_samples, by_seconds):
        pairs = zip(measured(ways[loss, True]), measured(ways[loss, False]), strict=True)
        found.append([ours.needed(threshold) / other.needed(threshold) for ours, other in pairs])
    return found[0], found[1]


def bars_of(ways: Ways, quick: bool) -> dict[str, report.Bar]:
    bars = {}
    for loss in _losses(ways):
        samples, seconds = ratios(ways, loss)
        bars[f"{loss}: samples to 80% of the gain, partial over whole"] = report.at_most(
            SAMPLES_TARGET, samples, quick=quick
        )
        bars[f"{loss}: seconds to it, partial over whole"] = report.at_most(SECONDS_TARGET, seconds, quick=quick)
    return {name: replace(bar, holds=None) for name, bar in bars.items()} if quick else bars


def rows_of(ways: Ways) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for loss in _losses(ways):
        threshold = threshold_of(by_samples(ways[loss, False]))
        for is_partial in (False, True):
            trials = ways[loss, is_partial]
            learned = by_samples(trials)
            rows.append(
                (
                    f"{loss}, {'partial' if is_partial else 'whole'}",
                    f"{statistics.median(one.needed(threshold) for one in learned):,.0f}",
                    f"{statistics.median(one.needed(threshold) for one in by_seconds(trials)):.1f}",
                    f"{sum(one.curve.highest >= threshold for one in learned)} of {len(learned)}",
                    f"{statistics.median(trial.rewards[-1] for trial in trials):.3f}",
                    f"{statistics.median(trial.off_policy_share for trial in trials):.0%}",
                    f"{statistics.median(trial.generate_share for trial in trials):.0%}",
                )
            )
    return rows


def _losses(ways: Ways) -> list[str]:
    return [loss for loss in LOSSES if (loss, False) in ways]


def main() -> None:
    parser = argparse.ArgumentParser(description="Whether partial rollouts hurt learning, and what they save.")
    parser.add_argument("--quick", action="store_true", help="a few steps of each: ends within a minute")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="trials at a time")
    parser.add_argument("--lessons", type=Path, help="a file that keeps trials; those in it are not repeated")
    parser.add_argument("--loss", choices=LOSSES, action="append", help="one of the losses; may be given again")
    options = parser.parse_args()
    load, size = Load(), QUICK if options.quick else FULL
    losses = options.loss or (LOSSES[:1] if options.quick else LOSSES)
    ways = trials_of(size, losses, options.jobs, options.lessons)
    told = {loss: ratios(ways, loss) for loss in _losses(ways)}
    report.show(
        "partial_learning",
        ("run", "samples needed", "seconds needed", "reached", "held out at the end", "off-policy", "waiting"),
        rows_of(ways),
        bars_of(ways, options.quick),
        quick=options.quick,
        intervals_95={
            loss: {"samples": interval(samples), "seconds": interval(seconds)}
            for loss, (samples, seconds) in told.items()
        },
        lessons=[trial.row() for trials in ways.values() for trial in trials],
        **load.shares(),
    )


if __name__ == "__main__":
    main()
