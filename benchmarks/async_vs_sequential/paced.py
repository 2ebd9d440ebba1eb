"""Throughput of each schedule with the same two unequal workers and a trainer, all at a modelled pace.

Coordinator, ledger and worker loops are the real ones, in one process. Engines are paced, one three times as fast as
the other. The trainer claims a batch, sleeps for the modelled time of a step, and publishes. Rewards take no time.
Everything runs in modelled time, so the figures show only who waits for whom.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import cast

from benchmarks import report
from benchmarks.common.clock import in_modelled_time, now_s
from benchmarks.common.first_version import write_weights
from offbeat.client.in_process import InProcessWorker
from offbeat.client.protocol import LeaseResponse
from offbeat.config import from_dict
from offbeat.config.schema import Config
from offbeat.coordinator.coordinator import Coordinator
from offbeat.coordinator.maintenance import WeightGarbageCollector
from offbeat.engines.protocol import Generation, Request
from offbeat.launch import wiring
from offbeat.rewards.pool import RewardInput, RewardPool, RewardResult
from offbeat.testing.paced import LogNormalLength, PacedEngine, PacedSettings
from offbeat.trajectory import Reward
from offbeat.weights.version import Version, WeightFolder
from offbeat.worker.worker import Worker

GROUPS_PER_STEP, GROUP_SIZE = 16, 8
SAMPLES_PER_STEP = GROUPS_PER_STEP * GROUP_SIZE
SPEEDS = {"slow": 1.0, "fast": 3.0}
NUM_SLOTS = 16
MEDIAN_TOKENS, SIGMA, MAX_TOKENS = 96, 1.0, 440
LOAD_S = 0.1
TRAIN_S = 2.9
"""Modelled time of a training step: a fifth less than both workers together need for a step's samples, so that
generation is the bottleneck."""
CLAIM_WITHIN_S = 1e6
SPEED_TARGET, IDLE_TARGET = 1.3, 0.05
say = partial(report.say, "async_vs_sequential")


class Plan(StrEnum):
    """A schedule, and how tasks are divided between the workers."""

    ALTERNATE = "alternate"
    HALVES = "alternate, half and half"
    """Each worker gets half of a step's tasks, however fast it is."""
    OVERLAP = "overlap"


@dataclass(frozen=True)
class Pace:
    """Figures measured for a plan."""

    samples_per_s: float
    idle: dict[str, float]
    """Share of the time in which a worker's engine ran nothing."""
    slots_used: dict[str, float]
    """Mean share of a worker's slots that were in use."""
    max_staleness: int


class AtOnce:
    """Reward pool that takes no time."""

    num_processes, log_path = 1, Path("none")

    async def score(self, name: str, batch: Sequence[RewardInput]) -> list[RewardResult]:
        values = [float(len(sample.tokens) % 2) for sample in batch]
        return [RewardResult(value, rewards=(Reward(value),)) for value in values]


class WatchedEngine(PacedEngine):
    """Paced engine that counts the time in which it runs requests, as a whole and per slot."""

    def __init__(self, settings: PacedSettings, worker: str):
        super().__init__(settings, worker=worker, clock=asyncio.get_running_loop().time)
        self._num_running, self._since_s = 0, now_s()
        self.busy_s = self.slot_s = 0.0

    async def generate(self, request: Request) -> Generation:
        self._count(+1)
        try:
            return await super().generate(request)
        finally:
            self._count(-1)

    def _count(self, change: int) -> None:
        passed_s, self._since_s = now_s() - self._since_s, now_s()
        self.busy_s += passed_s * (self._num_running > 0)
        self.slot_s += passed_s * self._num_running
        self._num_running += change

    def begin_to_count(self) -> None:
        self._count(0)
        self.busy_s = self.slot_s = 0.0

    def shares(self, seconds: float) -> tuple[float, float]:
        """Returns the shares of idle time and of slots in use, over the last `seconds`."""
        self._count(0)
        return 1 - self.busy_s / seconds, self.slot_s / seconds / self.settings.num_slots


class HalfWorker(InProcessWorker):
    """Worker client that takes at most half of the samples of each version."""

    def __init__(self, coordinator: Coordinator, name: str):
        super().__init__(coordinator, name)
        self._version: int | None = None
        self._left = 0

    async def lease(self, capacity: int, have_version: int | None, wait_s: float) -> LeaseResponse:
        if have_version != self._version:
            self._version, self._left = have_version, SAMPLES_PER_STEP // 2
        if self._left == 0:
            return LeaseResponse(version=await self.newer(have_version, wait_s))
        lease = await super().lease(min(capacity, self._left), have_version, wait_s)
        self._left -= len(lease.tasks)
        return lease


def run_config(plan: Plan, seed: int, num_steps: int) -> Config:
    return from_dict(
        {
            "run": {"steps": num_steps, "seed": seed},
            "batch": {"groups_per_step": GROUPS_PER_STEP, "group_size": GROUP_SIZE},
            "rollout": {"max_new_tokens": MAX_TOKENS},
            "schedule": {"mode": "overlap" if plan is Plan.OVERLAP else "alternate"},
            "eval": {"every": 0},
        }
    )


@asynccontextmanager
async def coordinator_of(config: Config, folder: Path) -> AsyncIterator[Coordinator]:
    tokens, mixture = wiring.load_tokens(config), wiring.make_mixture(config, None)
    pool, nowhere = cast(RewardPool, AtOnce()), WeightFolder(folder / "none")
    with wiring.open_ledger(config, folder / "ledger.sqlite") as ledger:
        issuer = wiring.make_issuer(config, mixture, tokens)
        coordinator = wiring.make_coordinator(config, ledger, issuer, pool, tokens, WeightGarbageCollector(nowhere))
        await coordinator.start()
        try:
            yield coordinator
        finally:
            await coordinator.close()
        violations = ledger.verify(with_bodies=False).violations
        assert not violations, violations[:3]


async def train(coordinator: Coordinator, first: Version, steps: range) -> None:
    for step in steps:
        await coordinator.claim(step, CLAIM_WITHIN_S)
        await asyncio.sleep(TRAIN_S)
        version = Version(first.number + step + 1, step + 1, first.number + step, first.digest, first.path)
        await coordinator.commit(step, version)


async def _measured(plan: Plan, seed: int, folder: Path, num_warmup: int, num_steps: int) -> Pace:
    # The run itself is longer: towards its end workers have less and less to do.
    config = run_config(plan, seed, num_warmup + num_steps + 8)
    lengths = LogNormalLength(MEDIAN_TOKENS, SIGMA, MAX_TOKENS)
    client = HalfWorker if plan is Plan.HALVES else InProcessWorker
    async with coordinator_of(config, folder) as coordinator:
        first = write_weights(folder / "weights")
        await coordinator.publish(first)
        engines = {
            name: WatchedEngine(
                PacedSettings(num_slots=NUM_SLOTS, vocab_size=64, speed=speed, load_s=LOAD_S, lengths=lengths), name
            )
            for name, speed in SPEEDS.items()
        }
        workers = [Worker(name, engine, client(coordinator, name)) for name, engine in engines.items()]
        working = [asyncio.create_task(worker.run()) for worker in workers]
        await train(coordinator, first, range(num_warmup))
        start_s = now_s()
        for engine in engines.values():
            engine.begin_to_count()
        await train(coordinator, first, range(num_warmup, num_warmup + num_steps))
        seconds = now_s() - start_s
        shares = {name: engine.shares(seconds) for name, engine in engines.items()}
        for task in working:
            task.cancel()
        await asyncio.wait(working)
        counts = coordinator.ledger.counts()
    return Pace(
        samples_per_s=num_steps * SAMPLES_PER_STEP / seconds,
        idle={name: idle for name, (idle, _) in shares.items()},
        slots_used={name: used for name, (_, used) in shares.items()},
        max_staleness=counts.max_staleness_trained,
    )


def measure(plan: Plan, seed: int, folder: Path, num_warmup: int, num_steps: int) -> Pace:
    """Runs `num_warmup` steps of a plan, which are not counted, and then measures `num_steps` more."""
    folder.mkdir(parents=True)
    return in_modelled_time(_measured(plan, seed, folder, num_warmup, num_steps))


Paces = Mapping[Plan, Sequence[Pace]]


def paces_of(folder: Path, quick: bool) -> Paces:
    num_seeds, num_warmup, num_steps = (1, 1, 3) if quick else (5, 4, 12)
    paces: dict[Plan, list[Pace]] = {plan: [] for plan in Plan}
    for seed in range(num_seeds):
        for plan in Plan:
            pace = measure(plan, seed, folder / f"{plan.name}-{seed}", num_warmup, num_steps)
            paces[plan].append(pace)
            say(f"{plan.value}, seed {seed}: {pace.samples_per_s:.1f} samples/s, fast idle {pace.idle['fast']:.1%}")
    return paces


def paced_bars(paces: Paces, quick: bool) -> dict[str, report.Bar]:
    pairs = zip(paces[Plan.OVERLAP], paces[Plan.ALTERNATE], strict=True)
    ratios = [ours.samples_per_s / other.samples_per_s for ours, other in pairs]
    idle = [pace.idle["fast"] for pace in paces[Plan.OVERLAP]]
    return {
        "trained samples/s, overlap over alternate": report.at_least(SPEED_TARGET, ratios, quick=quick),
        "idle share of the fast worker, overlap": report.at_most(IDLE_TARGET, idle, quick=quick),
    }


def paced_rows(paces: Paces) -> list[tuple[str, str, str]]:
    rows = []
    for plan, values in paces.items():
        rate = statistics.median(pace.samples_per_s for pace in values)
        shares = [
            f"{name} idle {statistics.median(pace.idle[name] for pace in values):.0%}, slots used "
            f"{statistics.median(pace.slots_used[name] for pace in values):.0%}"
            for name in values[0].idle
        ]
        rows.append((plan.value, f"{rate:.1f} samples/s", "; ".join(shares)))
    return rows
