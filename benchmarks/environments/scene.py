"""A worker with real environments, an engine that takes a modelled time for each token, and a list of tasks."""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from offbeat.client.protocol import Heartbeat, LeaseResponse
from offbeat.engines.protocol import Capabilities, EngineMetrics, Finish, Generation, Request
from offbeat.environments.formats import PlainFormat
from offbeat.environments.pool import EnvironmentPool
from offbeat.environments.wire import PartSpec
from offbeat.ledger.records import Outcome
from offbeat.model.loading import TINY, load_tokenizer
from offbeat.trajectory import EpisodeStart, Sampling, Segment, Task, Trajectory
from offbeat.weights.version import Version
from offbeat.worker.episodes import EpisodeLimits, Episodes

SOURCE = "waiting"
CODE = Path(__file__).with_name("waiting.py")
EOS = 257
MEDIAN_TOKENS, SIGMA = 200.0, 1.0
"""Tokens of a turn, log-normal, as in published sessions of coding agents."""


def open_pool(folder: Path, spec: PartSpec, **settings: Any) -> EnvironmentPool:
    settings = {"processes": 2, "step_timeout_s": 60.0, "parallel_calls": 4, "memory_mb": 512, **settings}
    return EnvironmentPool({SOURCE: spec}, log_path=folder / "environments.log", **settings)


def make_episodes(pool: EnvironmentPool, at_once: int) -> Episodes:
    form = PlainFormat(load_tokenizer(TINY), (EOS,), pool.info[SOURCE], SOURCE, 64)
    return Episodes(pool, {SOURCE: form}, EpisodeLimits(1000, 10_000, 600.0, 1), at_once)


def make_tasks(count: int, stop_token_ids: Sequence[int]) -> list[Task]:
    sampling = Sampling(max_new_tokens=10**6, stop_token_ids=tuple(stop_token_ids))
    prompt = np.array([65], np.int32)
    start: dict[str, Any] = {"prompt": "A", "answer": None, "info": {}}
    return [
        Task(number, 0, prompt, number, sampling, episode=EpisodeStart(SOURCE, start, number), fence=1)
        for number in range(count)
    ]


class TimedEngine:
    """An engine of which each slot makes a token in `token_s`, whatever the others do. `text` is what it says in each
    turn; without it, a turn has a random length that depends on seed and position alone."""

    def __init__(self, num_slots: int, token_s: float, text: str = ""):
        self.capabilities = Capabilities("timed", num_slots, 10**7, splits_by_version=True)
        self.version: int | None = None
        self.seconds_still, self.metrics = 0.0, EngineMetrics()
        self.token_s, self.text, self.num_tokens = token_s, text, 0
        self._running: dict[str, asyncio.Event] = {}

    async def generate(self, request: Request) -> Generation:
        aborted = self._running[request.id] = asyncio.Event()
        if self.text:
            tokens = np.frombuffer(self.text.encode(), np.uint8).astype(np.int32)
        else:
            length = random.Random(f"{request.seed}:{request.position}").lognormvariate(math.log(MEDIAN_TOKENS), SIGMA)
            tokens = np.full(max(2, min(int(length), 4000)), 66, np.int32)
            tokens[-1] = EOS
        try:
            async with asyncio.timeout(len(tokens) * self.token_s):
                await aborted.wait()
            finish, tokens = Finish.ABORT, tokens[:0]
        except TimeoutError:
            finish = Finish.STOP
        del self._running[request.id]
        self.num_tokens += len(tokens)
        segment = Segment(
            request.position, tokens, logprobs=np.full(len(tokens), -1.0), version=self.version, kv_version=self.version
        )
        return Generation(request.id, (segment,) if len(tokens) else (), finish)

    async def abort(self, ids: Sequence[str] | None = None) -> None:
        for name in list(self._running) if ids is None else ids:
            if name in self._running:
                self._running[name].set()

    async def load(self, version: Version) -> None:
        self.version = version.number

    async def close(self) -> None:
        pass


class TaskList:
    """Implements `WorkerClient`: hands out a list of tasks, and keeps what comes back with its time."""

    def __init__(self, tasks: Sequence[Task]):
        self.open, self.whole, self.failed = list(tasks), list[Trajectory](), dict[int, str]()
        self.partials_s = list[float]()
        self.round_ends, self.changed = asyncio.Event(), asyncio.Event()

    async def until(self, condition: Any) -> None:
        while not condition():
            self.changed.clear()
            await self.changed.wait()

    async def lease(self, capacity: int, have_version: int | None, wait_s: float) -> LeaseResponse:
        if have_version is None:
            return LeaseResponse(version=Version(1, 1, None, "", Path("nowhere")), ttl_s=60.0, round=1)
        if not self.open:
            await asyncio.sleep(wait_s)
        taken, self.open = self.open[:capacity], self.open[capacity:]
        return LeaseResponse(tuple(taken), ttl_s=60.0, round=1)

    async def heartbeat(self, held: Sequence[tuple[int, int]]) -> Heartbeat:
        return Heartbeat()

    async def submit(self, trajectory: Trajectory, fence: int) -> Outcome:
        if trajectory.is_partial:
            self.partials_s.append(time.monotonic())
        else:
            self.whole.append(trajectory)
        self.changed.set()
        return Outcome.PARTIAL if trajectory.is_partial else Outcome.STORED

    async def fail(self, task: int, fence: int, reason: str) -> None:
        self.failed[task] = reason
        self.changed.set()

    async def give_back(self, leases: Sequence[tuple[int, int]]) -> None:
        pass

    async def round_over(self, number: int, wait_s: float) -> bool:
        await self.round_ends.wait()
        return True

    async def newer(self, have_version: int | None, wait_s: float) -> Version | None:
        await asyncio.sleep(wait_s)
        return None

    async def fetch(self, version: Version) -> Version:
        return version

    async def leave(self) -> None:
        pass
