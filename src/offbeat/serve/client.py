"""What workers, trainers and judges ask of the coordinator.

Whoever holds one of these neither knows nor cares where the coordinator runs: in this process, or behind a URL. Calls
go one way, towards the coordinator, and each that may wait takes the longest wait it is worth to the caller. Only
durations are told, never times of day.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from offbeat.control.step_time import Timing
from offbeat.ledger.records import Batch, ComparedSegment, Outcome, Reconciled
from offbeat.reward.pool import RewardInput, RewardResult
from offbeat.trajectory import Task, Trajectory
from offbeat.weights.verify import verify
from offbeat.weights.version import Version


@dataclass(frozen=True)
class Lease:
    """Tasks to carry on, each fenced; and where the worker should have other weights, which ones."""

    tasks: tuple[Task, ...] = ()
    version: Version | None = None
    """What to load: before the next task, where tasks wait for it; otherwise as soon as it suits."""
    ttl_s: float = 0.0
    """How long the tasks are this worker's without a heartbeat."""
    is_over: bool = False
    """The run has ended: there will be no further task."""
    round: int | None = None
    """The round that tasks without a required version belong to, by the version that began it; None: they go on until
    they end."""


@dataclass(frozen=True)
class Heartbeat:
    """What the coordinator says to a worker that says it is alive."""

    lost: tuple[int, ...] = ()
    """Tasks that are no longer this worker's: whatever it does with them will be refused."""
    hand_back: tuple[int, ...] = ()
    """Tasks whose tokens so far are wanted back now, as partials."""


@dataclass(frozen=True)
class RewardLease:
    """Samples to judge; none where `ticket` is empty."""

    ticket: str = ""
    """Names these samples in the answer; good for a while, and once."""
    reward: str = ""
    """A built-in's name, `module:function` or `file.py:function`, to be found where the judge runs."""
    inputs: tuple[RewardInput, ...] = ()
    timeout_s: float = 0.0
    """The longest that one sample may take; then it counts as failed."""
    ttl_s: float = 0.0
    """How long samples are this judge's without a word from it."""
    is_over: bool = False
    """The run has ended: there will be nothing further to judge."""


class WorkerClient(Protocol):
    """What a worker needs; it is bound to one worker's name."""

    async def lease(self, capacity: int, have_version: int | None, wait_s: float) -> Lease:
        """Up to `capacity` tasks, as soon as there are any or other weights are wanted; nothing after `wait_s`."""
        ...

    async def heartbeat(self, held: Sequence[tuple[int, int]]) -> Heartbeat:
        """Renews the leases named by task and fence. The first of a worker's life tells that it knows of no others."""
        ...

    async def submit(self, trajectory: Trajectory, fence: int) -> Outcome:
        """Hands in a trajectory, finished or partial, under the fence of its lease; returns once it is on disk."""
        ...

    async def fail(self, task: int, fence: int, reason: str) -> None:
        """Gives a task back unfinished; it is tried again until its attempts are used up."""
        ...

    async def give_back(self, leases: Sequence[tuple[int, int]]) -> None:
        """Gives tasks back, named by task and fence, of which there is no new token; nobody is blamed."""
        ...

    async def round_over(self, number: int, wait_s: float) -> bool:
        """Whether a round is over, as soon as it is; False after `wait_s`."""
        ...

    async def timed(self, timings: Sequence[Timing]) -> None:
        """Tells how long the engine's steps took lately."""
        ...

    async def newer(self, have_version: int | None, wait_s: float) -> Version | None:
        """The version that workers should serve, once it is another than `have_version`; None after `wait_s`."""
        ...

    async def fetch(self, version: Version) -> Version:
        """The same version with its files on this machine, and their digest verified."""
        ...

    async def leave(self) -> None:
        """Gives up what is still leased, without blame."""
        ...


class TrainerClient(Protocol):
    """What a trainer needs. Once another trainer has begun, every call raises `RunStopped` and changes nothing."""

    async def reconcile(
        self, step: int, version: int | None, *, home: str = "", from_scratch: bool = False
    ) -> Reconciled:
        """Brings ledger and checkpoint to the same step, and takes the run over; comes before anything else. `home`
        is the identity of the folder of checkpoints; with `from_scratch` all that was trained may be undone."""
        ...

    async def next_version(self) -> int:
        """A version number that was never used."""
        ...

    async def publish(self, version: Version) -> None:
        """Makes a version known that no batch led to: the first one, or a resumed checkpoint's."""
        ...

    async def claim(self, step: int, within_s: float) -> Batch:
        """The batch of a step, perhaps of the one after the next version: the same, however often it is asked for."""
        ...

    async def commit(
        self, step: int, version: Version, audited: Sequence[int] = (), compared: Sequence[ComparedSegment] = ()
    ) -> None:
        """Marks the step's batch as trained and makes the version that came of it known. `audited` are the tasks whose
        log-probs could not be believed, so that they were left out; `compared` is what was found of segments."""
        ...

    async def checkpointed(self, step: int) -> None:
        """A durable checkpoint of this step exists: what lies before it will not be asked for again."""
        ...

    async def report(self, row: Mapping[str, Any]) -> None:
        """A step's figures, for the run's folder and whoever watches."""
        ...


class JudgeClient(Protocol):
    """What a judge needs; it is bound to one judge's name."""

    async def lease_rewards(self, capacity: int, wait_s: float) -> RewardLease:
        """Up to `capacity` samples that share a reward, as soon as there are any; nothing after `wait_s`. One that has
        enough to do asks for 0 now and then, to be heard of."""
        ...

    async def submit_rewards(self, ticket: str, results: Sequence[RewardResult]) -> None:
        """Answers for all samples of a ticket, in their order; returns once they are on disk."""
        ...

    async def leave(self) -> None:
        """Gives up what is not answered yet, without blame."""
        ...


async def verified(version: Version) -> Version:
    """A version that is here, once its files were found to be the published ones."""
    await asyncio.to_thread(verify, version)
    return version
