"""A coordinator in memory, as a worker sees it: leases under fences, partials that come back as prefixes, versions.

Scripts reach into it: what is published, lost, wanted back or refused, and when.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from offbeat.client.protocol import Heartbeat, LeaseResponse
from offbeat.errors import RunOver
from offbeat.ledger.errors import Fenced, Refused
from offbeat.ledger.records import Outcome
from offbeat.trajectory import Sampling, Task, Trajectory
from offbeat.weights.version import Version, verify

TTL_S = 30.0


class Desk:
    """Implements `WorkerClient`."""

    def __init__(self) -> None:
        self.why_idle = ""
        self.open: dict[int, Task] = {}
        self.held: dict[int, Task] = {}
        self.done: dict[int, Trajectory] = {}
        self.partials: list[Trajectory] = []
        self.discarded: list[Trajectory] = []
        self.failures: dict[int, str] = {}
        self.wanted: Version | None = None
        self.known: dict[int, Version] = {}
        self.say_lost: set[int] = set()
        self.calls: list[tuple[float, str, object]] = []
        self.fetch_s = self.submit_s = 0.0
        self.refuse: set[int] = set()
        self.is_over = False
        self.round: int | None = None
        """Of what is leased; None: there are no rounds, or none is under way and only evaluation is leased."""
        self.has_rounds = False
        self.given_back: list[int] = []
        self._changed = asyncio.Event()

    def add(self, *tasks: Task) -> None:
        for task in tasks:
            self.open[task.id] = replace(task, fence=task.fence + 1)
        self._changed.set()

    def publish(self, version: Version) -> None:
        self.wanted = self.known[version.number] = version
        self._changed.set()

    def begin_round(self, version: Version) -> None:
        self.has_rounds, self.round = True, version.number
        self.publish(version)

    def end_round(self) -> None:
        self.round = None
        self._changed.set()

    def end(self) -> None:
        self.is_over = True
        self._changed.set()

    def lose(self, task: int) -> None:
        """The lease is over: the task goes to whoever asks next, and its worker hears of it with its next heartbeat."""
        self.add(self.held.pop(task))

    def names(self, what: str) -> list[object]:
        return [about for _, name, about in self.calls if name == what]

    def times_s(self, what: str) -> list[float]:
        return [at_s for at_s, name, _ in self.calls if name == what]

    async def until(self, condition) -> None:
        while not condition():
            self._changed.clear()
            await self._changed.wait()

    async def _wait(self, find, wait_s: float):
        try:
            async with asyncio.timeout(wait_s):
                await self.until(lambda: find() is not None)
        except TimeoutError:
            return None
        return find()

    def _note(self, name: str, about: object = None) -> None:
        self.calls.append((asyncio.get_running_loop().time(), name, about))
        self._changed.set()

    async def lease(self, capacity: int, have_version: int | None, wait_s: float) -> LeaseResponse:
        assert capacity > 0
        self._note("lease", capacity)

        def find() -> LeaseResponse | None:
            suiting = [
                task
                for task in self.open.values()
                if have_version is not None
                and task.require_version in (None, have_version)
                and (task.require_version is not None or not self.has_rounds or self.round == have_version)
            ][:capacity]
            required = [t.require_version for t in self.open.values() if t.require_version is not None]
            wanted = self.known.get(required[0]) if required and not suiting else self.wanted
            if wanted is not None and wanted.number == have_version:
                wanted = None
            if self.is_over:
                return LeaseResponse(is_over=True)
            return LeaseResponse(tuple(suiting), wanted, TTL_S, round=self.round) if suiting or wanted else None

        lease = await self._wait(find, wait_s) or LeaseResponse(idle=self.why_idle)
        for task in lease.tasks:
            self.held[task.id] = self.open.pop(task.id)
        self._changed.set()
        return lease

    async def heartbeat(self, held: Sequence[tuple[int, int]]) -> Heartbeat:
        self._note("heartbeat", tuple(held))
        mine = {task for task, fence in held if task in self.held and self.held[task].fence == fence}
        lost = {task for task, _ in held} - mine
        return Heartbeat(tuple(lost))

    async def submit(self, trajectory: Trajectory, fence: int) -> Outcome:
        self._note("submit", (trajectory.task, fence))
        await asyncio.sleep(self.submit_s)
        number = trajectory.task
        if number not in self.held or self.held[number].fence != fence:
            self.discarded.append(trajectory)
            raise Fenced(f"task {number}: fence {fence} is over")
        if number in self.refuse:
            self.discarded.append(trajectory)
            raise Refused(f"task {number}: refused")
        task = self.held.pop(number)
        stored = Trajectory.decode(trajectory.encode())
        assert stored.tokens[: task.prefix.num_tokens if task.prefix else 0].tolist() == (
            task.prefix.tokens.tolist() if task.prefix else []
        )
        if trajectory.is_partial:
            assert trajectory.num_tokens, "a partial without a token"
            self.partials.append(stored)
            self.add(replace(task, prefix=stored))
            return Outcome.PARTIAL
        assert number not in self.done
        self.done[number] = stored
        self._changed.set()
        return Outcome.STORED

    async def fail(self, task: int, fence: int, reason: str) -> None:
        self._note("fail", task)
        if task not in self.held or self.held[task].fence != fence:
            raise Fenced(f"task {task}: fence {fence} is over")
        del self.held[task]
        self.failures[task] = reason
        self._changed.set()

    async def give_back(self, leases: Sequence[tuple[int, int]]) -> None:
        self._note("give_back", tuple(leases))
        for number, fence in leases:
            if number in self.held and self.held[number].fence == fence:
                self.given_back.append(number)
                self.lose(number)

    async def round_over(self, number: int, wait_s: float) -> bool:
        self._note("round_over", number)
        return await self._wait(lambda: True if self.round != number else None, wait_s) is True

    async def newer(self, have_version: int | None, wait_s: float) -> Version | None:
        def find() -> Version | bool | None:
            is_new = self.wanted is not None and self.wanted.number != have_version
            return self.wanted if is_new else True if self.is_over else None

        found = await self._wait(find, wait_s)
        if found is True:
            raise RunOver("the run is over")
        return found

    async def fetch(self, version: Version) -> Version:
        self._note("fetch", version.number)
        await asyncio.sleep(self.fetch_s)
        await asyncio.to_thread(verify, version)
        return version

    async def leave(self) -> None:
        self._note("leave")
        for task in list(self.held):
            self.lose(task)


def a_task(number: int, max_new_tokens: int = 20, **more) -> Task:
    sampling = Sampling(max_new_tokens=max_new_tokens, **more.pop("sampling", {}))
    return Task(id=number, group=0, prompt=np.arange(1, 6), seed=number, sampling=sampling, **more)
