"""The real coordinator, ledger and worker loops in modelled time take as long as their simulation says."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.async_vs_sequential.paced import WatchedEngine, coordinator_of
from benchmarks.common.clock import in_modelled_time, now_s
from benchmarks.common.first_version import write_weights
from benchmarks.sim_validation.cases import CASES, Case
from benchmarks.sim_validation.measured import config_of
from benchmarks.sim_validation.simulated import CallTimes, lengths_of, scenario_of
from offbeat.client.in_process import InProcessWorker
from offbeat.simulator.simulation import Simulation
from offbeat.testing.paced import LogNormalLength, PacedSettings
from offbeat.weights.version import Version
from offbeat.worker.worker import Worker

BY_NAME = {case.name: case for case in CASES}


async def _times(case: Case, folder: Path) -> list[float]:
    """Returns the times at which the batches of a real run were complete."""
    async with coordinator_of(config_of(case), folder) as coordinator:
        first = write_weights(folder / "weights")
        lengths = LogNormalLength(case.median_tokens, case.sigma, case.max_tokens)
        working = []
        for number, speed in enumerate(case.speeds):
            settings = PacedSettings(
                num_slots=case.slots,
                vocab_size=64,
                base_s=case.base_s,
                per_row_s=case.per_row_s,
                load_s=case.load_s,
                speed=speed,
                lengths=lengths,
            )
            worker = Worker(
                f"w{number}", WatchedEngine(settings, f"w{number}"), InProcessWorker(coordinator, f"w{number}")
            )
            working.append(asyncio.create_task(worker.run()))
        await coordinator.publish(first)
        times = []
        for step in range(case.num_steps):
            await coordinator.claim(step, 1e6)
            times.append(now_s())
            await asyncio.sleep(case.train_s)
            version = Version(first.number + step + 1, step + 1, first.number + step, first.digest, first.path)
            await coordinator.commit(step, version)
        for task in working:
            task.cancel()
        await asyncio.wait(working)
    return times


def simulated_times(case: Case) -> list[float]:
    simulation = Simulation(scenario_of(case, CallTimes(0.0, 0.0, 0.0)), lengths_of(case))
    simulation.run()
    return [row.at_s - row.publish_s - row.train_s for row in simulation.rows]


@pytest.mark.full
def test_a_run_with_one_worker_is_simulated_to_the_hundredth_of_a_second(tmp_path):
    case = replace(BY_NAME["alternate, one worker"], num_steps=4)
    assert simulated_times(case) == pytest.approx(in_modelled_time(_times(case, tmp_path)), abs=0.01)


@pytest.mark.full
def test_a_run_with_unequal_workers_is_simulated_within_a_few_percent(tmp_path):
    case = replace(BY_NAME["alternate, two unequal workers"], num_steps=8)
    assert simulated_times(case)[-1] == pytest.approx(in_modelled_time(_times(case, tmp_path))[-1], rel=0.06)
