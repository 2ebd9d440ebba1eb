"""Runs of both systems in pairs, one for each seed, and the bars of their figures."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.common.learning import Curve, HeldOut, common_threshold
from benchmarks.common.runs import Job, Run, train_with_offbeat
from benchmarks.demo_vs_trl.trl_runs import train_with_trl

say = partial(report.say, "demo_vs_trl")
SPINNING = {"GOMP_SPINCOUNT": "300000"}
"""How threads wait where nobody says: without it, TRL inherits from here what Offbeat sets, which is mostly faster."""
CANDIDATES: Mapping[str, Sequence[Mapping[str, Any]]] = {
    "demo": [
        {"samples_per_microbatch": 64},
        {"samples_per_microbatch": 64, "environment": SPINNING},
        {"samples_per_microbatch": 64, "threads": 1},
        {"samples_per_microbatch": 128},
    ],
    "long tail": [
        {"samples_per_microbatch": 16, "samples_per_generation": 16},
        {"samples_per_microbatch": 16, "samples_per_generation": 16, "environment": SPINNING},
        {"samples_per_microbatch": 8, "samples_per_generation": 8},
        {"samples_per_microbatch": 8, "samples_per_generation": 8, "threads": 1},
    ],
}
"""Settings of TRL of which the fastest on the machine at hand is compared with; the first where time is short.

What was tried besides, in CPU seconds a step on one core. Demo, 0.9 with micro-batches of 64 samples: 256 1.2, 32 1.3;
generating 64 samples at a time 1.05; eager attention or a static KV cache 15 % slower; transformers' continuous
batching 2.5 with a cache sized by hand, 15 with its own. Long tail, 6 to 7.5 when 8 or 16 samples are generated and
back-propagated at a time, because padding and waiting then end at the longest of these: 32 10.9, 64 12.8, all 256
generated at once 22 to 30, whatever the micro-batch.
"""
SAMPLES_TARGET = 1.1
BUSY_SHARE = 0.1
"""Share of the cores in use by other processes above which a single pair of runs says nothing about speed."""


@dataclass(frozen=True)
class Setting:
    """A task on which the two systems are compared."""

    name: str
    tail: float
    max_new_tokens: int
    speed_target: float
    """Samples per second, Offbeat's over TRL's."""


@dataclass(frozen=True)
class Effort:
    """Number and length of the runs of a setting."""

    repeats: int
    steps: int
    num_warmup: int
    save_every: int = 0
    """Steps between judged weights; 0 judges none."""
    trial_steps: int = 0
    """Steps in which each candidate setting of TRL is tried first; 0 takes the first candidate untried."""


DEMO = Setting("demo", tail=0.0, max_new_tokens=32, speed_target=1.5)
LONG_TAIL = Setting("long tail", tail=0.3, max_new_tokens=400, speed_target=3.0)
FULL = {
    "demo": Effort(repeats=5, steps=60, num_warmup=5, save_every=3, trial_steps=10),
    "long tail": Effort(repeats=5, steps=12, num_warmup=2, trial_steps=4),
}
QUICK = {
    "demo": Effort(repeats=1, steps=8, num_warmup=2, save_every=4),
    "long tail": Effort(repeats=1, steps=3, num_warmup=1),
}


@dataclass
class Pairs:
    """The runs of one setting; each repeat has its own seed, the same for both systems."""

    setting: Setting
    effort: Effort
    trl: list[Run] = field(default_factory=list)
    offbeat: list[Run] = field(default_factory=list)
    trl_settings: Mapping[str, Any] = field(default_factory=dict)

    def job(self, seed: int, steps: int, trl: Mapping[str, Any], save_every: int = 0) -> Job:
        return Job(seed, steps, self.setting.tail, self.setting.max_new_tokens, save_every=save_every, trl=trl)

    def choose(self, folder: Path, python: Path) -> None:
        """Determines which settings make TRL fastest on this machine."""
        candidates, steps = CANDIDATES[self.setting.name], self.effort.trial_steps
        self.trl_settings = candidates[0]
        if not steps:
            return
        best = 0.0
        for i, settings in enumerate(candidates):
            run = train_with_trl(self.job(0, steps, settings), folder / f"trial-{i}", python)
            rate = run.samples_per_second(num_warmup=steps // 3)
            say(f"{self.setting.name}: TRL with {settings}: samples/s {rate:.0f}")
            if rate > best:
                best, self.trl_settings = rate, settings

    def train(self, folder: Path, python: Path) -> None:
        for seed in range(self.effort.repeats):
            job = self.job(seed, self.effort.steps, self.trl_settings, self.effort.save_every)
            place = folder / str(seed)
            self.trl.append(train_with_trl(job, place / "trl", python))
            self.offbeat.append(train_with_offbeat(job, place / "offbeat"))
            rates = ", ".join(f"{run.system} {self.rate(run):.0f}" for run in (self.trl[-1], self.offbeat[-1]))
            say(f"{self.setting.name}, repeat {seed + 1} of {self.effort.repeats}: samples/s {rates}")

    def rate(self, run: Run) -> float:
        return run.samples_per_second(self.effort.num_warmup)

    def speed_ratios(self) -> list[float]:
        """Offbeat's samples per second over TRL's, repeat by repeat.

        A single repeat is flanked by the ratios of slow to fast steps both ways: what it leaves open.
        """
        pairs = list(zip(self.trl, self.offbeat, strict=True))
        ratios = [self.rate(ours) / self.rate(theirs) for theirs, ours in pairs]
        if len(ratios) > 1:
            return ratios
        fast_trl, slow_trl = self.trl[0].step_quartiles_s(self.effort.num_warmup)
        fast_offbeat, slow_offbeat = self.offbeat[0].step_quartiles_s(self.effort.num_warmup)
        return [fast_trl / slow_offbeat, *ratios, slow_trl / fast_offbeat]

    def others_share(self) -> float:
        return max(run.others_share for run in (*self.trl, *self.offbeat))

    def speed_bar(self, *, quick: bool) -> report.Bar:
        bar = report.at_least(self.setting.speed_target, self.speed_ratios(), quick=quick)
        return replace(bar, holds=None) if quick and self.others_share() > BUSY_SHARE else bar


def curves_of(runs: Sequence[Run], judge: HeldOut, start: float) -> list[Curve]:
    """Returns the held-out reward along each run; all start from the same model, which is judged once."""
    curves = []
    for run in runs:
        rewards = [judge.reward(run.weights(step)) for step in run.job.save_at]
        samples = [step * run.job.samples_per_step for step in run.job.save_at]
        curves.append(Curve([0, *samples], [start, *rewards]))
    return curves


def samples_bar(trl: Sequence[Curve], offbeat: Sequence[Curve], *, quick: bool) -> tuple[report.Bar, dict[str, Any]]:
    """Returns the bar for mean samples to the common threshold, Offbeat's over TRL's, with the spread of repeats."""
    threshold = common_threshold([*trl, *offbeat])
    theirs, ours = ([curve.crossing(threshold) for curve in curves] for curves in (trl, offbeat))
    ratios = [b / a for a, b in zip(theirs, ours, strict=True)]
    value = statistics.mean(ours) / statistics.mean(theirs)
    holds = None if quick else value <= SAMPLES_TARGET  # one pair of short runs decides nothing
    bar = report.Bar(round(value, 3), SAMPLES_TARGET, holds, (round(min(ratios), 3), round(max(ratios), 3)))
    return bar, {"threshold": threshold, "trl_samples": theirs, "offbeat_samples": ours}
