"""Workers far away against workers on one disk: `python -m benchmarks.wan [--quick]`.

The demo's task and model, trained with `overlap` by a coordinator, a trainer and three workers (`swarms.py`), twice
with the same seed and settings:

- near: all on one disk;
- far: each worker behind a line of 20 Mbit/s with a round trip of 100 ms and 1 % loss. Loss is modelled by its effect
  on TCP: each lost segment of 1460 bytes stalls its connection for 200 ms (`far_link.py`). Versions reach workers as
  deltas in verified pieces. One of the three workers joins after a part of the run.

Compares the samples needed to reach most of the near runs' gain, judged by the published weights on held-out problems,
and the share of a step in which generation stands still for new weights. Also shows wall-clock times and bytes. A quick
run trains for a few steps and decides nothing.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

from benchmarks import report
from benchmarks.common.learning import Size, interval, rounded, threshold_of
from benchmarks.common.load import Load
from benchmarks.wan.learning import DISTANCE, FAR, NEAR, Outcome, Outcomes, outcomes_of
from benchmarks.wan.swarms import WORKERS, Swarm

SAMPLES_TARGET, STILL_TARGET = 1.1, 0.02
FULL, QUICK = Size(seeds=3, steps=33, save_every=3, prompts=1000), Size(seeds=1, steps=3, save_every=1, prompts=100)


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
    """Bytes that workers would have fetched if each version had come as a whole file."""
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
    with report.scratch("wan") as folder:
        outcomes = outcomes_of(folder, QUICK if quick else FULL)
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
