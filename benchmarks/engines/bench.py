"""Measures vLLM in process, as a worker has it, and over HTTP, and the embedded engine."""

from __future__ import annotations

import argparse
import asyncio
import statistics
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from benchmarks.common.shapes import SHAPES
from benchmarks.engines.changes import Counted, CountingServer, CountingWorker, Traffic, losses, measure
from benchmarks.engines.clients import naive, through_engine
from benchmarks.engines.findings import (
    BATCH,
    CHANGES,
    EMBEDDED,
    IN_PROCESS,
    NAIVE,
    SERVER,
    STREAM,
    WORKER,
    Findings,
    Kind,
    say,
)
from benchmarks.engines.models import Models
from benchmarks.engines.processes import Settings, find_settings, offline, server, worker_process
from benchmarks.engines.work import Batch, Batches
from offbeat.engines.http_calls import Server
from offbeat.engines.server_engine import ServerEngine
from offbeat.engines.vllm.direct import Channel
from offbeat.engines.vllm.weights import FromPath, Transfer
from offbeat.launch.model_parts import make_embedded


@dataclass(frozen=True)
class Size:
    """Amount of measurements."""

    shape: str
    concurrency: tuple[int, ...]
    """Numbers of requests at a time, each of which is measured."""
    num_tokens: int
    repeats: int
    window_s: float
    loads_per_window: int
    num_prompt_tokens: int = 64
    stream_factor: int = 4


FULL = Size("1.5b", concurrency=(256,), num_tokens=512, repeats=3, window_s=15.0, loads_per_window=5)
SMALL = Size("tiny", concurrency=(32,), num_tokens=64, repeats=2, window_s=4.0, loads_per_window=2)
QUICK = replace(SMALL, concurrency=(8,), num_tokens=32, repeats=1, window_s=2.0, loads_per_window=1)


class Bench:
    """All measurements of one engine with one model shape."""

    def __init__(self, size: Size, models: Models, kinds: Sequence[str], ways: Sequence[str]):
        self.size, self.models, self.kinds, self.ways = size, models, kinds, ways
        self.batches = Batches(size.num_prompt_tokens, models.shape.num_tokens)
        self.findings = Findings()

    def offline(self, settings: Settings, log: Path) -> None:
        if IN_PROCESS not in self.ways or not {BATCH, STREAM} & set(self.kinds):
            return
        with offline(settings, log) as engine:
            say("vLLM in process: ready")
            engine.run(self._warmup())
            for kind in self._rounds():
                self.findings.add(kind, IN_PROCESS, engine.run(self._batch(kind)))

    async def embedded(self, settings: Settings) -> None:
        if EMBEDDED not in self.ways or not {BATCH, STREAM} & set(self.kinds):
            return
        engine = make_embedded(settings.config, "benchmark")
        try:
            await engine.load(self.models.next())
            say("embedded engine: ready")
            await through_engine(engine, EMBEDDED, self._warmup())
            for kind in self._rounds():
                self.findings.add(kind, EMBEDDED, await through_engine(engine, EMBEDDED, self._batch(kind)))
        finally:
            await engine.close()

    async def started(self, settings: Settings, folder: Path, log: Path) -> None:
        if WORKER in self.ways:
            async with worker_process(settings, folder, log) as url:
                await self.engine(CountingWorker(Channel(url)), WORKER, url, ipc=settings.uses_ipc)
        if {SERVER, NAIVE} & set(self.ways):
            async with server(settings, folder, log) as url:
                await self.served(url, ipc=settings.uses_ipc)

    async def served(self, url: str, *, ipc: bool = False) -> None:
        await self.engine(CountingServer(Server(url)), SERVER, url, ipc=ipc)
        for kind in self._rounds() if NAIVE in self.ways else ():
            self.findings.add(kind, NAIVE, await asyncio.to_thread(naive, url, self._batch(kind)))

    async def engine(self, dialect: Counted, way: str, url: str, *, ipc: bool) -> None:
        """Measures an engine at `url`; changes of weights only for the first engine."""
        if way not in self.ways:
            return
        async with self._attached(dialect) as engine:
            say(f"{way}, {url}: ready")
            self.findings.engine = engine.capabilities.fingerprint
            if {BATCH, STREAM} & set(self.kinds):
                await through_engine(engine, way, self._warmup())
            for kind in self._rounds():
                self.findings.add(kind, way, await through_engine(engine, way, self._batch(kind)))
            if CHANGES in self.kinds and not self.findings.windows:
                await self._changes(engine, dialect, ipc=ipc)

    async def _changes(self, engine: ServerEngine, dialect: Counted, *, ipc: bool) -> None:
        size = self.size
        ways: dict[str, Transfer] = {"path": FromPath()}
        if ipc:
            from offbeat.engines.vllm.weights import FromGpu

            ways["ipc"] = FromGpu(torch.device("cuda", 0))
        traffic = Traffic(engine, dialect, self.batches, max(size.concurrency), size.num_tokens)
        await measure(
            traffic,
            ways,
            self.models.next,
            window_s=size.window_s,
            loads_per_window=size.loads_per_window,
            repeats=size.repeats,
            windows=self.findings.windows,
        )
        for way, found in losses(self.findings.windows).items():
            say(f"{way}: {statistics.median(loss.lost_s for loss in found):.2f} s of generation lost a change")

    @asynccontextmanager
    async def _attached(self, dialect: Counted) -> AsyncIterator[ServerEngine]:
        engine = await ServerEngine.attach(dialect, worker="benchmark", num_slots=max(self.size.concurrency))
        try:
            await engine.load(self.models.next())
            yield engine
        finally:
            await engine.close()

    def _rounds(self) -> list[Kind]:
        """The kinds of work of one session, in order: for each number of requests at a time batches, then a stream."""
        names = [name for name in [*[BATCH] * self.size.repeats, STREAM] if name in self.kinds]
        return [Kind(name, num_at_once) for num_at_once in self.size.concurrency for name in names]

    def _batch(self, kind: Kind) -> Batch:
        num_requests = kind.num_at_once * (self.size.stream_factor if kind.name == STREAM else 1)
        return self.batches.make(num_requests, self.size.num_tokens, kind.num_at_once)

    def _warmup(self) -> Batch:
        most = max(self.size.concurrency)
        return self.batches.make(most, max(self.size.num_tokens // 4, 1), most)


def measured(options: argparse.Namespace, size: Size, folder: Path, log: Path) -> Findings:
    """Measures every way; a failure ends the measurements and keeps earlier figures."""
    say(f"writing two versions in the shape {size.shape} below {folder}")
    bench = Bench(size, Models(SHAPES[size.shape], folder), options.only, options.ways)
    try:
        measure_all(bench, options, folder, log)
    except Exception as error:  # whatever it is, what was measured before it is good
        if not bench.findings.rates and not bench.findings.windows:
            raise
        bench.findings.failure = f"{type(error).__name__}: {error}"
    return bench.findings


def measure_all(bench: Bench, options: argparse.Namespace, folder: Path, log: Path) -> None:
    if options.url:
        asyncio.run(bench.served(options.url))
        return
    size = bench.size
    told = asyncio.run(
        find_settings(
            bench.models.folder,
            options.python,
            options.server_arg,
            num_slots=max(size.concurrency),
            num_prompt_tokens=size.num_prompt_tokens,
            num_tokens=size.num_tokens,
        )
    )
    bench.offline(told, log)
    asyncio.run(bench.started(told, folder, log))
    asyncio.run(bench.embedded(told))
    if not (options.quick or options.once):
        bench.offline(told, log)
