"""Brings versions onto this machine, fetched and verified, before any engine hears of them.

Two may ask for the same version at a time, the one who looks out for newer ones and the one whose tasks require it; it
is fetched once. Generation goes on meanwhile. Old versions are deleted where they were published: one that cannot be
had any more is an error only while no newer one has taken its place, or when it is asked for again and again.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from offbeat.crash import crash_here
from offbeat.errors import OffbeatError
from offbeat.rollout.engine import EngineDied
from offbeat.serve.client import WorkerClient
from offbeat.weights.version import Version

log = logging.getLogger(__name__)

MAX_FAILURES = 4
"""Both who ask may have asked before the newer one came, and once more before they heard of it."""


class Versions:
    """The versions of one worker."""

    def __init__(self, worker: str, client: WorkerClient):
        self.worker, self.client = worker, client
        self._ready: Version | None = None
        self._num_failures: Counter[int] = Counter()
        self._fetching = asyncio.Lock()

    async def fetch(self, version: Version) -> Version:
        """The same version, verified, with its files on this machine."""
        async with self._fetching:
            if self._ready is None or self._ready.number != version.number:
                here = await self.client.fetch(version)
                crash_here("version-fetched")
                self._ready = here
            return self._ready

    @asynccontextmanager
    async def unless_replaced(self, version: Version, have: int | None) -> AsyncIterator[None]:
        """Inside, a version is fetched and loaded; if that fails because its time is over, it is left out."""
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
                "worker %s: left out version %d, which %d has replaced: %s",
                self.worker,
                version.number,
                newest.number,
                error,
            )
