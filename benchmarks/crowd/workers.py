"""A crowd of workers in this process: real workers and clients over real sockets, with paced engines."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from offbeat.ledger.records import Outcome
from offbeat.rollout.engines.paced import LogNormalLength, PacedEngine, PacedSettings
from offbeat.rollout.worker import Worker
from offbeat.serve.http.client import RemoteWorker
from offbeat.serve.http.connection import Connection
from offbeat.trajectory import Trajectory

NUM_SLOTS = 8
MEDIAN_TOKENS, SIGMA, MAX_TOKENS = 128, 0.6, 448


@dataclass(frozen=True)
class Phase:
    """What a crowd got done between its warm-up and its end."""

    num_submissions: int
    seconds: float
    latencies_s: np.ndarray
    """From the first byte sent to the acknowledgement read, retries included."""

    @property
    def rate(self) -> float:
        return self.num_submissions / self.seconds

    def percentile_ms(self, percent: float) -> float:
        return 1e3 * float(np.percentile(self.latencies_s, percent)) if len(self.latencies_s) else float("nan")


class TimedWorker(RemoteWorker):
    """Notes when each submission was acknowledged, and after how long."""

    def __init__(self, connection: Connection, noted: list[tuple[float, float]]):
        super().__init__(connection, Path("unused"), shares_disk=True)
        self._noted = noted

    async def submit(self, trajectory: Trajectory, fence: int) -> Outcome:
        start_s = time.monotonic()
        outcome = await super().submit(trajectory, fence)
        end_s = time.monotonic()
        self._noted.append((end_s, end_s - start_s))
        return outcome


async def crowd(url: str, secrets: Sequence[str], answer_s: float, warmup_s: float, seconds: float) -> Phase:
    """Runs one worker per secret; an answer of median length takes each `answer_s`. Leaves no lease behind."""
    noted: list[tuple[float, float]] = []
    connections = [Connection(url, secret) for secret in secrets]
    clients = [TimedWorker(connection, noted) for connection in connections]
    step_s = answer_s / MEDIAN_TOKENS
    lengths = LogNormalLength(MEDIAN_TOKENS, SIGMA, MAX_TOKENS)
    paced = PacedSettings(num_slots=NUM_SLOTS, vocab_size=64, base_s=step_s, per_row_s=0.0, lengths=lengths)
    workers = [
        Worker(f"w{i}", PacedEngine(paced, worker=f"w{i}", version=0), client) for i, client in enumerate(clients)
    ]
    start_s = time.monotonic() + warmup_s
    try:
        with suppress(TimeoutError):
            async with asyncio.timeout(warmup_s + seconds), asyncio.TaskGroup() as group:
                for worker in workers:
                    group.create_task(worker.run())
        end_s = time.monotonic()
        for client in clients:
            await client.leave()
    finally:
        for connection in connections:
            await connection.close()
    counted = [latency_s for at_s, latency_s in noted if start_s <= at_s < end_s]
    return Phase(len(counted), end_s - start_s, np.array(counted))
