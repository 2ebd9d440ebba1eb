"""The rollout loop: lease tasks, generate with the engine, submit the trajectories.

Concurrent loops lease tasks for the engine's free slots, renew leases, load newer versions during generation, and stop
unfinished tasks at the end of a round. Guarantees:

- A task that requires a version is sampled from that version alone. No other version is loaded while such a task runs,
  nor between a lease call and the start of the leased tasks. All other tasks continue across a load, split into
  segments, or are handed back as partials if the engine cannot split. A version with a lower number than the current
  one is loaded only while no task generates; with `finishes`, this holds for every version. No task begins during a
  load.
- At the end of a round, tasks with new tokens are handed back as partials, and others are given back untouched.
  Evaluation tasks go on.
- Trajectories are sent by the outbox; their leases are renewed until the coordinator has acknowledged or refused them.
- A task whose generation fails is reported as failed, with the reason; any other error ends the worker. A worker that
  drains hands unfinished tasks back; one that is cancelled does not.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from typing import Any

import msgspec
import numpy as np

from offbeat.client.protocol import LeaseResponse, WorkerClient
from offbeat.engines.protocol import (
    Engine,
    EngineDied,
    EngineError,
    Finish,
    Generation,
    KvMode,
    Request,
)
from offbeat.environments.pool import EnvironmentFailed
from offbeat.errors import OffbeatError, RunInterrupted, RunOver
from offbeat.ledger.errors import ENVIRONMENT, LOST_ENVIRONMENT
from offbeat.testing.crash_points import crash_here
from offbeat.trajectory import End, SegmentError, Task, Trajectory
from offbeat.waiting import Notifier, run_to_end
from offbeat.weights.receive import ReceiveFigures
from offbeat.weights.version import Version
from offbeat.worker.episodes import EnvironmentGone, Episodes
from offbeat.worker.spool import REFUSALS, Outbox, Spool, Unsent

log = logging.getLogger(__name__)

LEASE_WAIT_S = 5.0
"""Longest wait of one lease call; short, so that an unreachable coordinator is noticed soon."""
NEWER_WAIT_S = 20.0
"""Longest wait of one call to the coordinator for a newer version."""
FIRST_TTL_S = 30.0
"""Lease duration assumed before the first lease, for example while spooled trajectories are sent at the start."""
OVER_WAIT_S = 20.0
"""Longest wait of one call to the coordinator for the end of a round."""
BEATS_PER_TTL = 3
"""Heartbeats per lease duration; several, so that one lost heartbeat does not cost a lease."""
LOAD_WITHIN_S = 60.0
"""Longest time that an unfinished load may delay the end of the worker; only a hung device takes longer."""
VERSION_WITHIN_S = 60.0
"""Longest time that an unfinished answer waits for a version that may continue it; after that, the answer is handed
back."""
DRAIN_WITHIN_S = 60.0
"""Longest time that a leaving worker takes to hand back its tasks and have its last trajectories acknowledged."""


class _GaveUp(Exception):
    """Draining took longer than its time limit, so the worker ends with unacknowledged work."""


class Worker:
    """Leases tasks from one coordinator, generates with one engine and submits the trajectories; call `run` once.
    Without a spool, a kill loses unsent work."""

    def __init__(
        self,
        name: str,
        engine: Engine,
        client: WorkerClient,
        *,
        spool: Spool | None = None,
        kv: KvMode = KvMode.SAME,
        kv_lag: int = 0,
        finishes: bool = False,
        episodes: Episodes | None = None,
    ):
        """`kv` and `kv_lag` are set in every engine request: which keys and values it may use, and how many versions
        old these may be. With `finishes`, running tasks end before weights are loaded. `episodes` carries on tasks with
        tools or environments; None: the run has no such tasks."""
        self.name, self.engine, self.client = name, engine, client
        self._kv, self._kv_lag, self._finishes, self._episodes = kv, kv_lag, finishes, episodes
        self._slots = asyncio.Semaphore(engine.capabilities.num_slots)
        """Slots of the engine, for runs with episodes, where more tasks run than the engine has slots."""
        self.running: dict[tuple[int, int], ActiveTask] = {}
        """Running tasks by task id and fence. If a lease was lost, the same task may be leased again, with a new fence,
        before this worker learns of the loss."""
        self._fences: dict[int, int] = {}
        """By task id: the fence of the lease under which this worker last began the task."""
        self._changes = Notifier()
        self._outbox = Outbox(name, client, spool, self._changes)
        self._versions, self._rounds = VersionFetcher(name, client), TaskRounds(client, self._changes)
        self._switch = asyncio.Lock()
        """Lock that is held from a lease call until the leased tasks have started, and also during a load."""
        self._is_reloading = False
        self._ttl_s = FIRST_TTL_S
        self._draining, self._over = asyncio.Event(), asyncio.Event()
        self._drain_within_s = DRAIN_WITHIN_S
        self._over.set()
        self.run_over: RunOver | None = None
        """Error that says how the run ended; None while the coordinator has not told this worker of the end."""
        self.num_answers = self.num_tokens = 0
        """Number of answers that this worker has finished, and number of tokens that it has sampled."""
        self.why_idle = ""
        """Why the latest lease call gave no task, in words for a person; "": it gave a task, or no reason is known."""

    @property
    def has_unsent(self) -> bool:
        """Whether trajectories wait to be acknowledged."""
        return len(self._outbox) > 0

    async def run(self) -> None:
        """Works until the run is over, the worker is drained, or it is cancelled; then aborts all running tasks."""
        self._over.clear()
        try:
            error = await self._live()
        finally:
            self._over.set()
            with suppress(EngineDied):  # a dead engine runs no tasks
                await self.engine.abort()
        if error is not None:
            raise error

    async def _live(self) -> BaseException | None:
        """Runs the worker's loops until the worker is drained; returns the first error, or None."""
        try:
            async with asyncio.TaskGroup() as group:
                beating = group.create_task(self._renew())
                loops = {group.create_task(loop) for loop in self._loops(group)}
                await self._draining.wait()
                await self._wind_down(loops)
                beating.cancel()
        except BaseExceptionGroup as errors:  # a dead engine fails every running task; the first error is enough
            return None if isinstance(errors.exceptions[0], _GaveUp) else errors.exceptions[0]
        return None

    def _loops(self, group: asyncio.TaskGroup) -> tuple[Coroutine[Any, Any, None], ...]:
        loops = self._work(group), self._refresh(), self._stop_rounds()
        return tuple(self._until_over(loop) for loop in loops)

    async def _until_over(self, loop: Coroutine[Any, Any, None]) -> None:
        """Runs `loop`; when the run is over, drains the worker, so that finished trajectories are still sent."""
        try:
            await loop
        except RunOver as error:
            self.run_over = error
            self._draining.set()

    async def drain(self, within_s: float = DRAIN_WITHIN_S) -> None:
        """Stops leasing, hands back unfinished tasks, sends finished ones and ends `run`. Gives up on the coordinator
        after `within_s` seconds; unsent trajectories then stay in the spool."""
        self._drain_within_s = within_s
        self._draining.set()
        await self._over.wait()

    async def send_finished(self) -> None:
        """Sends the trajectories that were finished before the engine died and `run` ended."""
        await self._outbox.send_all()

    async def _wind_down(self, loops: set[asyncio.Task[None]]) -> None:
        try:
            async with asyncio.timeout(self._drain_within_s):
                for loop in loops:
                    loop.cancel()
                await asyncio.wait(loops)
                await self._end(self.running.values(), AbortReason.LEAVE)
                await self._changes.wait_for(lambda: not self.running and not self._outbox)
                await self.client.leave()
        except TimeoutError as error:
            left = len(self.running) + len(self._outbox)
            log.warning(
                "worker %s: leaving, although %d trajectories are not acknowledged after %g s",
                self.name,
                left,
                self._drain_within_s,
            )
            raise _GaveUp from error

    # Leases

    async def _work(self, group: asyncio.TaskGroup) -> None:
        await self._outbox.resend(group)
        await self.client.heartbeat([*self.running, *self._outbox.unsent])  # releases leases of an earlier process
        while True:
            await self._changes.wait_for(self._num_free)
            async with self._switch:  # a version that tasks require stays loaded until they are leased
                lease = await self._lease()
                while lease.version is not None and not lease.tasks:
                    await self._take(lease.version)
                    lease = await self._lease()
                if lease.tasks:
                    crash_here("task-leased")
                await self._begin(lease, group)
            if lease.is_over:
                raise RunInterrupted(lease.interrupted) if lease.interrupted else RunOver("the run is over")

    def _num_free(self) -> int:
        """Returns how many tasks can begin now: one per free slot, but 0 if more trajectories than slots are unsent. A
        run with episodes has more of them than slots, because those that wait for a tool hold none."""
        num_slots = self.engine.capabilities.num_slots
        at_once = num_slots if self._episodes is None else self._episodes.at_once(num_slots)
        return max(0, at_once - len(self.running)) if len(self._outbox) <= at_once else 0

    async def _lease(self) -> LeaseResponse:
        await self._changes.wait_for(self._num_free)  # loading a version may have taken a while
        lease = await self.client.lease(self._num_free(), self.engine.version, LEASE_WAIT_S)
        if lease.ttl_s > 0:
            self._ttl_s = lease.ttl_s
        self.why_idle = lease.idle
        return lease

    async def _begin(self, lease: LeaseResponse, group: asyncio.TaskGroup) -> None:
        self._rounds.entered(lease.round)
        late = []
        for task in lease.tasks:
            running = begin(task, lease.round)
            if not await self._start(running, group):
                late.append(running.key)
        await self._give_back(late)

    async def _start(self, running: ActiveTask, group: asyncio.TaskGroup) -> bool:
        """Starts a task; first aborts it if it still runs under an earlier lease. Returns False, without a start, if
        the task's round is over."""
        task = running.task
        before = self.running.get((task.id, self._fences.get(task.id, 0)))
        if before is not None:
            await self._end([before], AbortReason.LOST)
        if self._rounds.is_over(running.round):
            return False
        self.running[running.key] = running
        self._fences[task.id] = task.fence
        self._changes.notify()
        group.create_task(self._carry_on(running, group))
        return True

    async def _give_back(self, leases: Sequence[tuple[int, int]]) -> None:
        if leases:
            await self.client.give_back(leases)

    async def _stop_rounds(self) -> None:
        while True:
            await self._rounds.next_over()
            stopped = [running for running in self.running.values() if self._rounds.is_over(running.round)]
            await self._end(stopped, AbortReason.STOP)
            await self._changes.wait_for(partial(self._have_ended, stopped))
            await self._give_back([running.key for running in stopped if running.is_untouched])

    def _have_ended(self, stopped: Sequence[ActiveTask]) -> bool:
        return not any(self.running.get(running.key) is running for running in stopped)

    async def _renew(self) -> None:
        while True:
            await self._changes.wait_for(lambda: self.running or self._outbox)
            await asyncio.sleep(self._ttl_s / BEATS_PER_TTL)
            held = [*self.running, *self._outbox.unsent]
            if not held:
                continue
            answer = await self.client.heartbeat(held)
            still = [self.running[key] for key in held if key in self.running]  # not tasks with a newer fence
            await self._end([running for running in still if running.task.id in answer.lost], AbortReason.LOST)

    async def _end(self, ended: Iterable[ActiveTask], abort_reason: AbortReason) -> None:
        """Aborts the tasks `ended` in the engine; `abort_reason` tells `_generate` what to do with their new tokens."""
        ids = []
        for running in ended:
            if abort_reason is AbortReason.RELOAD and running.is_outside:
                continue  # an episode that waits for its environment does not notice a load
            if running.abort_reason is not AbortReason.LOST:
                running.abort_reason = abort_reason
            running.interrupt()
            ids.append(running.request_id)
        self._changes.notify()
        if ids:
            await self.engine.abort(ids)

    # Versions

    async def _refresh(self) -> None:
        """Fetches newer versions as they are published, during generation, and loads them."""
        while True:
            version = await self.client.newer(self.engine.version, NEWER_WAIT_S)
            if version is None:
                continue
            async with self._versions.unless_replaced(version, self.engine.version):
                here = await self._versions.fetch(version)
                if self._finishes:
                    async with self._switch:  # no task begins while running tasks finish
                        if await self.client.newer(self.engine.version, 0.0) is not None:
                            await self._load_when_it_may(here)
                    continue
                if not self._may_load(here):
                    await self._changes.wait_for(partial(self._may_load, here))
                    continue  # after a long wait, a newer version may be wanted
                async with self._switch:
                    if self._may_load(here) and self.engine.version != here.number:
                        await self._load(here)

    async def _take(self, version: Version) -> None:
        """Fetches and loads the version that a lease response names. The caller must hold `_switch`: no task may be
        leased meanwhile."""
        self.why_idle = f"version {version.number} is being fetched and loaded"
        async with self._versions.unless_replaced(version, self.engine.version):
            await self._load_when_it_may(await self._versions.fetch(version))

    async def _load_when_it_may(self, here: Version) -> None:
        await self._changes.wait_for(partial(self._may_load, here))
        if self._finishes:  # after a long wait, a newer version may be wanted
            newest = await self.client.newer(self.engine.version, 0.0)
            here = here if newest is None else await self._versions.fetch(newest)
        await self._load(here)

    def _may_load(self, version: Version) -> bool:
        is_lower = self.engine.version is not None and version.number < self.engine.version
        if self._finishes or is_lower:  # versions never fall within a trajectory
            return all(running.is_waiting and not running.is_bound for running in self.running.values())
        return all(running.task.require_version is None for running in self.running.values())

    async def _load(self, version: Version) -> None:
        self._is_reloading = not self.engine.capabilities.splits_by_version
        try:
            if self._is_reloading:
                await self._end(self.running.values(), AbortReason.RELOAD)
            await run_to_end(self.engine.load(version), LOAD_WITHIN_S)
        finally:
            self._is_reloading = False
            self._changes.notify()
        log.info("worker %s: serves version %d", self.name, version.number)

    # One task

    async def _carry_on(self, running: ActiveTask, group: asyncio.TaskGroup) -> None:
        num_before = running.num_sampled
        try:
            is_wanted = await (self._generate(running) if running.is_answer else self._play(running))
        except EngineDied:
            raise
        except (EngineError, SegmentError) as error:
            is_wanted = False
            await self._fail(running.task, str(error))
        except (EnvironmentFailed, EnvironmentGone) as error:
            is_wanted = False
            kind = LOST_ENVIRONMENT if isinstance(error, EnvironmentGone) else ENVIRONMENT
            await self._fail(running.task, f"{kind}: {error}")
        finally:
            self.num_tokens += max(0, running.num_sampled - num_before)
            del self.running[running.key]
            if self._fences.get(running.task.id) == running.task.fence:
                del self._fences[running.task.id]
            self._changes.notify()
        if is_wanted:
            self.num_answers += not running.trajectory.is_partial
            crash_here("generated")
            self._outbox.post(Unsent(running.trajectory, running.task.fence), group)

    async def _generate(self, running: ActiveTask) -> bool:
        """Continues a trajectory until it ends or is aborted; returns whether the trajectory must be submitted."""
        task, trajectory = running.task, running.trajectory
        num_before = trajectory.num_tokens
        self._check_version(task)
        while trajectory.num_tokens < trajectory.max_new_tokens:
            if not await self._may_begin(running):
                return True  # hands the prefix to a worker with newer weights
            if running.abort_reason is None:  # otherwise it was aborted before it began
                request = request_for(running, self._kv, self._kv_lag)
                async with nullcontext() if self._episodes is None else self._slots:
                    generation = await self.engine.generate(request)
                if append(trajectory, generation):
                    return running.abort_reason is not AbortReason.LOST
            reason, running.abort_reason = running.abort_reason, None
            has_more = trajectory.num_tokens > num_before
            if reason is AbortReason.LOST or reason is None:  # None: the engine is closing, and this worker with it
                return False
            running.is_untouched = reason is AbortReason.STOP and not has_more
            if has_more or reason in (AbortReason.LEAVE, AbortReason.STOP):
                return has_more
        trajectory.finish(End.LENGTH)
        return True

    def _check_version(self, task: Task) -> None:
        if task.require_version not in (None, self.engine.version):
            raise EngineError(
                f"task {task.id} requires version {task.require_version}, but the engine has version "
                f"{self.engine.version}"
            )

    async def _play(self, running: ActiveTask) -> bool:
        """Continues an episode, as `_generate` does an answer: its turns go to its environment, in a slot of the engine
        only while they are generated."""
        assert self._episodes is not None, "the run's configuration has no task with tools or an environment"
        num_before = running.num_sampled
        episode = self._episodes.enter(running.task, running.trajectory)
        is_parked = False
        try:
            while episode.trajectory.end is None:
                running.is_outside = True
                if episode.awaits_environment and running.abort_reason is None:
                    running.is_waiting = True
                    self._changes.notify()
                    await episode.answer(self._episodes.pool, running.interruption())
                    running.is_waiting = False
                elif running.abort_reason is None and episode.turn_tokens_left <= 0:
                    episode.finish(End.LENGTH)
                elif running.abort_reason is None:
                    if not await self._may_begin(running):
                        running.trajectory, is_parked = self._episodes.park(episode), True
                        return running.num_sampled > 0
                    async with self._slots:
                        if running.abort_reason is None:
                            self._check_version(running.task)
                            running.is_outside = False
                            request = request_for(running, self._kv, self._kv_lag, episode.turn_tokens_left)
                            episode.append(await self.engine.generate(request))
                            continue
                if episode.trajectory.end is not None:
                    break
                reason, running.abort_reason = running.abort_reason, None
                if reason is AbortReason.LOST:
                    return False
                if reason in (AbortReason.LEAVE, AbortReason.STOP):
                    has_more = running.num_sampled > num_before
                    running.is_untouched = reason is AbortReason.STOP and not has_more
                    if has_more or running.task.prefix is not None:
                        running.trajectory, is_parked = self._episodes.park(episode), True
                    return has_more
            return running.abort_reason is not AbortReason.LOST
        finally:
            if not is_parked:
                episode.close()

    async def _may_begin(self, running: ActiveTask) -> bool:
        """Waits until the engine has a version that may continue the task and no load is under way, or until the task
        is aborted. Returns False if no such version is loaded in time."""
        least = running.least_version

        def is_ready() -> bool:
            return running.abort_reason is not None or (not self._is_reloading and (self.engine.version or 0) >= least)

        running.is_waiting = True
        self._changes.notify()
        try:
            while not is_ready():
                try:
                    async with asyncio.timeout(VERSION_WITHIN_S):
                        await self._changes.wait_for(is_ready)
                except TimeoutError:
                    if not self._is_reloading:  # a load always ends, so keep waiting for it
                        return is_ready()
            return True
        finally:
            running.is_waiting = False

    async def _fail(self, task: Task, reason: str) -> None:
        log.warning("worker %s: task %d failed: %s", self.name, task.id, reason)
        try:
            await self.client.fail(task.id, task.fence, reason)
        except REFUSALS as error:
            log.warning("worker %s: the report that task %d failed was refused: %s", self.name, task.id, error)


class AbortReason(StrEnum):
    """Why a running task was aborted."""

    LOST = "lost"
    """The worker lost the lease: it discards the task's new tokens."""
    RELOAD = "reload"
    """The engine loads weights and cannot split an answer: new tokens are handed back. A task without any is sent to
    the engine again after the load."""
    LEAVE = "leave"
    """The worker leaves: new tokens are handed back. The coordinator frees the lease of a task without any."""
    STOP = "stop"
    """The round is over: new tokens are handed back. A task without any is given back untouched."""


@dataclass(eq=False)
class ActiveTask:
    """A leased task and its trajectory so far."""

    task: Task
    trajectory: Trajectory
    abort_reason: AbortReason | None = None
    is_waiting: bool = False
    """Whether the task is not in the engine now, because it waits for weights."""
    round: int | None = None
    """Round at whose end the task is stopped; None: the task runs until it ends by itself."""
    is_untouched: bool = False
    """Whether the task was stopped at the end of its round without a new token."""
    is_outside: bool = False
    """Whether an episode is not in the engine now."""
    _interruption: asyncio.Future[None] | None = None

    @property
    def is_answer(self) -> bool:
        """Whether the task wants one answer, without tools or an environment."""
        return self.task.episode is msgspec.UNSET

    @property
    def is_bound(self) -> bool:
        """Whether an episode needs the version that is loaded now, also while it waits for its environment."""
        return self.is_outside and self.task.require_version is not None

    @property
    def num_sampled(self) -> int:
        trajectory = self.trajectory
        return trajectory.num_tokens if self.is_answer else int(trajectory.sampled_mask.sum())

    def interruption(self) -> asyncio.Future[None]:
        """Returns a future that is done once the task is aborted."""
        if self._interruption is None or (self._interruption.done() and self.abort_reason is None):
            self._interruption = asyncio.get_running_loop().create_future()
        return self._interruption

    def interrupt(self) -> None:
        if self._interruption is not None and not self._interruption.done():
            self._interruption.set_result(None)

    @property
    def key(self) -> tuple[int, int]:
        return self.task.id, self.task.fence

    @property
    def request_id(self) -> str:
        """Id of the engine request. Contains the lease's fence and the number of tokens so far, because a task may be
        leased again while its last request is still being aborted."""
        return f"{self.task.id}-{self.task.fence}-{self.trajectory.num_tokens}"

    @property
    def least_version(self) -> int:
        """Oldest version that may continue the trajectory: that of its last tokens, minus `max_version_drop`."""
        sampled = [segment.version for segment in self.trajectory.segments if segment.version is not None]
        return max(0, sampled[-1] - self.trajectory.max_version_drop) if sampled else 0


def begin(task: Task, round_number: int | None = None) -> ActiveTask:
    """Makes the active task for a leased task. The prefix is copied, because it may be shared. A task that requires a
    version belongs to no round, so the end of a round does not stop it."""
    trajectory = task.new_trajectory() if task.prefix is None else replace(task.prefix)
    return ActiveTask(task, trajectory, round=round_number if task.require_version is None else None)


def request_for(
    running: ActiveTask, kv: KvMode = KvMode.SAME, kv_lag: int = 0, max_new_tokens: int | None = None
) -> Request:
    """Returns the engine request that continues a task, from its prompt, tokens so far and remaining token budget, or
    `max_new_tokens` if it is given."""
    task, trajectory = running.task, running.trajectory
    done = trajectory.num_tokens
    room = task.sampling.max_new_tokens - done if max_new_tokens is None else max_new_tokens
    return Request(
        id=running.request_id,
        tokens=np.concatenate([task.prompt, trajectory.tokens]) if done else task.prompt,
        seed=task.seed,
        sampling=msgspec.structs.replace(task.sampling, max_new_tokens=room),
        position=done,
        kv=kv,
        kv_lag=kv_lag if kv is KvMode.STALE else 0,
        is_turn=not running.is_answer,
    )


def append(trajectory: Trajectory, generation: Generation) -> bool:
    """Appends the segments of an engine's generation to the trajectory; returns whether the trajectory has ended."""
    if generation.finish is Finish.ABORT:
        for segment in generation.segments:
            trajectory.append(segment)
        return False
    if generation.finish is Finish.TURN or not generation.segments:
        raise EngineError(
            f"the engine ended request {generation.id} with finish reason {generation.finish.value!r} and "
            f"{len(generation.segments)} segments of tokens; it must give at least one token, and finish with 'stop' "
            "or 'length'"
        )
    *first, last = generation.segments
    for segment in first:
        trajectory.append(segment)
    trajectory.append(last, End(generation.finish.value))
    return True


async def play_through(task: Task, engine: Engine, episodes: Episodes) -> Trajectory:
    """Plays an episode from its beginning to its end with an engine that nobody interrupts, as in an evaluation."""
    running = begin(task)
    episode = episodes.enter(task, running.trajectory)
    try:
        while episode.trajectory.end is None:
            if episode.awaits_environment:
                await episode.answer(episodes.pool, running.interruption())
            elif episode.turn_tokens_left <= 0:
                episode.finish(End.LENGTH)
            else:
                request = request_for(running, max_new_tokens=episode.turn_tokens_left)
                episode.append(await engine.generate(request))
        return episode.trajectory
    finally:
        episode.close()


class TaskRounds:
    """Tracks the rounds (phases of generation for one batch) of one worker; a round's number is that of the version
    that began it. A task of a finished round must not begin, however late its lease arrives. In a run without rounds,
    the coordinator is never asked."""

    def __init__(self, client: WorkerClient, changes: Notifier):
        self._client, self._changes = client, changes
        self._current: int | None = None
        self._last_over = -1

    def entered(self, number: int | None) -> None:
        """Records the number of the round to which newly leased tasks belong; None: they belong to none."""
        if number is not None and number > self._last_over:
            self._current = number if self._current is None else max(number, self._current)
            self._changes.notify()

    def is_over(self, number: int | None) -> bool:
        return number is not None and number <= self._last_over

    async def next_over(self) -> int:
        """Waits for the end of the current round; returns its number."""
        while True:
            await self._changes.wait_for(lambda: self._current is not None)
            number = self._current
            assert number is not None
            if await self._client.round_over(number, OVER_WAIT_S):
                self._last_over = number
                self._current = None if self._current == number else self._current
                return number


MAX_FAILURES = 4
"""Number of failures to fetch or load one version that are tolerated if a newer version exists. Two loops load
versions. Each may fail once before the newer version is published, and once more before it learns of that version."""


class VersionFetcher:
    """Fetches and verifies versions during generation, before the engine loads them.

    The refresh loop and the lease loop may ask for the same version, which is fetched once. The coordinator deletes old
    versions. So a failed fetch is an error only if no newer version exists, or after more than `MAX_FAILURES` failures.
    """

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
        """Wraps fetching and loading of `version`; suppresses errors if a newer version has replaced it. `have` is the
        number of the version that the engine serves."""
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
                "worker %s: version %d could not be fetched or loaded; continuing with the newer version %d: %s",
                self.worker,
                version.number,
                newest.number,
                error,
            )


class WorkerMetrics:
    """Costs of new versions since the worker's start: seconds and bytes, named as in the coordinator's metrics."""

    def __init__(self) -> None:
        self._engine: Engine | None = None
        self.latest: ReceiveFigures | None = None
        """Costs of the version that was fetched last; None: no version was fetched, as on the coordinator's machine,
        where the worker reads the weights in place."""
        self._sums: dict[str, float] = defaultdict(float)

    def follow(self, engine: Engine) -> None:
        """From now on, counts the seconds for which `engine` stands still during loads. Those of the previous engine
        stay in the total."""
        self._sums["still_s"] = self._still_s
        self._engine = engine

    def fetched(self, received: ReceiveFigures) -> None:
        """Adds the costs of one received version."""
        self.latest = received
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
