"""The cost of a change of weights: seconds of generation lost while requests never stop coming.

Windows of undisturbed generation take turns with windows of the same length in which versions are loaded at even
intervals. The loss of a load is the number of missing tokens, divided by the rate of the undisturbed windows before and
after. So it includes all costs of a load, also before and after the server stands still, such as requests that are sent
again and prefixes that are computed again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from uuid import uuid4

import numpy as np

from benchmarks.engines.work import MAX_SEED, Batches
from offbeat.engines.dialect import Call, Chunk
from offbeat.engines.protocol import Finish, Request
from offbeat.engines.server_engine import ServerEngine
from offbeat.engines.vllm.api import VllmDialect
from offbeat.engines.vllm.direct import DirectDialect
from offbeat.engines.vllm.weights import Transfer
from offbeat.errors import OffbeatError
from offbeat.trajectory import Sampling
from offbeat.weights.version import Version


class Counting:
    """Counts a dialect's tokens as they arrive; a request's answer comes only when it is complete."""

    num_tokens = 0

    async def generate(self, call: Call) -> AsyncIterator[Chunk]:
        async with aclosing(super().generate(call)) as chunks:  # type: ignore[misc]
            async for chunk in chunks:
                self.num_tokens += len(chunk.tokens)
                yield chunk


class CountingServer(Counting, VllmDialect):
    """Of a server behind HTTP."""


class CountingWorker(Counting, DirectDialect):
    """Of a worker's own vLLM."""


Counted = CountingServer | CountingWorker


@dataclass(frozen=True)
class Window:
    """A period of generation, and the loads in it."""

    way: str
    """Way in which versions were loaded; empty if none was."""
    seconds: float
    num_tokens: int
    num_loads: int = 0
    seconds_loading: float = 0.0
    seconds_still: float = 0.0

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds


@dataclass(frozen=True)
class Loss:
    """Costs of each load in a window, on average."""

    lost_s: float
    still_s: float
    load_s: float


class Traffic:
    """Keeps a number of requests in flight. Their lengths differ, so that they do not all end and begin at once."""

    def __init__(self, engine: ServerEngine, dialect: Counted, batches: Batches, num_at_once: int, num_tokens: int):
        self.engine, self.dialect, self.batches = engine, dialect, batches
        self.num_tokens = num_tokens
        self.random = np.random.default_rng(1)
        self.tasks = [asyncio.ensure_future(self._ask()) for _ in range(num_at_once)]

    async def _ask(self) -> None:
        while True:
            length = int(self.random.integers(max(self.num_tokens // 2, 1), self.num_tokens + 1))
            tokens = np.array(self.batches.prompt(), np.int32)
            seed = int(self.random.integers(0, MAX_SEED))
            generation = await self.engine.generate(Request(uuid4().hex, tokens, seed, Sampling(max_new_tokens=length)))
            if generation.finish is not Finish.LENGTH:
                raise OffbeatError(f"steady generation: a request ended by {generation.finish.value}")

    async def quiet(self, seconds: float) -> Window:
        start_s, before = time.perf_counter(), self.dialect.num_tokens
        await self._sleep(seconds)
        return Window("", time.perf_counter() - start_s, self.dialect.num_tokens - before)

    async def changed(
        self, way: str, transfer: Transfer, version: Callable[[], Version], seconds: float, num_loads: int
    ) -> Window:
        """Divides a window into equal parts and loads a version in the middle of each; the window is longer if loads
        take longer."""
        self.dialect.transfer = transfer
        start_s, before, still_s = time.perf_counter(), self.dialect.num_tokens, self.engine.seconds_still
        loading_s = 0.0
        for number in range(num_loads):
            await self._sleep(start_s + (number + 0.5) * seconds / num_loads - time.perf_counter())
            load_start_s = time.perf_counter()
            await self.engine.load(version())
            loading_s += time.perf_counter() - load_start_s
        await self._sleep(max(start_s + seconds - time.perf_counter(), seconds / num_loads / 2))
        return Window(
            way,
            time.perf_counter() - start_s,
            self.dialect.num_tokens - before,
            num_loads,
            loading_s,
            self.engine.seconds_still - still_s,
        )

    async def _sleep(self, seconds: float) -> None:
        """Sleeps for a part of a window; raises if a request fails meanwhile."""
        done, _ = await asyncio.wait(self.tasks, timeout=max(seconds, 0.0), return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()

    async def stop(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)


async def measure(
    traffic: Traffic,
    ways: Mapping[str, Transfer],
    version: Callable[[], Version],
    *,
    window_s: float,
    loads_per_window: int,
    repeats: int,
    windows: list[Window],
) -> None:
    """Measures windows and appends them in order. Every second window has loads, by each way in turn."""
    try:
        await traffic.quiet(window_s)  # until requests are spread over their lengths
        windows.append(await traffic.quiet(window_s))
        for _ in range(repeats):
            for way, transfer in ways.items():
                windows.append(await traffic.changed(way, transfer, version, window_s, loads_per_window))
                windows.append(await traffic.quiet(window_s))
    finally:
        await traffic.stop()


def losses(windows: Sequence[Window]) -> dict[str, list[Loss]]:
    """Returns the losses by way, in the order of the windows."""
    found: dict[str, list[Loss]] = {}
    for before, window, after in zip(windows[:-2:2], windows[1:-1:2], windows[2::2], strict=True):
        rate = (before.num_tokens + after.num_tokens) / (before.seconds + after.seconds)
        loss = Loss(
            lost_s=(window.seconds - window.num_tokens / rate) / window.num_loads,
            still_s=window.seconds_still / window.num_loads,
            load_s=window.seconds_loading / window.num_loads,
        )
        found.setdefault(window.way, []).append(loss)
    return found
