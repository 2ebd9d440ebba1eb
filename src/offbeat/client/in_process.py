"""Clients of a coordinator in the same process."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from offbeat.client.protocol import Heartbeat, LeaseResponse
from offbeat.ledger.records import Arrival, Batch, ComparedSegment, Outcome, Reconciled
from offbeat.trajectory import Trajectory
from offbeat.weights.version import Version, verify

if TYPE_CHECKING:
    from offbeat.coordinator.coordinator import Coordinator


class InProcessWorker:
    """Implements `WorkerClient` by direct calls to a coordinator in the same process."""

    def __init__(self, coordinator: Coordinator, name: str):
        self._coordinator, self._name = coordinator, name

    async def lease(self, capacity: int, have_version: int | None, wait_s: float) -> LeaseResponse:
        return await self._coordinator.lease(self._name, capacity, have_version, wait_s)

    async def heartbeat(self, held: Sequence[tuple[int, int]]) -> Heartbeat:
        return await self._coordinator.heartbeat(self._name, held)

    async def submit(self, trajectory: Trajectory, fence: int) -> Outcome:
        return await self._coordinator.submit(self._name, trajectory, fence)

    async def fail(self, task: int, fence: int, reason: str) -> None:
        await self._coordinator.fail(self._name, task, fence, reason)

    async def give_back(self, leases: Sequence[tuple[int, int]]) -> None:
        await self._coordinator.give_back(self._name, leases)

    async def round_over(self, number: int, wait_s: float) -> bool:
        return await self._coordinator.rounds.is_over(number, wait_s)

    async def newer(self, have_version: int | None, wait_s: float) -> Version | None:
        return await self._coordinator.newer(have_version, wait_s)

    async def fetch(self, version: Version) -> Version:
        await asyncio.to_thread(verify, version)
        return version

    async def leave(self) -> None:
        await self._coordinator.leave(self._name)


class InProcessTrainer:
    """Implements `TrainerClient` by direct calls to a coordinator in the same process. Every call after `reconcile`
    sends the generation, a number that `reconcile` returned, so that the coordinator can refuse a replaced trainer."""

    def __init__(self, coordinator: Coordinator, name: str = "trainer"):
        self._coordinator, self._name = coordinator, name
        self._generation = 0

    async def reconcile(
        self, step: int, version: int | None, *, home: str = "", from_scratch: bool = False
    ) -> Reconciled:
        arrival = Arrival(self._name, socket.gethostname(), home, from_scratch)
        reconciled = await self._coordinator.reconcile(step, version, arrival)
        self._generation = reconciled.generation
        return reconciled

    async def next_version(self) -> int:
        return await self._coordinator.next_version(generation=self._generation)

    async def publish(self, version: Version) -> None:
        await self._coordinator.publish(version, generation=self._generation)

    async def claim(self, step: int, within_s: float) -> Batch:
        return await self._coordinator.claim(step, within_s, generation=self._generation)

    async def commit(
        self, step: int, version: Version, audited: Sequence[int] = (), compared: Sequence[ComparedSegment] = ()
    ) -> None:
        await self._coordinator.commit(step, version, audited, compared, generation=self._generation)

    async def checkpointed(self, step: int) -> None:
        await self._coordinator.checkpointed(step, generation=self._generation)

    async def report(self, row: Mapping[str, Any]) -> None:
        await self._coordinator.report(row, generation=self._generation)
