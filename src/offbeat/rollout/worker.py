"""A worker's loop: lease tasks, let the engine carry them on, hand in what came of them.

The worker takes as many tasks as its engine has free slots. When tasks require a version that it does not have, it
finishes what it runs, takes the version and asks again: no trajectory crosses a version. A task whose generation fails
is given back with the reason; anything else that goes wrong ends the worker with that error.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging

import msgspec
import numpy as np

from offbeat.rollout.engine import Engine, EngineDied, EngineError, Finish, Request, Version
from offbeat.serve.client import WorkerClient
from offbeat.trajectory import End, SegmentError, Task, Trajectory
from offbeat.weights.store import verify

log = logging.getLogger(__name__)

LEASE_WAIT_S = 5.0
"""How long one call for work may wait; short, so that a lost coordinator is noticed soon."""


class Worker:
    """One engine at work for one coordinator."""

    def __init__(self, name: str, engine: Engine, client: WorkerClient):
        self.name, self.engine, self.client = name, engine, client
        self.running: set[asyncio.Task[None]] = set()
        self._freed = asyncio.Event()

    async def run(self) -> None:
        """Works until cancelled; then what runs is aborted, and its tasks go to whoever comes next."""
        slots = self.engine.capabilities.num_slots
        try:
            async with asyncio.TaskGroup() as tasks:
                while True:
                    free = slots - len(self.running)
                    if not free:
                        self._freed.clear()
                        await self._freed.wait()
                        continue
                    lease = await self.client.lease(self.name, free, self.engine.version, LEASE_WAIT_S)
                    if lease.version is not None:
                        await self._take(lease.version)
                    for task in lease.tasks:
                        running = tasks.create_task(self._carry_on(task))
                        self.running.add(running)
                        running.add_done_callback(self._ended)
        finally:
            with contextlib.suppress(EngineDied):  # then nothing runs any more
                await self.engine.abort()

    async def _take(self, version: Version) -> None:
        if self.running:
            await asyncio.wait(self.running)
        await asyncio.to_thread(verify, version)
        await self.engine.load(version)

    def _ended(self, running: asyncio.Task[None]) -> None:
        self.running.discard(running)
        self._freed.set()

    async def _carry_on(self, task: Task) -> None:
        trajectory = task.new_trajectory()
        try:
            generation = await self.engine.generate(request_for(task, trajectory))
            if generation.finish is Finish.ABORT:
                return
            *first, last = generation.segments
            for segment in first:
                trajectory.append(segment)
            trajectory.append(last, End(generation.finish.value))
        except EngineDied:
            raise
        except (EngineError, SegmentError) as error:
            log.warning("worker %s: task %d failed: %s", self.name, task.id, error)
            await self.client.fail(self.name, task.id, str(error))
            return
        await self.client.submit(self.name, [trajectory])


def request_for(task: Task, trajectory: Trajectory) -> Request:
    """What the engine is asked: the prompt with the tokens so far, and the budget that is left."""
    done = trajectory.num_tokens
    if not done:
        return Request(id=str(task.id), tokens=task.prompt, seed=task.seed, sampling=task.sampling)
    return Request(
        id=f"{task.id}-{done}",
        tokens=np.concatenate([task.prompt, trajectory.tokens]),
        seed=task.seed,
        sampling=msgspec.structs.replace(task.sampling, max_new_tokens=task.sampling.max_new_tokens - done),
        position=done,
    )
