"""Trains the same runs near and far, and judges their published weights."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from benchmarks import report
from benchmarks.common.learning import Curve, HeldOut, Learned, Size
from benchmarks.common.runs import MASTER
from benchmarks.wan.far_link import Distance
from benchmarks.wan.swarms import Swarm, far, near
from offbeat.trainer.checkpoint import Checkpoints

NEAR, FAR = "near", "far"
DISTANCE = Distance(bytes_per_s=20e6 / 8, round_trip_s=0.1, loss=0.01, retransmission_s=0.2)
LATE = 0.25
"""Share of the run's steps after which the last worker joins."""
GROUPS_PER_STEP, GROUP_SIZE = 32, 8
LEVEL, MAX_NEW_TOKENS = 2, 32
SETTINGS = (
    *("--run.name=a", "--model.dtype=bfloat16", "--schedule.mode=overlap", "--optimizer.lr=1e-4", "--eval.every=0"),
    *(f"--batch.groups-per-step={GROUPS_PER_STEP}", f"--batch.group-size={GROUP_SIZE}"),
    *(f"--rollout.max-new-tokens={MAX_NEW_TOKENS}", "--rollout.slots=16", "--rollout.lease-s=6"),
    *("--run.threads=1", "--log.console=quiet"),
)
"""Settings of the demo with two changes: fewer slots, so that each of three workers has work in every step, and short
leases, because a worker reports what it fetched three times per lease."""


@dataclass(frozen=True)
class Outcome:
    """A run and its learning curve."""

    swarm: Swarm
    learned: Learned


Outcomes = Mapping[str, Sequence[Outcome]]

say = partial(report.say, "wan")


class Bench:
    """Trains runs and judges all of them in the same way."""

    def __init__(self, size: Size, folder: Path):
        self.size, self.folder = size, folder
        self.judge = HeldOut(
            "offbeat-tiny", 0.0, MAX_NEW_TOKENS, level=LEVEL, num_problems=size.prompts, samples_per_problem=1
        )
        self.first_reward = self.judge.reward()

    def run(self, where: str, seed: int) -> Outcome:
        points, folder = self.size.steps // self.size.save_every, self.folder / f"{where}-{seed}"
        settings = (
            *SETTINGS,
            *(f"--run.seed={seed}", f"--run.steps={self.size.steps}"),
            *(f"--checkpoint.every={self.size.save_every}", f"--checkpoint.keep={points + 1}"),
        )
        if where == NEAR:
            swarm = near(folder, settings)
        else:
            swarm = asyncio.run(far(folder, settings, DISTANCE, seed, late_after=max(1, int(LATE * self.size.steps))))
        return Outcome(swarm, self._judged(swarm))

    def _judged(self, swarm: Swarm) -> Learned:
        steps = range(self.size.save_every, self.size.steps + 1, self.size.save_every)
        rewards = [self.judge.reward(published(swarm.run, step)) for step in steps]
        samples = [step * GROUPS_PER_STEP * GROUP_SIZE for step in steps]
        summary = json.loads((swarm.run / "summary.json").read_text())
        return Learned(Curve([0, *samples], [self.first_reward, *rewards]), summary["max_staleness_trained"])


def published(run: Path, step: int) -> dict[str, Tensor]:
    """Returns the weights that were published after a step: those of its checkpoint, rounded to bfloat16."""
    _, tensors = Checkpoints(run / "checkpoints").load(step)
    return {
        name.removeprefix(MASTER): tensor.to(torch.bfloat16)
        for name, tensor in tensors.items()
        if name.startswith(MASTER)
    }


def outcomes_of(folder: Path, size: Size) -> Outcomes:
    bench = Bench(size, folder)
    outcomes: dict[str, list[Outcome]] = {NEAR: [], FAR: []}
    for seed in range(1, size.seeds + 1):
        for where, found in outcomes.items():
            found.append(bench.run(where, seed))
            swarm, learned = found[-1].swarm, found[-1].learned
            say(
                f"{where}, seed {seed}: held-out reward {learned.curve.start:.3f} to {learned.curve.rewards[-1]:.3f}, "
                f"tokens up to {learned.max_staleness} steps old, {swarm.seconds:.0f} s"
            )
    return outcomes
