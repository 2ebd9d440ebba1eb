"""Workers far away against workers on one disk: `python -m benchmarks.wan [--quick]`.

The demo's task and model, trained with `overlap` by a coordinator, a trainer and three workers (`links.swarms`), twice
with the same seed and settings:

- near: all on one disk;
- far: each worker behind a line of 20 Mbit/s with a round trip of 100 ms and 1 % of loss, modelled as what TCP makes of
  it: a stall of 200 ms on a connection for each lost segment of 1460 bytes (`links.far`). Versions travel to them as
  what changed, in verified pieces, and one of the three joins when a part of the run is over.

Compared are the samples until most of the gain of the near runs is reached, on held-out problems that no run saw and by
the weights that were published, and how much of a step generation stands still for its new weights. Beside them stand
wall-clock and bytes. A quick run trains for a few steps and decides nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import report
from benchmarks.links.far import Distance
from benchmarks.links.swarms import WORKERS, Swarm, far, near
from benchmarks.load import Load
from benchmarks.peers.learning import Curve, HeldOut, rounded
from benchmarks.peers.runs import MASTER
from benchmarks.schedules.learning import Learned, Size, interval, threshold_of
from offbeat.learn.checkpoint import Checkpoints

SAMPLES_TARGET, STILL_TARGET = 1.1, 0.02
NEAR, FAR = "near", "far"
DISTANCE = Distance(bytes_per_s=20e6 / 8, round_trip_s=0.1, loss=0.01, retransmission_s=0.2)
FULL, QUICK = Size(seeds=3, steps=33, save_every=3, prompts=1000), Size(seeds=1, steps=3, save_every=1, prompts=100)
LATE = 0.25
"""The share of the run's steps after which the last worker joins."""
GROUPS_PER_STEP, GROUP_SIZE = 32, 8
LEVEL, MAX_NEW_TOKENS = 2, 32
SETTINGS = (
    *("--run.name=a", "--model.dtype=bfloat16", "--schedule.mode=overlap", "--optimizer.lr=1e-4", "--eval.every=0"),
    *(f"--batch.groups-per-step={GROUPS_PER_STEP}", f"--batch.group-size={GROUP_SIZE}"),
    *(f"--rollout.max-new-tokens={MAX_NEW_TOKENS}", "--rollout.slots=16", "--rollout.lease-s=6"),
    *("--run.threads=1", "--log.console=quiet"),
)
"""The demo's, with fewer slots, so that each of three workers has something to do in every step, and short leases: with
each third of one, a worker tells what it fetched."""


@dataclass(frozen=True)
class Outcome:
    """A run, and what it learned."""

    swarm: Swarm
    learned: Learned


Outcomes = Mapping[str, Sequence[Outcome]]


def say(text: str) -> None:
    print(f"wan: {text}", file=sys.stderr, flush=True)


class Bench:
    """Lets runs be trained and judges them, all alike."""

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
    """The weights that were published after a step: its checkpoint's, rounded as they were."""
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


def ratios_of(outcomes: Outcomes) -> list[float]:
    threshold = threshold_of([outcome.learned for outcome in outcomes[NEAR]])
    pairs = zip(outcomes[FAR], outcomes[NEAR], strict=True)
    return [ours.learned.needed(threshold) / other.learned.needed(threshold) for ours, other in pairs]


def bars_of(outcomes: Outcomes, quick: bool) -> dict[str, report.Bar]:
    still = [outcome.swarm.still_share() for outcome in outcomes[FAR]]
    bars = {
        "samples to 80% of the gain, far over near": report.at_most(SAMPLES_TARGET, ratios_of(outcomes), quick=quick),
        "share of a step that generation stands still, far": report.at_most(STILL_TARGET, still, quick=quick),
    }
    return {name: replace(bar, holds=None) if quick else bar for name, bar in bars.items()}


def rows_of(outcomes: Outcomes) -> list[tuple[str, str, str]]:
    threshold = threshold_of([outcome.learned for outcome in outcomes[NEAR]])
    kinds = sorted({kind for outcome in outcomes[FAR] for kind in outcome.swarm.traffic.num_bytes()})

    def median(where: str, figure: Callable[[Outcome], float], form: str) -> str:
        return format(statistics.median(figure(outcome) for outcome in outcomes[where]), form)

    def both(what: str, figure: Callable[[Outcome], float], form: str) -> tuple[str, str, str]:
        return what, median(NEAR, figure, form), median(FAR, figure, form)

    def only_far(what: str, figure: Callable[[Swarm], float], form: str = ",.1f") -> tuple[str, str, str]:
        return what, "", median(FAR, lambda outcome: figure(outcome.swarm), form)

    def fetched(kind: str) -> Callable[[Swarm], float]:
        return lambda swarm: swarm.traffic.num_bytes().get(kind, 0) / 1e6

    return [
        both(f"samples to {threshold:.3f} held out", lambda one: one.learned.needed(threshold), ",.0f"),
        both("held out at the end", lambda one: one.learned.curve.rewards[-1], ".3f"),
        both("oldest token trained, steps", lambda one: one.learned.max_staleness, ".0f"),
        both("seconds of the run", lambda one: one.swarm.seconds, ".0f"),
        both("seconds of a step", lambda one: one.swarm.step_s(), ".2f"),
        only_far("share of a step that generation stands still", lambda swarm: swarm.still_share(), ".2%"),
        *(only_far(f"MB of weights fetched, {kind}", fetched(kind)) for kind in kinds),
        only_far("MB they would be as whole files", lambda swarm: whole_bytes(swarm) / 1e6),
        only_far("MB over the lines, to workers", lambda swarm: swarm.traffic.num_bytes_down / 1e6),
        only_far("MB over the lines, from workers", lambda swarm: swarm.traffic.num_bytes_up / 1e6),
        only_far("segments lost", lambda swarm: swarm.traffic.num_lost, ",.0f"),
    ]


def whole_bytes(swarm: Swarm) -> int:
    """What workers would have fetched, had each version come as its whole file."""
    newest = max(swarm.run.glob("weights/[0-9]*/model.safetensors"))
    return swarm.traffic.num_versions() * newest.stat().st_size


def raw_of(outcomes: Outcomes) -> dict[str, Any]:
    threshold = threshold_of([outcome.learned for outcome in outcomes[NEAR]])

    def told(outcome: Outcome) -> dict[str, Any]:
        swarm, learned = outcome.swarm, outcome.learned
        return {
            "held_out": rounded(learned.curve.rewards, 4),
            "samples_needed": round(learned.needed(threshold)),
            "max_staleness": learned.max_staleness,
            "seconds": round(swarm.seconds, 1),
            "step_s": round(swarm.step_s(), 3),
            "density": [row.get("weights_density") for row in swarm.steps()],
            "whole_bytes": whole_bytes(swarm),
            **asdict(swarm.traffic),
        }

    return {
        "threshold": round(threshold, 4),
        "ratio_interval_95": interval(ratios_of(outcomes)),
        "samples": list(outcomes[NEAR][0].learned.curve.samples),
        "runs": {where: [told(outcome) for outcome in found] for where, found in outcomes.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Workers far away against workers on one disk.")
    parser.add_argument("--quick", action="store_true", help="a few steps: ends within a minute, decides nothing")
    options = parser.parse_args()
    load, quick = Load(), options.quick
    cache = report.REPOSITORY / ".cache"
    cache.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache, prefix="wan-") as folder:
        outcomes = outcomes_of(Path(folder), QUICK if quick else FULL)
        report.show(
            "wan",
            ("median", "near: one disk", f"far: {len(WORKERS)} lines"),
            rows_of(outcomes),
            bars_of(outcomes, quick),
            quick=quick,
            distance=asdict(DISTANCE),
            **load.shares(),
            **raw_of(outcomes),
        )


if __name__ == "__main__":
    main()
