"""The coordinator: hands out tasks, takes in trajectories, has them scored, gives the trainer its batches.

It decides nothing itself: `control` decides, the ledger remembers, and this module carries calls between workers,
trainer, reward pool and ledger. Nothing that matters lives here alone, so it may be killed at any moment and started
again on the same ledger. Acknowledgements follow the commit: submissions that arrive while one commit is under way
share the next. Every ledger call runs on one writer thread.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

from offbeat.control.admit import Pace, admit
from offbeat.errors import DeadlineError
from offbeat.ledger.errors import LedgerError
from offbeat.ledger.ledger import Ledger
from offbeat.ledger.records import Batch, EvalRound, Outcome, Reconciled
from offbeat.serve.client import Lease
from offbeat.serve.issuing import Issuer
from offbeat.serve.scoring import Scorer
from offbeat.trajectory import Trajectory
from offbeat.weights.version import Version

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True)
class CoordinatorSettings:
    groups_per_step: int
    num_steps: int
    max_staleness: int


@dataclass
class StepTimes:
    """When a step's generation began and ended, on the monotonic clock; for the time split."""

    first_lease_s: float | None = None
    last_submit_s: float | None = None
    claimed_s: float | None = None

    def split(self) -> dict[str, float]:
        if self.first_lease_s is None or self.last_submit_s is None or self.claimed_s is None:
            return {}
        return {
            "generate": self.last_submit_s - self.first_lease_s,
            "reward": max(self.claimed_s - self.last_submit_s, 0.0),
        }


class Coordinator:
    """Serves workers and a trainer from one ledger; implements `WorkerClient` and `TrainerClient` in process."""

    def __init__(self, ledger: Ledger, issuer: Issuer, scorer: Scorer, settings: CoordinatorSettings):
        self.ledger, self.issuer, self.scorer, self.settings = ledger, issuer, scorer, settings
        self.pace = Pace(settings.groups_per_step, settings.num_steps)
        self._times = self._claimed_times = StepTimes()
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="ledger")
        self._changed = asyncio.Event()
        self._inbox: list[tuple[Trajectory, str]] = []
        self._inbox_future: asyncio.Future[list[Outcome | LedgerError]] | None = None
        self._admitting = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self._broken: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    async def start(self) -> None:
        """After a restart nobody holds a lease, and trajectories may be waiting for their reward."""
        await self.call(self.ledger.release)
        self._spawn(self._score_waiting())

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._broken.done():
            self._broken.exception()  # looked at: whoever waited has heard of it, or has an error of its own
        self._writer.shutdown()

    async def call(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Runs a ledger call on the writer thread."""

        def work() -> R:
            with self.ledger.naming_damage():
                return function(*args, **kwargs)

        return await asyncio.get_running_loop().run_in_executor(self._writer, work)

    # --- workers ---

    async def lease(self, worker: str, capacity: int, have_version: int | None, wait_s: float) -> Lease:
        deadline_s = time.monotonic() + wait_s
        while True:
            changed = self._changed
            await self._admit()
            tasks = await self.call(self.ledger.lease, worker, capacity, have_version)
            if tasks:
                self._times.first_lease_s = self._times.first_lease_s or time.monotonic()
                return Lease(tasks=tuple(tasks))
            wanted = await self.call(self.ledger.wanted_version)
            if wanted is not None and wanted != have_version:
                return Lease(version=await self.call(self.ledger.version, wanted))
            if not await self._change(changed, deadline_s):
                return Lease()

    async def submit(self, worker: str, trajectories: Sequence[Trajectory]) -> None:
        start = len(self._inbox)
        self._inbox += [(trajectory, worker) for trajectory in trajectories]
        if self._inbox_future is None:
            self._inbox_future = asyncio.get_running_loop().create_future()
            self._spawn(self._commit_inbox())
        outcomes = await asyncio.shield(self._inbox_future)
        for outcome in outcomes[start : start + len(trajectories)]:
            if isinstance(outcome, LedgerError):  # theirs alone: what others sent in the same moment is stored
                raise outcome

    async def fail(self, worker: str, task: int, reason: str) -> None:
        self.scorer.failed(reason)
        await self.call(self.ledger.fail, task, "engine", reason)
        self._notify()

    async def _commit_inbox(self) -> None:
        """Writes what has arrived in one transaction, after letting every caller of this moment in."""
        await asyncio.sleep(0)
        batch, waiting = self._inbox, self._inbox_future
        self._inbox, self._inbox_future = [], None
        assert waiting is not None
        try:
            outcomes = await self.call(self.ledger.submit, batch)
        except BaseException as error:
            waiting.set_exception(error)
            waiting.exception()  # looked at: its callers may have been cancelled, and `_ended` keeps the error
            raise
        waiting.set_result(outcomes)
        self._times.last_submit_s = time.monotonic()
        await self._score_waiting()

    async def _score_waiting(self) -> None:
        for unscored in await self.call(self.scorer.take_unscored, self.ledger):
            self._spawn(self._score(unscored))

    async def _score(self, unscored: Sequence[Any]) -> None:
        scored = await self.scorer.score(unscored)
        await self.call(self.ledger.score, scored)
        self._notify()

    async def _admit(self) -> None:
        """Draws as many groups as the schedule allows now."""
        async with self._admitting:
            standing = await self.call(self.ledger.standing)
            count = admit(standing, self.pace)
            if count:
                version = await self.call(self.ledger.latest_version)
                assert version is not None
                cursor = await self.call(self.ledger.cursor)
                groups = await asyncio.to_thread(self.issuer.draw, cursor, count, version.number)
                await self.call(self.ledger.admit, groups)

    # --- trainer ---

    async def next_version(self) -> int:
        return await self.call(self.ledger.next_version_number)

    async def publish(self, version: Version) -> None:
        await self.call(self.ledger.publish, version)
        await self._open_evaluation(version)
        self._notify()

    async def claim(self, step: int, within_s: float) -> Batch:
        deadline_s = time.monotonic() + within_s
        settings = self.settings
        while True:
            changed = self._changed
            self.scorer.stop_if_failing()
            batch = await self.call(self.ledger.claim, step, settings.groups_per_step, settings.max_staleness)
            if batch is not None:
                self._times.claimed_s = time.monotonic()
                self._claimed_times, self._times = self._times, StepTimes()
                return batch
            if not await self._change(changed, deadline_s):
                raise DeadlineError(
                    f"step {step}: no batch within rollout.deadline_s = {within_s:.0f} s; "
                    f"{await self.call(self.ledger.waiting_for)}"
                )

    def time_split(self) -> dict[str, float]:
        """Seconds that the batch claimed last took to generate, and then to score."""
        return self._claimed_times.split()

    async def commit(self, step: int, version: Version) -> None:
        await self.call(self.ledger.commit, step, version)
        await self._open_evaluation(version)
        self._notify()

    async def reconcile(self, step: int, version: int | None) -> Reconciled:
        return await self.call(self.ledger.reconcile, step, version)

    # --- evaluation ---

    async def _open_evaluation(self, version: Version) -> None:
        if not self.issuer.eval_plan.is_due(version.step, self.settings.num_steps):
            return
        if await self.call(self.ledger.eval_round, version.step) is None:
            groups = await asyncio.to_thread(self.issuer.held_out, version.number)
            await self.call(self.ledger.admit, groups)

    async def evaluation(self, step: int) -> EvalRound:
        """The evaluation of a step, once it is complete; deadlines are the trainer's, without which no step comes."""
        while True:
            changed = self._changed
            found = await self.call(self.ledger.eval_round, step)
            if found is not None and found.is_complete:
                return found
            await self._change(changed, math.inf)

    # --- waiting ---

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _change(self, changed: asyncio.Event, deadline_s: float) -> bool:
        """Waits until something changed since `changed` was taken; False at the deadline. Raises what broke us."""
        waiting: asyncio.Future[Any] = asyncio.ensure_future(changed.wait())
        left_s = None if math.isinf(deadline_s) else max(deadline_s - time.monotonic(), 0.0)
        await asyncio.wait({waiting, self._broken}, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
        if self._broken.done():
            self._broken.result()
        if waiting.done():
            return True
        waiting.cancel()
        return False

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """A part of us that fails ends every wait with its error, instead of leaving someone to wait in vain."""
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) and not self._broken.done():
            self._broken.set_exception(error)
