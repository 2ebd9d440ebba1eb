"""A real run of a case: coordinator, ledger, rewards, HTTP and worker loops are real, engines are paced.

Everything runs in real time. The trainer claims over the coordinator's own interface, sleeps for the time of a training
step, and commits; where generation overlaps with training it claims the next batch meanwhile, as the real trainer does.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from benchmarks.async_vs_sequential.paced import WatchedEngine
from benchmarks.common.first_version import write_weights
from benchmarks.sim_validation.cases import Case
from offbeat.client.connection import Connection
from offbeat.client.http_client import RemoteWorker
from offbeat.client.protocol import LeaseResponse
from offbeat.config import from_dict
from offbeat.config.schema import Config
from offbeat.coordinator.api.server import Address, HttpServer
from offbeat.coordinator.api.state import ServedRun
from offbeat.coordinator.coordinator import Coordinator
from offbeat.coordinator.maintenance import WeightGarbageCollector
from offbeat.launch import wiring
from offbeat.ledger.ledger import Ledger
from offbeat.ledger.records import Batch, Outcome
from offbeat.ledger.workers import Role, new_secret, secret_hash
from offbeat.testing.paced import LogNormalLength, PacedSettings
from offbeat.trajectory import Trajectory
from offbeat.weights.version import Version, WeightFolder
from offbeat.worker.worker import Worker

WITHIN_S = 120.0
AT_ONCE_S = 0.15
"""A lease call that takes longer has waited for tasks."""


@dataclass(frozen=True)
class Measured:
    """Figures of a run after its warm-up, and the times of its calls."""

    samples_per_s: float
    staleness: float
    idle: tuple[float, ...]
    """Share of time in which a worker's engine ran nothing, by worker."""
    trainer_waits: float
    """Share of time for which the trainer waited for a batch."""
    call_s: float
    """Median time of a submission, from the worker's call to the answer."""
    lease_s: float
    """Median time of a lease call that did not have to wait."""
    reward_s: float
    """Median time from an answer's commit to that of its reward."""
    busy_cores: float
    """CPU seconds per second of this process."""


class TimedWorker(RemoteWorker):
    """Notes how long submissions take, and fetches versions slowly if told."""

    def __init__(
        self, connection: Connection, folder: Path, fetch_s: float, calls_s: list[float], leases_s: list[float]
    ):
        super().__init__(connection, folder, shares_disk=True)
        self._fetch_s, self._calls_s = fetch_s, calls_s
        self._leases_s = leases_s

    async def submit(self, trajectory: Trajectory, fence: int) -> Outcome:
        begins_s = time.monotonic()
        outcome = await super().submit(trajectory, fence)
        self._calls_s.append(time.monotonic() - begins_s)
        return outcome

    async def lease(self, capacity: int, have_version: int | None, wait_s: float) -> LeaseResponse:
        begins_s = time.monotonic()
        lease = await super().lease(capacity, have_version, wait_s)
        took_s = time.monotonic() - begins_s
        if lease.tasks and took_s < AT_ONCE_S:
            self._leases_s.append(took_s)
        return lease

    async def fetch(self, version: Version) -> Version:
        if self._fetch_s and version.step:
            await asyncio.sleep(self._fetch_s)
        return await super().fetch(version)


def config_of(case: Case) -> Config:
    schedule = {"mode": case.mode, "max_staleness": case.bound}
    if case.bound:
        schedule["over_provision"] = case.over_provision
    if case.finishes:
        schedule["new_version"] = "finish"
    return from_dict(
        {
            "run": {"steps": case.num_steps + 6, "seed": case.seed},
            "batch": {"groups_per_step": case.groups_per_step, "group_size": case.group_size},
            "rollout": {"max_new_tokens": case.max_tokens, "lease_s": case.lease_s, "deadline_s": WITHIN_S},
            "schedule": schedule,
            "eval": {"every": 0},
        }
    )


def measure(case: Case, folder: Path) -> Measured:
    folder.mkdir(parents=True)
    return asyncio.run(_measure(case, folder))


async def _measure(case: Case, folder: Path) -> Measured:
    config = config_of(case)
    async with AsyncExitStack() as stack:
        tokens, mixture = wiring.load_tokens(config), wiring.make_mixture(config, None)
        pool = await wiring.open_pool(config, mixture, folder / "rewards.log")
        stack.push_async_callback(pool.close)
        path = folder / "ledger.sqlite"
        ledger = stack.enter_context(wiring.open_ledger(config, path))
        issuer = wiring.make_issuer(config, mixture, tokens)
        nowhere = WeightFolder(folder / "none")
        coordinator = wiring.make_coordinator(config, ledger, issuer, pool, tokens, WeightGarbageCollector(nowhere))
        stack.push_async_callback(coordinator.close)
        await coordinator.start()
        secrets = await coordinator.call(_enrol, ledger, len(case.speeds))
        server = HttpServer(ServedRun(coordinator, "validation", {}, str(path), nowhere), Address())
        await server.start()
        stack.push_async_callback(server.stop)
        server.open()
        return await _run(case, folder, coordinator, ledger, server.url, secrets)


def _enrol(ledger: Ledger, count: int) -> list[str]:
    made = [new_secret() for _ in range(count)]
    for number, secret in enumerate(made):
        ledger.redeem(ledger.issue_token(Role.ROLLOUT, 60), f"w{number}", {}, secret_hash(secret))
    return made


async def _run(
    case: Case, folder: Path, coordinator: Coordinator, ledger: Ledger, url: str, secrets: Sequence[str]
) -> Measured:
    first = await asyncio.to_thread(write_weights, folder / "weights")
    lengths = LogNormalLength(case.median_tokens, case.sigma, case.max_tokens)
    calls_s: list[float] = []
    leases_s: list[float] = []
    engines, connections, working = [], [], []
    for number, (speed, secret) in enumerate(zip(case.speeds, secrets, strict=True)):
        settings = PacedSettings(
            num_slots=case.slots,
            vocab_size=64,
            base_s=case.base_s,
            per_row_s=case.per_row_s,
            prefill_s=case.prefill_s,
            load_s=case.load_s,
            speed=speed,
            lengths=lengths,
        )
        engine, connection = WatchedEngine(settings, f"w{number}"), Connection(url, secret)
        client = TimedWorker(connection, folder, case.fetch_s.get(number, 0.0), calls_s, leases_s)
        worker = Worker(f"w{number}", engine, client, finishes=case.finishes)
        engines.append(engine)
        connections.append(connection)
        working.append(asyncio.create_task(worker.run()))
    await asyncio.sleep(0.5)  # connections are open
    await coordinator.publish(first)
    began_s = time.monotonic()
    killing = None
    if case.killed is not None:
        killing = asyncio.create_task(_kill(working[case.killed[0]], case.killed[1]))
    figures = await _train(case, coordinator, first, engines)
    for task in working:
        task.cancel()
    await asyncio.wait(working)
    if killing is not None:
        await killing
    for connection in connections:
        await connection.close()
    verdict = await coordinator.call(ledger.verify)
    assert not verdict.violations, verdict.violations[:3]
    query = """SELECT r.scored_at - j.accepted_at FROM rewards r JOIN trajectories j ON j.task = r.task"""
    rewards_s = [row[0] for row in await coordinator.call(lambda: ledger.execute(query).fetchall())]
    assert time.monotonic() > began_s
    return Measured(
        *figures[:4],
        statistics.median(calls_s),
        statistics.median(leases_s),
        statistics.median(rewards_s),
        figures[4],
    )


async def _kill(worker: asyncio.Task[None], after_s: float) -> None:
    await asyncio.sleep(after_s)
    worker.cancel()
    await asyncio.wait({worker})


async def _train(
    case: Case, coordinator: Coordinator, first: Version, engines: Sequence[WatchedEngine]
) -> tuple[float, float, tuple[float, ...], float, float]:
    ahead = case.mode == "overlap"
    claim: asyncio.Future[Batch] = asyncio.ensure_future(coordinator.claim(0, WITHIN_S))
    began_s = cpu_s = waited_s = 0.0
    num_tokens, num_ages, num_samples = 0, 0, 0
    for step in range(case.num_steps):
        if step == case.num_warmup:
            began_s, cpu_s, waited_s = time.monotonic(), time.process_time(), 0.0
            for engine in engines:
                engine.begin_to_count()
        waits_s = time.monotonic()
        batch = await claim
        waited_s += time.monotonic() - waits_s
        if ahead:
            claim = asyncio.ensure_future(coordinator.claim(step + 1, WITHIN_S))
        if step >= case.num_warmup:
            ages = [member.staleness for group in batch.groups for member in group.members]
            num_samples += len(ages)
            num_tokens += sum(int((age >= 0).sum()) for age in ages)
            num_ages += sum(int(age[age >= 0].sum()) for age in ages)
        await asyncio.sleep(case.train_s)
        version = Version(first.number + step + 1, step + 1, first.number + step, first.digest, first.path)
        await coordinator.commit(step, version)
        if not ahead and step + 1 < case.num_steps:
            claim = asyncio.ensure_future(coordinator.claim(step + 1, WITHIN_S))
    seconds = time.monotonic() - began_s
    claim.cancel()
    await asyncio.wait({claim})
    idle = tuple(engine.shares(seconds)[0] for engine in engines)
    busy = (time.process_time() - cpu_s) / seconds
    return num_samples / seconds, num_ages / max(num_tokens, 1), idle, waited_s / seconds, busy
