"""What workers and trainers ask of the coordinator.

Whoever holds a `Client` neither knows nor cares where the coordinator runs: in this process, or behind a URL. Calls go
one way, towards the coordinator, and each that may wait takes the longest wait it is worth to the caller.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from offbeat.ledger.records import Batch, Reconciled
from offbeat.trajectory import Task, Trajectory
from offbeat.weights.version import Version


@dataclass(frozen=True)
class Lease:
    """Tasks to carry on; or, where the worker has other weights than they require, the version to take first."""

    tasks: tuple[Task, ...] = ()
    version: Version | None = None


class WorkerClient(Protocol):
    """What a worker needs."""

    async def lease(self, worker: str, capacity: int, have_version: int | None, wait_s: float) -> Lease:
        """Up to `capacity` tasks, as soon as there are any; an empty lease after `wait_s`."""
        ...

    async def submit(self, worker: str, trajectories: Sequence[Trajectory]) -> None:
        """Hands in finished trajectories; returns once they are on disk."""
        ...

    async def fail(self, worker: str, task: int, reason: str) -> None:
        """Gives a task back unfinished; it is tried again until its attempts are used up."""
        ...


class TrainerClient(Protocol):
    """What a trainer needs."""

    async def reconcile(self, step: int, version: int | None) -> Reconciled:
        """Brings ledger and checkpoint to the same step; comes before anything else."""
        ...

    async def next_version(self) -> int:
        """A version number that was never used."""
        ...

    async def publish(self, version: Version) -> None:
        """Makes a version known that no batch led to: the first one, or a resumed checkpoint's."""
        ...

    async def claim(self, step: int, within_s: float) -> Batch:
        """The batch of a step: the same one, however often it is asked for."""
        ...

    async def commit(self, step: int, version: Version) -> None:
        """Marks the step's batch as trained and makes the version that came of it known."""
        ...
