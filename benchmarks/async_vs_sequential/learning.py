"""Numbers of samples that each schedule needs to learn the same, with real engines and a task that takes a while.

Pairs of whole runs are started through the command line, one with `alternate` (tokens come from the weights that are
trained) and one with `overlap` (tokens may be up to four steps older), with the same seed, prompts and settings. Their
weights are judged in the same way afterwards, on held-out problems that neither run saw.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.common.learning import Curve, HeldOut, Learned, Size, interval, rounded, threshold_of
from benchmarks.common.runs import Job, train_with_offbeat

LEVEL = 3
"""Level of the problems. Without staleness, the reward rises from 0.24 to about 0.8 in forty steps, so the level is
neither too hard nor solved too soon."""
MAX_NEW_TOKENS = 24
SAMPLES_TARGET = 1.1
ALTERNATE, OVERLAP = "alternate", "overlap"
Curves = Mapping[str, Sequence[Learned]]
say = partial(report.say, "async_vs_sequential")


class ScheduleTrials:
    """Runs schedules and judges what they learned."""

    def __init__(self, size: Size, folder: Path):
        self.size, self.folder = size, folder
        self.judge = HeldOut(
            "offbeat-tiny", 0.0, MAX_NEW_TOKENS, level=LEVEL, num_problems=size.prompts, samples_per_problem=1
        )
        self.first_reward = self.judge.reward()

    def learn(self, schedule: str, seed: int) -> Learned:
        job = Job(
            seed=seed,
            steps=self.size.steps,
            tail=0.0,
            max_new_tokens=MAX_NEW_TOKENS,
            level=LEVEL,
            save_every=self.size.save_every,
            schedule=schedule,
        )
        run = train_with_offbeat(job, self.folder / f"{schedule}-{seed}")
        summary = json.loads((run.folder / "run" / "summary.json").read_text())
        samples = [0, *(step * job.samples_per_step for step in job.save_at)]
        rewards = [self.first_reward, *(self.judge.reward(run.weights(step)) for step in job.save_at)]
        return Learned(Curve(samples, rewards), summary["max_staleness_trained"])


def learn_all(folder: Path, size: Size) -> Curves:
    trials = ScheduleTrials(size, folder)
    learned_by: dict[str, list[Learned]] = {ALTERNATE: [], OVERLAP: []}
    for seed in range(1, size.seeds + 1):
        for schedule, learned in learned_by.items():
            learned.append(trials.learn(schedule, seed))
            last = learned[-1]
            say(
                f"{schedule}, seed {seed}: held-out reward {last.curve.start:.3f} to {last.curve.rewards[-1]:.3f}, "
                f"tokens up to {last.max_staleness} steps old"
            )
    return learned_by


def ratios_of(learned_by: Curves) -> list[float]:
    threshold = threshold_of(learned_by[ALTERNATE])
    pairs = zip(learned_by[OVERLAP], learned_by[ALTERNATE], strict=True)
    return [ours.needed(threshold) / other.needed(threshold) for ours, other in pairs]


def learning_bars(learned_by: Curves, quick: bool) -> dict[str, report.Bar]:
    bar = report.at_most(SAMPLES_TARGET, ratios_of(learned_by), quick=quick)
    return {"samples to 80% of the gain, overlap over alternate": replace(bar, holds=None) if quick else bar}


def learning_rows(learned_by: Curves) -> list[tuple[str, str, str]]:
    threshold = threshold_of(learned_by[ALTERNATE])
    rows = []
    for schedule, learned in learned_by.items():
        needed = statistics.median(one.needed(threshold) for one in learned)
        last = statistics.median(one.curve.rewards[-1] for one in learned)
        oldest = max(one.max_staleness for one in learned)
        told = f"held out at the end {last:.3f}; tokens up to {oldest} steps old"
        rows.append((f"{schedule}, to {threshold:.3f} held out", f"{needed:,.0f} samples", told))
    return rows


def learning_raw(learned_by: Curves) -> dict[str, Any]:
    threshold = threshold_of(learned_by[ALTERNATE])
    return {
        "threshold": round(threshold, 4),
        "ratio_interval_95": interval(ratios_of(learned_by)),
        "samples": list(learned_by[ALTERNATE][0].curve.samples),
        "held_out": {name: [rounded(one.curve.rewards, 4) for one in learned] for name, learned in learned_by.items()},
        "samples_needed": {
            name: [round(one.needed(threshold)) for one in learned] for name, learned in learned_by.items()
        },
        "max_staleness": {name: [one.max_staleness for one in learned] for name, learned in learned_by.items()},
    }
