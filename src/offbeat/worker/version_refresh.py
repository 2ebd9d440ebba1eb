"""Fetches and verifies versions before an engine loads them, during generation.

The refresh loop and a task that requires a version may ask for the same one at a time; it is fetched once. Publishers
delete old versions: a failed fetch is an error only if no newer version exists, or after `MAX_FAILURES` attempts.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from offbeat.client.protocol import WorkerClient
from offbeat.engines.protocol import Engine, EngineDied
from offbeat.errors import OffbeatError
from offbeat.testing.crash_points import crash_here
from offbeat.weights.receive import ReceiveFigures
from offbeat.weights.version import Version

log = logging.getLogger(__name__)

MAX_FAILURES = 4
"""Both callers may have asked before the newer version came, and once more before they learnt of it."""


class Versions:
    """Versions on this worker's machine."""

    def __init__(self, worker: str, client: WorkerClient):
        self.worker, self.client = worker, client
        self._ready: Version | None = None
        self._num_failures: Counter[int] = Counter()
        self._fetching = asyncio.Lock()

    async def fetch(self, version: Version) -> Version:
        """Returns the same version, verified, with its files on this machine."""
        async with self._fetching:
            if self._ready is None or self._ready.number != version.number:
                here = await self.client.fetch(version)
                crash_here("version-fetched")
                self._ready = here
            return self._ready

    @asynccontextmanager
    async def unless_replaced(self, version: Version, have: int | None) -> AsyncIterator[None]:
        """Wraps fetching and loading `version`; suppresses an error if a newer version has replaced it."""
        try:
            yield
        except EngineDied:
            raise
        except OffbeatError as error:
            self._ready = None
            newest = await self.client.newer(have, 0.0)
            self._num_failures[version.number] += 1
            if newest is None or newest.number <= version.number or self._num_failures[version.number] > MAX_FAILURES:
                raise
            log.warning(
                "worker %s: skipped version %d, replaced by %d: %s",
                self.worker,
                version.number,
                newest.number,
                error,
            )


class WorkerMetrics:
    """Costs of new versions, summed over the worker's life, by the names of the coordinator's metrics."""

    def __init__(self) -> None:
        self._engine: Engine | None = None
        self._sums: dict[str, float] = defaultdict(float)

    def follow(self, engine: Engine) -> None:
        """Adds this engine's standstill from now on; the sums keep that of the engine before it."""
        self._sums["still_s"] = self._still_s
        self._engine = engine

    def fetched(self, received: ReceiveFigures) -> None:
        """Adds a received version."""
        self._sums["versions"] += 1
        self._sums["fetch_s"] += received.fetch_s
        self._sums["apply_s"] += received.apply_s
        for kind, num_bytes in received.num_bytes.items():
            self._sums[f"{kind}_bytes"] += num_bytes

    def totals(self) -> dict[str, float]:
        return {**self._sums, "still_s": self._still_s}

    @property
    def _still_s(self) -> float:
        return self._sums["still_s"] + (self._engine.seconds_still if self._engine else 0.0)
