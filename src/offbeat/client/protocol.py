"""Protocols of the coordinator's clients: workers, trainers and judges.

The coordinator may run in this process or behind a URL. Calls go one way, towards the coordinator; one that may wait
takes the longest wait as an argument. Only durations cross, never times of day.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from offbeat.ledger.records import Batch, ComparedSegment, Outcome, Reconciled
from offbeat.rewards.pool import RewardInput, RewardResult
from offbeat.rules.step_time import Timing
from offbeat.trajectory import Task, Trajectory
from offbeat.weights.version import Version


@dataclass(frozen=True)
class LeaseResponse:
    """Tasks to run, each fenced, or a version to load."""

    tasks: tuple[Task, ...] = ()
    version: Version | None = None
    """Version to load: before the next task, if tasks wait for it; otherwise when it suits."""
    ttl_s: float = 0.0
    """Time of the leases without a heartbeat."""
    is_over: bool = False
    """The run has ended: there are no further tasks."""
    round: int | None = None
    """Round of tasks without a required version, named by the version that began it; None: they run to their end."""


@dataclass(frozen=True)
class Heartbeat:
    """The answer to a worker's heartbeat."""

    lost: tuple[int, ...] = ()
    """Tasks that are no longer this worker's: their answers will be refused."""


@dataclass(frozen=True)
class RewardLease:
    """Samples to judge; none if `ticket` is empty."""

    ticket: str = ""
    """Names these samples in the answer; valid for a while, and once."""
    reward: str = ""
    """A built-in's name, `module:function` or `file.py:function`, on the judge's machine."""
    inputs: tuple[RewardInput, ...] = ()
    timeout_s: float = 0.0
    """Time limit of one sample; after it, the sample counts as failed."""
    ttl_s: float = 0.0
    """Time of the lease without a call of the judge."""
    is_over: bool = False
    """The run has ended: there are no further samples."""


class WorkerClient(Protocol):
    """The calls of one worker."""

    async def lease(self, capacity: int, have_version: int | None, wait_s: float) -> LeaseResponse:
        """Up to `capacity` tasks, as soon as there are any, or a version to load; nothing after `wait_s`."""
        ...

    async def heartbeat(self, held: Sequence[tuple[int, int]]) -> Heartbeat:
        """Renews the leases named by task and fence. The first of a worker's life frees all others it had."""
        ...

    async def submit(self, trajectory: Trajectory, fence: int) -> Outcome:
        """Hands in a trajectory, finished or partial, under the fence of its lease; returns once it is on disk."""
        ...

    async def fail(self, task: int, fence: int, reason: str) -> None:
        """Gives a task back unfinished; it is tried again until its attempts are used up."""
        ...

    async def give_back(self, leases: Sequence[tuple[int, int]]) -> None:
        """Gives tasks back, named by task and fence, that have no new token; without blame."""
        ...

    async def round_over(self, number: int, wait_s: float) -> bool:
        """Whether a round is over, as soon as it is; False after `wait_s`."""
        ...

    async def timed(self, timings: Sequence[Timing]) -> None:
        """Reports recent step times of the engine."""
        ...

    async def newer(self, have_version: int | None, wait_s: float) -> Version | None:
        """The version that workers should serve, once it differs from `have_version`; None after `wait_s`."""
        ...

    async def fetch(self, version: Version) -> Version:
        """The same version, with its files on this machine and verified."""
        ...

    async def leave(self) -> None:
        """Gives up what is still leased, without blame."""
        ...


class TrainerClient(Protocol):
    """The calls of a trainer. Once another trainer has begun, every call raises `RunStopped` and changes nothing."""

    async def reconcile(
        self, step: int, version: int | None, *, home: str = "", from_scratch: bool = False
    ) -> Reconciled:
        """Brings ledger and checkpoint to the same step, and takes over the run; must be the first call. `home`
        identifies the folder of checkpoints; with `from_scratch` all training may be undone."""
        ...

    async def next_version(self) -> int:
        """A version number that was never used."""
        ...

    async def publish(self, version: Version) -> None:
        """Announces a version that no batch led to: the first one, or a resumed checkpoint's."""
        ...

    async def claim(self, step: int, within_s: float) -> Batch:
        """The batch of a step, perhaps of the one after the next version; the same at every call."""
        ...

    async def commit(
        self, step: int, version: Version, audited: Sequence[int] = (), compared: Sequence[ComparedSegment] = ()
    ) -> None:
        """Marks the step's batch as trained and announces its version. `audited` are tasks left out because of their
        log-probs; `compared` are the audit's findings on segments."""
        ...

    async def checkpointed(self, step: int) -> None:
        """Reports a durable checkpoint of this step: earlier ones will not be needed again."""
        ...

    async def report(self, row: Mapping[str, Any]) -> None:
        """Reports a step's metrics."""
        ...


class JudgeClient(Protocol):
    """The calls of one judge."""

    async def lease_rewards(self, capacity: int, wait_s: float) -> RewardLease:
        """Up to `capacity` samples of one reward, as soon as there are any; nothing after `wait_s`. A busy judge asks
        for 0 now and then, to stay known."""
        ...

    async def submit_rewards(self, ticket: str, results: Sequence[RewardResult]) -> None:
        """Submits results for all samples of a ticket, in their order; returns once they are on disk."""
        ...

    async def leave(self) -> None:
        """Gives up what is not answered yet, without blame."""
        ...
