"""AReaL's staleness rule against Offbeat's, simulated: `python -m benchmarks.staleness_rule [--quick]`.

AReaL bounds staleness when work is admitted; what overtakes a long answer lets it grow older than the bound. Offbeat
also checks every token when a batch is claimed, and waits for groups at their last chance. Both run on the same fleet,
with the same lengths, at bounds 1, 2, 4 and 8, on three laws of answer lengths, and with a trainer that is faster than
generation, as fast, or slower. Reports the share of trained answers with a token over the bound, the tokens trained per
second, and the share of tokens that Offbeat masks as too old, by answer length.
"""

from __future__ import annotations

import argparse
import statistics
from collections import Counter
from dataclasses import dataclass, replace

from benchmarks import report
from benchmarks.common.load import Load
from offbeat.simulator.baselines import AREAL, OFFBEAT
from offbeat.simulator.fleet import WorkerClass
from offbeat.simulator.lengths import Law, Lengths, LogNormal, constant, of_samples
from offbeat.simulator.memory_ledger import LedgerSettings
from offbeat.simulator.replica import EngineSpeed, linear
from offbeat.simulator.simulation import Scenario, Simulation, TrainerModel

BOUNDS, CAPACITIES = (1, 2, 4, 8), (0.8, 1.0, 1.25)
GROUPS_PER_STEP, GROUP_SIZE, NUM_WORKERS, SLOTS, MAX_TOKENS = 16, 8, 4, 8, 16_000
BASE_S, PER_ROW_S = 0.01, 0.0001
WITHIN_TARGET, ALL_TARGET = 1.0, 0.98
MIXED = tuple(
    length
    for mode, count in ((500.0, 80), (6000.0, 20))
    for length in (round(mode * 2.718281828 ** (0.3 * z)) for z in (-1.6, -1, -0.5, 0, 0.5, 1, 1.6))
    for _ in range(count)
)
LAWS: dict[str, Law] = {
    "log-normal 1000, sigma 1": LogNormal(1000, 1.0, MAX_TOKENS),
    "log-normal 2000, sigma 1": LogNormal(2000, 1.0, MAX_TOKENS),
    "four fifths 500, one fifth 6000": of_samples(MIXED),
}


@dataclass(frozen=True)
class Point:
    """Both rules on one law, bound and capacity."""

    law: str
    bound: int
    capacity: float
    theirs_over: float
    """Share of trained answers with a token over the bound."""
    ours_over: int
    within: float
    """Our trained tokens/s over their tokens/s within the bound."""
    of_all: float
    """Our trained tokens/s over all of theirs."""
    masked: float
    """Share of the tokens in our batches that are masked."""


def lengths_of(law: str, seed: int) -> Lengths:
    return Lengths(LAWS[law], GROUP_SIZE, prompt=constant(200), longest=MAX_TOKENS, shared=0.5, seed=seed)


def mean_length(law: str) -> float:
    drawn = lengths_of(law, 99)
    return statistics.fmean(length for _ in range(2000) for length in drawn.draw()[0])


def scenario_of(law: str, bound: int, capacity: float, num_steps: int) -> Scenario:
    """`capacity` is that of generation over that of training."""
    tokens_per_s = NUM_WORKERS * SLOTS / (BASE_S + PER_ROW_S * SLOTS)
    step_s = capacity * GROUPS_PER_STEP * GROUP_SIZE * mean_length(law) / tokens_per_s
    return Scenario(
        (WorkerClass("worker", NUM_WORKERS, SLOTS, EngineSpeed(linear(BASE_S, PER_ROW_S, SLOTS))),),
        LedgerSettings(GROUPS_PER_STEP, bound, num_steps + 2 * bound + 2),
        TrainerModel(fixed_s=step_s),
        overlap=True,
        over_provision="auto",
        num_warmup=num_steps // 3,
        num_measured=num_steps,
    )


def compare(law: str, bound: int, capacity: float, num_steps: int, seed: int, masked: Counter[str]) -> Point:
    scenario = scenario_of(law, bound, capacity, num_steps)
    runs = []
    for baseline in (OFFBEAT, AREAL):
        simulation = Simulation(replace(scenario, baseline=baseline), lengths_of(law, seed))
        simulation.run()
        assert simulation.missing_tokens() == 0
        runs.append(simulation)
    ours, theirs = runs
    rates = []
    for simulation in runs:
        by_age = simulation.end.by_staleness - simulation.start.by_staleness
        seconds = simulation.end.at_s - simulation.start.at_s
        rates.append((by_age.total() / seconds, sum(count for age, count in by_age.items() if age <= bound) / seconds))
    for bits, count in ours.ledger.by_length.items():
        masked[f"{1 << (bits - 1)} to {(1 << bits) - 1}"] += count
        masked[f"masked {1 << (bits - 1)} to {(1 << bits) - 1}"] += ours.ledger.masked_by_length[bits]
    num_masked = ours.end.num_masked - ours.start.num_masked
    num_trained = ours.end.num_trained - ours.start.num_trained
    return Point(
        law,
        bound,
        capacity,
        (theirs.end.num_over - theirs.start.num_over) / (theirs.end.num_answers - theirs.start.num_answers),
        ours.end.num_over,
        rates[0][0] / rates[1][1],
        rates[0][0] / rates[1][0],
        num_masked / (num_masked + num_trained),
    )


def bars_of(points: list[Point], quick: bool) -> dict[str, report.Bar]:
    looser = [point.of_all for point in points if point.bound >= 2]
    return {
        "our trained answers over the bound": report.at_most(
            0, [sum(point.ours_over for point in points)], quick=False
        ),
        "their share of trained answers over the bound, largest": report.at_least(
            1e-9, [max(point.theirs_over for point in points)], quick=False
        ),
        "our trained tokens/s over theirs within the bound, smallest": report.at_least(
            WITHIN_TARGET, [min(point.within for point in points)], quick=quick
        ),
        "over all of theirs at bounds of 2 and more, smallest": report.at_least(ALL_TARGET, [min(looser)], quick=quick),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="AReaL's staleness rule against Offbeat's.")
    parser.add_argument("--quick", action="store_true", help="short runs: ends within a minute")
    options = parser.parse_args()
    load, masked = Load(), Counter[str]()
    num_steps, bounds = (18, (1, 4)) if options.quick else (60, BOUNDS)
    points = [
        compare(law, bound, capacity, num_steps, 1, masked)
        for law in LAWS
        for bound in bounds
        for capacity in CAPACITIES
    ]
    rows = [
        (
            point.law,
            str(point.bound),
            f"{point.capacity:g}",
            f"{point.theirs_over:.2%}",
            str(point.ours_over),
            f"{point.within:.3f}",
            f"{point.of_all:.3f}",
            f"{point.masked:.3%}",
        )
        for point in points
    ]
    print("share of tokens masked as too old, by answer length (Offbeat):")
    for name in sorted((name for name in masked if not name.startswith("masked")), key=lambda one: int(one.split()[0])):
        print(f"  {name:>16} tokens: {masked[f'masked {name}'] / masked[name]:.3%}")
    report.show(
        "staleness_rule",
        ("law", "bound", "gen/train", "theirs over", "ours over", "over theirs within", "over all theirs", "masked"),
        rows,
        bars_of(points, options.quick),
        quick=options.quick,
        **load.shares(),
        points=[vars(point) for point in points],
    )


if __name__ == "__main__":
    main()
