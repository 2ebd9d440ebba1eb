"""A crowd of workers in this process: real workers and clients over real sockets, with paced engines."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np

from offbeat.client.connection import Connection
from offbeat.client.http_client import RemoteWorker
from offbeat.ledger.records import Outcome
from offbeat.testing.paced import LogNormalLength, PacedEngine, PacedSettings
from offbeat.trajectory import Trajectory
from offbeat.worker.worker import Worker

NUM_SLOTS = 8
MEDIAN_TOKENS, SIGMA, MAX_TOKENS = 128, 0.6, 448


@dataclass(frozen=True)
class Phase:
    """Results of a crowd in a period of time."""

    num_submissions: int
    seconds: float
    latencies_s: np.ndarray
    """Seconds from the first byte sent to the acknowledgement received, including retries."""

    @property
    def rate(self) -> float:
        return self.num_submissions / self.seconds

    def percentile_ms(self, percent: float) -> float:
        return 1e3 * float(np.percentile(self.latencies_s, percent)) if len(self.latencies_s) else float("nan")


class TimedWorker(RemoteWorker):
    """Records the time and the latency of each acknowledgement."""

    def __init__(self, connection: Connection, noted: list[tuple[float, float]]):
        super().__init__(connection, Path("unused"), shares_disk=True)
        self._noted = noted

    async def submit(self, trajectory: Trajectory, fence: int) -> Outcome:
        start_s = time.monotonic()
        outcome = await super().submit(trajectory, fence)
        end_s = time.monotonic()
        self._noted.append((end_s, end_s - start_s))
        return outcome


class Crowd:
    """One worker per secret; an answer of median length takes each `answer_s`."""

    def __init__(self, url: str, secrets: Sequence[str], answer_s: float):
        self._noted: list[tuple[float, float]] = []
        self._connections = [Connection(url, secret) for secret in secrets]
        self._clients = [TimedWorker(connection, self._noted) for connection in self._connections]
        lengths = LogNormalLength(MEDIAN_TOKENS, SIGMA, MAX_TOKENS)
        step_s = answer_s / MEDIAN_TOKENS
        paced = PacedSettings(num_slots=NUM_SLOTS, vocab_size=64, base_s=step_s, per_row_s=0.0, lengths=lengths)
        self._workers = [
            Worker(f"w{i}", PacedEngine(paced, worker=f"w{i}", version=0), client)
            for i, client in enumerate(self._clients)
        ]

    async def __aenter__(self) -> Self:
        self._working = [asyncio.create_task(worker.run()) for worker in self._workers]
        return self

    async def __aexit__(self, *_: object) -> None:
        """Stops all workers; leaves no lease behind."""
        for task in self._working:
            task.cancel()
        ended = await asyncio.gather(*self._working, return_exceptions=True)
        for client in self._clients:
            await client.leave()
        for connection in self._connections:
            await connection.close()
        for error in ended:
            if isinstance(error, Exception):
                raise error

    async def warm_up(self, num_submissions: int, within_s: float) -> None:
        """Waits until connections are open and the wanted number of answers has come, or time is over."""
        deadline_s = time.monotonic() + within_s
        while len(self._noted) < num_submissions and time.monotonic() < deadline_s:  # noqa: ASYNC110 - nothing hangs on it
            await asyncio.sleep(0.1)

    async def work(self, seconds: float) -> Phase:
        start_s = time.monotonic()
        await asyncio.sleep(seconds)
        end_s = time.monotonic()
        counted = [latency_s for at_s, latency_s in self._noted if start_s <= at_s < end_s]
        return Phase(len(counted), end_s - start_s, np.array(counted))
