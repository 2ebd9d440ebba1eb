"""How many samples each schedule needs to learn the same: real engines, a task too hard to be learned at once.

Pairs of whole runs through the command line, one with `alternate` (every token from the weights that it trains) and one
with `overlap` (tokens up to four steps older), with the same seed, prompts and settings. Their weights are judged alike
afterwards, on held-out problems that neither saw.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.peers.learning import WAY, Curve, HeldOut
from benchmarks.peers.runs import Job, train_with_offbeat
from offbeat.errors import OffbeatError

LEVEL = 3
"""Where training in order goes from 0.24 to about 0.8 in forty steps: neither hopeless nor soon exhausted."""
MAX_NEW_TOKENS = 24
T_95 = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45}
"""Student's t for a two-sided 95 % interval, by the number of values."""


@dataclass(frozen=True)
class Size:
    """How much is trained and judged."""

    seeds: int
    steps: int
    save_every: int
    prompts: int


@dataclass(frozen=True)
class Learned:
    """A run as it was judged."""

    curve: Curve
    max_staleness: int
    """The oldest token that it trained, in steps."""

    def needed(self, threshold: float) -> float:
        """Samples until the held-out reward is there; where it never is, all that there were."""
        try:
            return self.curve.crossing(threshold)
        except OffbeatError:
            return float(self.curve.samples[-1])


class Classroom:
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


def threshold_of(in_order: Sequence[Learned]) -> float:
    """Most of the way from the first reward to what training in order reaches."""
    start = statistics.fmean(learned.curve.start for learned in in_order)
    return start + WAY * (statistics.median(learned.curve.highest for learned in in_order) - start)


def interval(ratios: Sequence[float]) -> tuple[float, float] | None:
    """A 95 % interval of the mean ratio, on a logarithmic scale; None where there are too few."""
    if len(ratios) not in T_95:
        return None
    logs = [math.log(ratio) for ratio in ratios]
    half = T_95[len(logs)] * statistics.stdev(logs) / math.sqrt(len(logs))
    centre = statistics.fmean(logs)
    return round(math.exp(centre - half), 3), round(math.exp(centre + half), 3)
