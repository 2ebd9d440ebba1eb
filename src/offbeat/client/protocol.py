"""Protocols of the coordinator's clients: workers, trainers and judges.

Workers generate answers, judges compute rewards. The coordinator may run in this process or at a URL. Clients call the
coordinator, never the other way round. A call that may wait takes its longest wait as an argument. Messages contain
durations, never times of day.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from offbeat.ledger.records import Batch, ComparedSegment, Outcome, Reconciled
from offbeat.rewards.pool import RewardInput, RewardResult
from offbeat.trajectory import Task, Trajectory
from offbeat.weights.version import Version


@dataclass(frozen=True)
class LeaseResponse:
    """Answer to a worker's lease call: tasks to run, or a version to load, or neither if there is nothing to do."""

    tasks: tuple[Task, ...] = ()
    version: Version | None = None
    """Version to load before asking for tasks again; None: keep the current version."""
    ttl_s: float = 0.0
    """Seconds for which the leases last without a heartbeat."""
    is_over: bool = False
    """The run has ended: there are no further tasks."""
    interrupted: str = ""
    """How the run ended, if it ended before its last step, such as "stopped at step 3 of 12"; else ""."""
    round: int | None = None
    """Number of the version that began the current round. When the round ends, the worker must stop `tasks`, except
    those that require a version. None: the tasks belong to no round."""
    idle: str = ""
    """Why there are no tasks, in words for a person; "": there are tasks, or a version to load."""


@dataclass(frozen=True)
class Heartbeat:
    """Answer to a worker's heartbeat."""

    lost: tuple[int, ...] = ()
    """Ids of the tasks that the heartbeat named, but that this worker no longer holds. It should stop them."""


@dataclass(frozen=True)
class RewardLease:
    """Answer to a judge's lease call: samples (answers without a reward) to score. Without samples, `ticket` is ""."""

    ticket: str = ""
    """Identifies these samples when results are submitted; valid once and for a limited time."""
    reward: str = ""
    """Reward function: the name of a built-in, or `module:function` or `file.py:function` on the judge's machine."""
    inputs: tuple[RewardInput, ...] = ()
    timeout_s: float = 0.0
    """Seconds after which one sample counts as failed."""
    ttl_s: float = 0.0
    """Seconds for which the lease lasts if the judge makes no call."""
    is_over: bool = False
    """The run has ended: there are no further samples."""
    interrupted: str = ""
    """How the run ended, if it ended before its last step, such as "stopped at step 3 of 12"; else ""."""


class WorkerClient(Protocol):
    """Calls that a worker makes to its coordinator."""

    async def lease(self, capacity: int, have_version: int | None, wait_s: float) -> LeaseResponse:
        """Leases up to `capacity` tasks, or returns a version to load that is not `have_version`. Waits up to `wait_s`
        seconds for either; after that, the answer has neither."""
        ...

    async def heartbeat(self, held: Sequence[tuple[int, int]]) -> Heartbeat:
        """Renews the leases in `held`, pairs of task and fence (number of the lease). The first heartbeat after a
        worker's process was restarted ends all leases of the worker that `held` does not name. The answer names the
        tasks in `held` that the worker no longer holds."""
        ...

    async def submit(self, trajectory: Trajectory, fence: int) -> Outcome:
        """Submits a trajectory, finished or partial, with the fence of its lease; returns once it is on disk."""
        ...

    async def fail(self, task: int, fence: int, reason: str) -> None:
        """Reports that a task failed under the lease `fence`; it is leased again until its attempts are used up."""
        ...

    async def give_back(self, leases: Sequence[tuple[int, int]]) -> None:
        """Gives back leases, pairs of task and fence, under which no token was sampled. This does not count as a
        failure of their tasks."""
        ...

    async def round_over(self, number: int, wait_s: float) -> bool:
        """Waits up to `wait_s` seconds for the end of the round that version `number` began; returns whether it is
        over."""
        ...

    async def newer(self, have_version: int | None, wait_s: float) -> Version | None:
        """Waits up to `wait_s` seconds for a version to serve that is not `have_version`; returns it, or None."""
        ...

    async def fetch(self, version: Version) -> Version:
        """Downloads the files of `version` if needed and verifies them; returns `version` with their path here."""
        ...

    async def leave(self) -> None:
        """Leaves the run: releases all leases of this worker. This does not count as a failure of their tasks."""
        ...


class TrainerClient(Protocol):
    """Calls that a trainer makes to its coordinator. Once another trainer has taken over, every call except `reconcile`
    raises `RunStopped` and changes nothing."""

    async def reconcile(
        self, step: int, version: int | None, *, home: str = "", from_scratch: bool = False
    ) -> Reconciled:
        """Makes the caller the run's only trainer, and brings the ledger to the caller's checkpoint. Must be the first
        call.

        `step` and `version` are those of the checkpoint (0 and None: the caller has none). `home` identifies the folder
        of checkpoints. `from_scratch` allows a trainer without a checkpoint to undo all steps of the run.
        """
        ...

    async def next_version(self) -> int:
        """Returns a version number that was never used."""
        ...

    async def publish(self, version: Version) -> None:
        """Announces the first version, or the weights of the checkpoint from which the trainer resumes."""
        ...

    async def claim(self, step: int, within_s: float) -> Batch:
        """Waits until the batch of `step` is complete and returns it, the same one at every call. Raises
        `DeadlineError` after `within_s` seconds. The next batch may be claimed before `step` is committed."""
        ...

    async def commit(
        self, step: int, version: Version, audited: Sequence[int] = (), compared: Sequence[ComparedSegment] = ()
    ) -> None:
        """Marks the batch of `step` as trained and announces the resulting version. `audited` are tasks that were left
        out of the training because their log-probs differ too much from the trainer's. `compared` says for each audited
        segment how many log-probs were compared with the trainer's, and how many differed too much."""
        ...

    async def checkpointed(self, step: int) -> None:
        """Reports that the checkpoint of `step` is durable: earlier steps will not be needed again."""
        ...

    async def report(self, row: Mapping[str, Any]) -> None:
        """Reports a step's metrics, or an event such as a resume."""
        ...


class JudgeClient(Protocol):
    """Calls that a judge makes to its coordinator."""

    async def lease_rewards(self, capacity: int, wait_s: float) -> RewardLease:
        """Leases up to `capacity` samples, all for one reward function, as soon as there are any. Returns an empty
        lease after `wait_s` seconds. A busy judge calls with `capacity` = 0 from time to time, as a heartbeat."""
        ...

    async def submit_rewards(self, ticket: str, results: Sequence[RewardResult]) -> None:
        """Submits results for all samples of the lease `ticket`, in the same order; returns once they are on disk."""
        ...

    async def leave(self) -> None:
        """Leaves the run and gives back all samples without a submitted result; they do not count as failed."""
        ...
