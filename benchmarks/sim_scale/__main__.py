"""Speed of the simulator at 10,000 GPUs: `python -m benchmarks.sim_scale [--quick]`.

A fleet of 10,000 GPUs in six regions trains 65,536 trajectories a step, 20 steps, with the rules of a real run. Reports
the seconds that the simulation takes on one core, the seconds per event for fleets of growing size with the same work
per worker, and what the time goes into. A quick run simulates two steps and the smaller fleets; it decides nothing
about the whole.
"""

from __future__ import annotations

import argparse
import cProfile
import io
import math
import pstats
import time
from dataclasses import dataclass
from functools import partial

from benchmarks import report
from benchmarks.common.load import Load
from offbeat.simulator.fleet import WorkerClass
from offbeat.simulator.lengths import Lengths, LogNormal
from offbeat.simulator.memory_ledger import LedgerSettings
from offbeat.simulator.replica import EngineSpeed, linear
from offbeat.simulator.simulation import CoordinatorModel, Scenario, Simulation, TrainerModel

say = partial(report.say, "sim_scale")
NUM_GPUS, TRAINER_GPUS = 10_000, 1_024
GROUP_SIZE, TRAJECTORIES_PER_STEP = 16, 65_536
SECONDS_TARGET, STRETCH_S, FLAT_TARGET = 150.0, 60.0, 1.5
NUM_STEPS = 20
SHAPES = (
    # name, GPUs of a replica, share of the rollout GPUs, slots, step of one row, per row, GB/s from the coordinator
    ("us-h200", 4, 0.30, 64, 0.012, 1.0e-4, 2.5),
    ("us-h100", 4, 0.25, 48, 0.014, 1.2e-4, 1.25),
    ("eu-h100", 4, 0.20, 48, 0.014, 1.2e-4, 0.6),
    ("eu-a100", 8, 0.15, 64, 0.016, 1.5e-4, 0.3),
    ("asia-h20", 8, 0.07, 96, 0.018, 1.0e-4, 0.15),
    ("spot-l40", 8, 0.03, 32, 0.030, 3.0e-4, 0.06),
)


@dataclass(frozen=True)
class Simulated:
    """One simulation and its cost."""

    num_gpus: int
    num_replicas: int
    num_steps: int
    num_trajectories: int
    num_events: int
    seconds: float
    in_flight_per_replica: float
    simulated_s: float
    max_staleness: int

    @property
    def us_per_event(self) -> float:
        return 1e6 * self.seconds / self.num_events


def fleet_of(num_gpus: int) -> tuple[WorkerClass, ...]:
    rollout = num_gpus - num_gpus * TRAINER_GPUS // NUM_GPUS
    return tuple(
        WorkerClass(
            name,
            max(1, round(share * rollout / gpus)),
            slots,
            EngineSpeed(linear(base_s, per_row_s, slots), 4e-9, 2e-6, load_s=0.5),
            kv_tokens=slots * 6000.0,
            accelerators=gpus,
            price_per_h=2.0,
            round_trip_s=0.05,
            site=name,
            root_bytes_per_s=1e9 * rate,
            site_bytes_per_s=10e9,
            spread=0.05,
        )
        for name, gpus, share, slots, base_s, per_row_s, rate in SHAPES
    )


def simulation_of(num_gpus: int, num_steps: int, seed: int = 0) -> Simulation:
    groups = TRAJECTORIES_PER_STEP // GROUP_SIZE * num_gpus // NUM_GPUS
    fleet = fleet_of(num_gpus)
    scenario = Scenario(
        fleet,
        LedgerSettings(groups, 4, num_steps),
        TrainerModel(fixed_s=5.0, token_s=2.0e-7 * NUM_GPUS / num_gpus, publish_s=3.0, accelerators=TRAINER_GPUS),
        CoordinatorModel(lease_s=0.0, submit_s=0.0, reward_s=0.2, reward_slots=max(1, num_gpus // 4)),
        overlap=True,
        over_provision=5.0,
        weight_bytes=2e9,
        seed=seed,
    )
    lengths = Lengths(
        LogNormal(1200, 0.9, 8192), GROUP_SIZE, prompt=LogNormal(400, 0.4, 2048), longest=8192, shared=0.5, seed=seed
    )
    return Simulation(scenario, lengths)


def simulate(num_gpus: int, num_steps: int) -> Simulated:
    simulation = simulation_of(num_gpus, num_steps)
    begins_s = time.process_time()
    end = simulation.run()
    seconds = time.process_time() - begins_s
    assert end.num_steps == num_steps, f"only {end.num_steps} of {num_steps} steps were finished"
    assert simulation.missing_tokens() == 0
    rows_s = sum(worker.replica.row_s for worker in simulation.workers.values())
    num_replicas = len(simulation.workers)
    return Simulated(
        num_gpus,
        num_replicas,
        num_steps,
        end.num_answers,
        simulation.events.num_done,
        seconds,
        rows_s / end.at_s / num_replicas,
        end.at_s,
        max(end.by_staleness),
    )


def profile(num_gpus: int, num_steps: int, num_lines: int = 15) -> str:
    simulation, profiler = simulation_of(num_gpus, num_steps), cProfile.Profile()
    profiler.runcall(simulation.run)
    text = io.StringIO()
    pstats.Stats(profiler, stream=text).strip_dirs().sort_stats("tottime").print_stats(num_lines)
    return text.getvalue()


def main() -> None:
    parser = argparse.ArgumentParser(description="Speed of the simulator at 10,000 GPUs.")
    parser.add_argument("--quick", action="store_true", help="two steps and smaller fleets: ends within a minute")
    options = parser.parse_args()
    load = Load()
    sizes = [1_000, 3_000] if options.quick else [1_000, 3_000, NUM_GPUS]
    num_steps = 4 if options.quick else NUM_STEPS
    found = []
    for size in sizes:
        found.append(simulate(size, num_steps))
        say(f"{size:,} GPUs: {found[-1].seconds:.1f} s, {found[-1].us_per_event:.1f} µs an event")
    whole = found[-1]
    bars: dict[str, report.Bar | report.Unmeasured] = {
        "microseconds per event, largest fleet over smallest": report.at_most(
            FLAT_TARGET, [whole.us_per_event / found[0].us_per_event], quick=options.quick
        )
    }
    wholes = {
        "seconds for 20 steps of 65,536 trajectories on 10,000 GPUs": (SECONDS_TARGET, whole.seconds),
        "the same, stretch": (STRETCH_S, whole.seconds),
    }
    for name, (target, value) in wholes.items():
        bars[name] = report.Unmeasured(target) if options.quick else report.at_most(target, [value], quick=False)
    in_flight = [whole.in_flight_per_replica]
    name = "sequences in flight per replica"
    bars[name] = report.Unmeasured(16) if options.quick else report.at_least(16, in_flight, quick=False)
    print(profile(sizes[0], 4))
    rows = [
        (
            f"{one.num_gpus:,}",
            f"{one.num_replicas:,}",
            f"{one.in_flight_per_replica:.0f}",
            f"{one.num_trajectories:,}",
            f"{one.num_events:,}",
            f"{one.seconds:.1f}",
            f"{one.us_per_event:.1f}",
        )
        for one in found
    ]
    report.show(
        "sim_scale",
        ("GPUs", "replicas", "in flight each", "trajectories", "events", "CPU s", "µs an event"),
        rows,
        bars,
        quick=options.quick,
        **load.shares(),
        runs=[vars(one) for one in found],
    )
    assert math.isfinite(whole.seconds)


if __name__ == "__main__":
    main()
