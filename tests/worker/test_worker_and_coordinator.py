"""Workers with paced engines at a real coordinator with a real ledger: what they do satisfies its accounts."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import torch
from whole_coordinator import opened

from offbeat.client.in_process import InProcessWorker
from offbeat.config import from_dict
from offbeat.coordinator.coordinator import Coordinator
from offbeat.testing.paced import LogNormalLength, PacedEngine, PacedSettings
from offbeat.weights.publish import Publisher
from offbeat.weights.version import Version
from offbeat.worker.worker import Worker

NUM_STEPS = 4
WITHIN_S = 60.0


@asynccontextmanager
async def coordinator(folder: Path, **schedule):
    config = from_dict(
        {
            "run": {"steps": NUM_STEPS},
            "batch": {"groups_per_step": 3, "group_size": 4},
            "eval": {"every": 2, "prompts": 3},
            "rollout": {"max_new_tokens": 64},
            "schedule": schedule,
        }
    )
    async with opened(config, folder) as (made, tokens):
        yield made, tokens.vocab_size


def worker(made: Coordinator, name: str, vocab_size: int, *, finishes: bool = False, **settings) -> Worker:
    lengths = LogNormalLength(median_tokens=20, sigma=0.8, max_tokens=100)
    paced = PacedSettings(num_slots=6, vocab_size=vocab_size, base_s=0.002, load_s=0.01, lengths=lengths, **settings)
    return Worker(name, PacedEngine(paced, worker=name), InProcessWorker(made, name), finishes=finishes)


async def train(made: Coordinator, store: Publisher) -> list[int]:
    """A trainer that learns nothing: claims, publishes, commits; returns the staleness of all that it was given."""

    def write(number: int, step: int, parent: int | None) -> Version:
        return store.write(number, step, parent, {"w": torch.full((4,), float(number))})

    version = write(await made.next_version(), 0, None)
    await made.publish(version)
    steps = {version.number: 0}
    seen = []
    for step in range(NUM_STEPS):
        batch = await made.claim(step, WITHIN_S)
        for group in batch.groups:
            for member in group.members:
                seen += [step - steps[s.version] for s in member.trajectory.segments]
        version = write(await made.next_version(), step + 1, version.number)
        steps[version.number] = step + 1
        await made.commit(step, version)
    return seen


SCHEDULES = {
    "alternate": {"mode": "alternate"},
    "overlap": {"mode": "overlap"},
    "overlap, finish": {"mode": "overlap", "new_version": "finish"},
    "rounds": {"mode": "alternate", "max_staleness": 1, "over_provision": 2.0},
    "long rounds": {"mode": "alternate", "max_staleness": 3},
}


@pytest.mark.parametrize("splits", [True, False])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_run_goes_on_while_workers_leave_and_come_and_no_token_is_lost_from_sight(schedule, splits, tmp_path):
    chosen = SCHEDULES[schedule]

    async def scenario():
        async with coordinator(tmp_path, **chosen) as (made, vocab_size):
            training = asyncio.create_task(train(made, Publisher(tmp_path / "weights")))
            first, second, third = (
                worker(made, name, vocab_size, finishes="new_version" in chosen, splits_by_version=splits)
                for name in "abc"
            )

            async def leave_and_replace() -> None:
                await asyncio.wait({training}, timeout=0.3)
                await first.drain()
                await third.run()

            async with asyncio.TaskGroup() as group:
                group.create_task(first.run())
                group.create_task(second.run())
                group.create_task(leave_and_replace())
                seen = await training
                made.end()
            counts = await made.call(made.ledger.counts)
            assert (await made.call(made.ledger.verify)).violations == ()
            return seen, counts

    seen, counts = asyncio.run(scenario())
    assert len(seen) >= NUM_STEPS * 3 * 4
    assert min(seen) >= 0
    assert max(seen) <= chosen.get("max_staleness", 0 if chosen["mode"] == "alternate" else 4)
    assert counts.trajectories.trained == NUM_STEPS * 3 * 4
    assert (counts.failed_tasks, counts.dropped_groups, counts.tokens.wasted) == ({}, {}, {})
    assert counts.tokens.masked["stale"] == 0
