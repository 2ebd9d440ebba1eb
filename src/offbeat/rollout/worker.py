"""A worker's loop: lease tasks, let the engine carry them on, hand in what came of them.

Four loops run side by side. One leases as many tasks as the engine has free slots; one renews the leases, aborts what
was lost and hands back what is asked for; one takes newer versions while generation goes on; and where work comes in
rounds, one stops what is unfinished when a round is over. Guarantees:

- a task that requires a version is sampled from it alone: no other is loaded while such a task runs, nor between the
  call for tasks and their start. All other tasks go on across a load, split into segments; where an engine cannot do
  that, they are handed back as partials first. A version lower than the one served is loaded only when nothing runs,
  and so is every version where answers are to end as they began; nothing new is begun meanwhile;
- when a round is over, what was sampled for it is handed back, what has no new token is given back, and nothing of it
  begins any more. Evaluation goes on;
- a trajectory leaves through the outbox, and its lease is renewed until it is answered;
- a task whose generation fails is given back with the reason; anything else that goes wrong ends the worker with that
  error. Cancelled, it aborts what runs and hands nothing back; `drain` is the polite end.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from offbeat.crash import crash_here
from offbeat.errors import RunOver
from offbeat.rollout.engine import Engine, EngineDied, EngineError, KvMode, Version
from offbeat.rollout.outbox import REFUSALS, Outbox
from offbeat.rollout.refresh import Versions
from offbeat.rollout.rounds import Rounds
from offbeat.rollout.running import Fate, Running, append, begin, request_for
from offbeat.rollout.spool import Spool, Unsent
from offbeat.rollout.timing import Timings
from offbeat.rollout.waiting import Changes, to_its_end
from offbeat.serve.client import Lease, WorkerClient
from offbeat.trajectory import End, SegmentError, Task

log = logging.getLogger(__name__)

LEASE_WAIT_S = 5.0
"""How long one call for work may wait; short, so that a lost coordinator is noticed soon."""
NEWER_WAIT_S = 20.0
"""How long one call for a newer version may wait: nothing else waits for it."""
FIRST_TTL_S = 30.0
"""Taken for the length of a lease until the first one tells, as when an earlier life's trajectories are sent."""
TIMING_S, NUM_TIMINGS = 0.1, 10
"""How often the engine is looked at while it works in rounds, and of how many looks the coordinator is told at once."""
BEATS_PER_TTL = 3
"""One lost heartbeat must not cost a lease."""
LOAD_WITHIN_S = 60.0
"""How long a load may keep a worker from ending; only a stuck device takes so long."""
VERSION_WITHIN_S = 60.0
"""How long a prefix may wait here for a version as new as its last tokens, before it is handed back."""
DRAIN_WITHIN_S = 60.0
"""How long a worker that is to leave waits for its last submissions."""


class _GaveUp(Exception):
    """Draining took too long."""


class Worker:
    """One engine at work for one coordinator; `run` it once. Without a spool nothing outlives the process."""

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
    ):
        """`kv` and `kv_lag` go into every request. With `finishes`, what runs ends before other weights are loaded."""
        self.name, self.engine, self.client = name, engine, client
        self._kv, self._kv_lag, self._finishes = kv, kv_lag, finishes
        self.running: dict[tuple[int, int], Running] = {}
        """By task and fence: a lost task may come back under a new fence before the loss is told."""
        self._fences: dict[int, int] = {}
        """Under which each task was begun last."""
        self._changes = Changes()
        self._outbox = Outbox(name, client, spool, self._changes)
        self._versions, self._rounds = Versions(name, client), Rounds(client, self._changes)
        self._switch = asyncio.Lock()
        """Held from the call for tasks to their start, and while a version is loaded."""
        self._is_reloading = False
        self._ttl_s = FIRST_TTL_S
        self._draining, self._over = asyncio.Event(), asyncio.Event()
        self._drain_within_s = DRAIN_WITHIN_S
        self._over.set()

    async def run(self) -> None:
        """Works until the run is over, until drained, or until cancelled: then what runs is aborted, and its tasks go
        to whoever comes next."""
        self._over.clear()
        try:
            error = await self._live()
        finally:
            self._over.set()
            with suppress(EngineDied):  # then nothing runs any more
                await self.engine.abort()
        if error is not None:
            raise error

    async def _live(self) -> BaseException | None:
        """Runs the loops; returns the first error of any of them."""
        try:
            async with asyncio.TaskGroup() as group:
                beating = group.create_task(self._renew())
                loops = {group.create_task(loop) for loop in self._loops(group)}
                await self._draining.wait()
                await self._wind_down(loops)
                beating.cancel()
        except BaseExceptionGroup as errors:  # an engine that dies fails all that runs: one of them says it
            return None if isinstance(errors.exceptions[0], _GaveUp) else errors.exceptions[0]
        return None

    def _loops(self, group: asyncio.TaskGroup) -> tuple[Coroutine[Any, Any, None], ...]:
        loops = self._work(group), self._refresh(), self._stop_rounds(), self._tell_timings()
        return tuple(self._until_over(loop) for loop in loops)

    async def _until_over(self, loop: Coroutine[Any, Any, None]) -> None:
        """The end of the run is as if someone had asked us to leave: what is finished is sent first."""
        try:
            await loop
        except RunOver:
            self._draining.set()

    async def drain(self, within_s: float = DRAIN_WITHIN_S) -> None:
        """Leases no more, hands back what is unfinished, sends what is left, and ends `run`; gives up on the
        coordinator after `within_s`, and what was not sent stays in the spool."""
        self._drain_within_s = within_s
        self._draining.set()
        await self._over.wait()

    async def send_finished(self) -> None:
        """After an engine's death has ended `run`: sends what was finished before. The rest is lost with the engine."""
        await self._outbox.send_all()

    async def _wind_down(self, loops: set[asyncio.Task[None]]) -> None:
        try:
            async with asyncio.timeout(self._drain_within_s):
                for loop in loops:
                    loop.cancel()
                await asyncio.wait(loops)
                await self._end(self.running.values(), Fate.LEAVE)
                await self._changes.until(lambda: not self.running and not self._outbox)
                await self.client.leave()
        except TimeoutError as error:
            left = len(self.running) + len(self._outbox)
            log.warning(
                "worker %s: left without an answer for %d trajectories after %g s",
                self.name,
                left,
                self._drain_within_s,
            )
            raise _GaveUp from error

    # Leases

    async def _work(self, group: asyncio.TaskGroup) -> None:
        await self._outbox.resend(group)
        await self.client.heartbeat([*self.running, *self._outbox.unsent])  # what an earlier life held is not ours now
        while True:
            await self._changes.until(self._num_free)
            async with self._switch:  # a version that a lease asked for stays until its tasks had a chance to come
                lease = await self._lease()
                while lease.version is not None and not lease.tasks:
                    await self._take(lease.version)
                    lease = await self._lease()
                if lease.tasks:
                    crash_here("task-leased")
                await self._begin(lease, group)
            if lease.is_over:
                raise RunOver(f"worker {self.name}: the run is over")

    def _num_free(self) -> int:
        """How many tasks can begin now: none while more than the engine can run wait to be sent."""
        num_slots = self.engine.capabilities.num_slots
        return max(0, num_slots - len(self.running)) if len(self._outbox) <= num_slots else 0

    async def _lease(self) -> Lease:
        await self._changes.until(self._num_free)  # a version was taken meanwhile, and leases may have come and gone
        lease = await self.client.lease(self._num_free(), self.engine.version, LEASE_WAIT_S)
        if lease.ttl_s > 0:
            self._ttl_s = lease.ttl_s
        return lease

    async def _begin(self, lease: Lease, group: asyncio.TaskGroup) -> None:
        self._rounds.entered(lease.round)
        late = []
        for task in lease.tasks:
            running = begin(task, lease.round)
            if not await self._start(running, group):
                late.append(running.key)
        await self._give_back(late)

    async def _start(self, running: Running, group: asyncio.TaskGroup) -> bool:
        """False where the round is over that it belongs to."""
        task = running.task
        before = self.running.get((task.id, self._fences.get(task.id, 0)))
        if before is not None:
            await self._end([before], Fate.LOST)
        if self._rounds.is_over(running.round):
            return False
        self.running[running.key] = running
        self._fences[task.id] = task.fence
        self._changes.tell()
        group.create_task(self._carry_on(running, group))
        return True

    async def _give_back(self, leases: Sequence[tuple[int, int]]) -> None:
        if leases:
            await self.client.give_back(leases)

    async def _stop_rounds(self) -> None:
        while True:
            await self._rounds.next_over()
            stopped = [running for running in self.running.values() if self._rounds.is_over(running.round)]
            await self._end(stopped, Fate.STOP)
            await self._changes.until(partial(self._have_ended, stopped))
            await self._give_back([running.key for running in stopped if running.is_untouched])

    async def _tell_timings(self) -> None:
        """Where work comes in rounds, how many groups are under way depends on how long steps take."""
        timings = Timings()
        timings.follow(self.engine)
        while True:
            await self._changes.until(lambda: self._rounds.is_under_way and self.running)
            told = []
            for _ in range(NUM_TIMINGS):
                await asyncio.sleep(TIMING_S)
                if (timing := timings.take()) is not None:
                    told.append(timing)
            if told:
                await self.client.timed(told)

    def _have_ended(self, stopped: Sequence[Running]) -> bool:
        return not any(self.running.get(running.key) is running for running in stopped)

    async def _renew(self) -> None:
        while True:
            await self._changes.until(lambda: self.running or self._outbox)
            await asyncio.sleep(self._ttl_s / BEATS_PER_TTL)
            held = [*self.running, *self._outbox.unsent]
            if not held:
                continue
            answer = await self.client.heartbeat(held)
            still = [self.running[key] for key in held if key in self.running]  # others under the same number are newer
            await self._end([running for running in still if running.task.id in answer.lost], Fate.LOST)
            await self._end([running for running in still if running.task.id in answer.hand_back], Fate.HAND_BACK)

    async def _end(self, ended: Iterable[Running], fate: Fate) -> None:
        """Aborts tasks; what becomes of each is decided where it runs."""
        ids = []
        for running in ended:
            if running.fate is not Fate.LOST:
                running.fate = fate
            ids.append(running.request_id)
        self._changes.tell()
        if ids:
            await self.engine.abort(ids)

    # Versions

    async def _refresh(self) -> None:
        """Takes newer versions as they come; the download goes on beside generation."""
        while True:
            version = await self.client.newer(self.engine.version, NEWER_WAIT_S)
            if version is None:
                continue
            async with self._versions.unless_replaced(version, self.engine.version):
                here = await self._versions.fetch(version)
                if self._finishes:
                    async with self._switch:  # so that nothing begins while what runs comes to its end
                        if await self.client.newer(self.engine.version, 0.0) is not None:
                            await self._load_when_it_may(here)
                    continue
                if not self._may_load(here):
                    await self._changes.until(partial(self._may_load, here))
                    continue  # that may have taken long: another one may be wanted by now
                async with self._switch:
                    if self._may_load(here) and self.engine.version != here.number:
                        await self._load(here)

    async def _take(self, version: Version) -> None:
        """Takes a version that tasks wait for; call with the switch held, so that none is leased meanwhile."""
        async with self._versions.unless_replaced(version, self.engine.version):
            await self._load_when_it_may(await self._versions.fetch(version))

    async def _load_when_it_may(self, here: Version) -> None:
        await self._changes.until(partial(self._may_load, here))
        if self._finishes:  # what ran to its end may have taken long
            newest = await self.client.newer(self.engine.version, 0.0)
            here = here if newest is None else await self._versions.fetch(newest)
        await self._load(here)

    def _may_load(self, version: Version) -> bool:
        is_lower = self.engine.version is not None and version.number < self.engine.version
        if self._finishes or is_lower:  # versions rise along a trajectory
            return all(running.is_waiting for running in self.running.values())
        return all(running.task.require_version is None for running in self.running.values())

    async def _load(self, version: Version) -> None:
        self._is_reloading = not self.engine.capabilities.splits_by_version
        try:
            if self._is_reloading:
                await self._end(self.running.values(), Fate.RELOAD)
            await to_its_end(self.engine.load(version), LOAD_WITHIN_S)
        finally:
            self._is_reloading = False
            self._changes.tell()
        log.info("worker %s: serves version %d", self.name, version.number)

    # One task

    async def _carry_on(self, running: Running, group: asyncio.TaskGroup) -> None:
        try:
            is_wanted = await self._generate(running)
        except EngineDied:
            raise
        except (EngineError, SegmentError) as error:
            is_wanted = False
            await self._fail(running.task, str(error))
        finally:
            del self.running[running.key]
            if self._fences.get(running.task.id) == running.task.fence:
                del self._fences[running.task.id]
            self._changes.tell()
        if is_wanted:
            crash_here("generated")
            self._outbox.post(Unsent(running.trajectory, running.task.fence), group)

    async def _generate(self, running: Running) -> bool:
        """Carries a trajectory on until it ends or is aborted; tells whether it is to be handed in."""
        task, trajectory = running.task, running.trajectory
        num_before = trajectory.num_tokens
        if task.require_version not in (None, self.engine.version):
            raise EngineError(f"task {task.id} requires version {task.require_version}, not {self.engine.version}")
        while trajectory.num_tokens < trajectory.max_new_tokens:
            if not await self._may_begin(running):
                return True  # its prefix, for someone with newer weights
            if running.fate is None:  # otherwise it was aborted before it began
                generation = await self.engine.generate(request_for(running, self._kv, self._kv_lag))
                if append(trajectory, generation):
                    return running.fate is not Fate.LOST
            fate, running.fate = running.fate, None
            has_more = trajectory.num_tokens > num_before
            if fate is Fate.LOST or fate is None:  # None: the engine ends, and this worker with it
                return False
            running.is_untouched = fate is Fate.STOP and not has_more
            if has_more or fate in (Fate.LEAVE, Fate.STOP) or (fate is Fate.HAND_BACK and trajectory.num_tokens):
                return has_more or fate is Fate.HAND_BACK
        trajectory.finish(End.LENGTH)
        return True

    async def _may_begin(self, running: Running) -> bool:
        """Waits while weights are changing, and for a version no older than the one that a prefix ended with; False
        where that does not come."""
        least = running.least_version

        def is_ready() -> bool:
            return running.fate is not None or (not self._is_reloading and (self.engine.version or 0) >= least)

        running.is_waiting = True
        self._changes.tell()
        try:
            while not is_ready():
                try:
                    async with asyncio.timeout(VERSION_WITHIN_S):
                        await self._changes.until(is_ready)
                except TimeoutError:
                    if not self._is_reloading:  # a load ends, and what waits for it has perhaps no prefix at all
                        return is_ready()
            return True
        finally:
            running.is_waiting = False

    async def _fail(self, task: Task, reason: str) -> None:
        log.warning("worker %s: task %d failed: %s", self.name, task.id, reason)
        try:
            await self.client.fail(task.id, task.fence, reason)
        except REFUSALS as error:
            log.warning("worker %s: %s", self.name, error)
