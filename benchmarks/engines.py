"""Engines behind HTTP: `python -m benchmarks.engines [--quick]`.

Tokens per second, by three ways to the same engine with the same settings (vLLM; random weights in a real shape):
- in process: vLLM's own `LLM.generate`, in a process that holds nothing else;
- adapter: Offbeat's `ServedEngine`, which workers use;
- naive: what one would write first, a thread with a connection per request, answers not streamed.
Each request has a prompt of its own and a seed, and brings log-probs of its tokens. A batch is as many requests as run
at a time, a stream four times that. In-process runs stand before and after those of the server.

Seconds of generation that a change of weights costs, while requests never stop coming (`serving.changes`).

On a machine with a GPU, with vLLM in the environment at hand (`--python PATH` names another; `--server-arg` hands an
argument on to the engine, once for each word):

    python -m benchmarks.engines --server-arg=--attention-backend --server-arg=FLASH_ATTN

All of it, with three starts of the engine, takes about twelve minutes; `--only batch,stream` and `--only changes` run a
part. `--url URL` measures a server that runs already, started on a model of the shape that is named; it is not compared
with in-process runs then. Without a GPU, and with `--quick`, the shape is a tiny one and nothing is decided: it shows
that all parts work. A quick run starts the engine twice, which on a few cores takes longer than a minute.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import signal
import statistics
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks import report
from benchmarks.load import Load
from benchmarks.serving.changes import Counting, Traffic, Window, losses, measure
from benchmarks.serving.clients import adapter, naive
from benchmarks.serving.processes import Settings, find_settings, find_vllm, offline, server
from benchmarks.serving.shapes import SHAPES, Models
from benchmarks.serving.work import Batch, Batches, Done
from offbeat.errors import OffbeatError, UserError
from offbeat.rollout.engines.served.engine import ServedEngine
from offbeat.rollout.engines.served.http import Server
from offbeat.rollout.engines.vllm import FromPath, Transfer

TARGET = 0.85
BAR = "adapter_over_in_process"
"""In tokens/s of a batch."""
IN_PROCESS, ADAPTER, NAIVE = "in process", "adapter", "naive"
BATCH, STREAM, CHANGES = "batch", "stream", "changes"
MEMORY = Path("/dev/shm")
"""Where versions lie if there is room: a disk would be what is measured."""


@dataclass(frozen=True)
class Size:
    """How much is measured."""

    shape: str
    concurrency: int
    num_tokens: int
    repeats: int
    window_s: float
    loads_per_window: int
    num_prompt_tokens: int = 64
    stream_factor: int = 4


FULL = Size("1.5b", concurrency=256, num_tokens=512, repeats=3, window_s=15.0, loads_per_window=5)
SMALL = Size("tiny", concurrency=32, num_tokens=64, repeats=2, window_s=4.0, loads_per_window=2)
QUICK = replace(SMALL, concurrency=8, num_tokens=32, repeats=1, window_s=2.0, loads_per_window=1)


@dataclass
class Findings:
    """What was measured, by kind of work and way."""

    rates: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    windows: list[Window] = field(default_factory=list)
    engine: str = ""
    failure: str = ""
    """What ended it early."""

    def add(self, kind: str, way: str, done: Done) -> None:
        self.rates.setdefault(kind, {}).setdefault(way, []).append(done.tokens_per_s)
        say(f"{kind}, {way}: {done.num_tokens} tokens in {done.seconds:.2f} s: {done.tokens_per_s:.0f} tokens/s")

    def ratios(self, kind: str, way: str) -> list[float]:
        """To the median in process; empty where one of the two was not measured."""
        rates = self.rates.get(kind, {})
        if not rates.get(IN_PROCESS):
            return []
        return [rate / statistics.median(rates[IN_PROCESS]) for rate in rates.get(way, ())]


class Bench:
    """One shape, one engine, everything that is measured with it."""

    def __init__(self, size: Size, models: Models, kinds: Sequence[str]):
        self.size, self.models, self.kinds = size, models, kinds
        self.batches = Batches(size.num_prompt_tokens, models.shape.num_tokens)
        self.findings = Findings()

    def offline(self, settings: Settings, log: Path) -> None:
        if not {BATCH, STREAM} & set(self.kinds):
            return
        with offline(settings, log) as engine:
            say("vLLM in process: ready")
            engine.run(self._warmup())
            for kind in self._rounds():
                self.findings.add(kind, IN_PROCESS, engine.run(self._batch(kind)))

    async def started(self, settings: Settings, folder: Path, log: Path) -> None:
        async with server(settings, folder, log) as url:
            await self.served(url, ipc=settings.uses_ipc)

    async def served(self, url: str, *, ipc: bool = False) -> None:
        say(f"{url}: ready")
        async with self._attached(url) as (engine, dialect):
            self.findings.engine = engine.capabilities.fingerprint
            if {BATCH, STREAM} & set(self.kinds):
                await adapter(engine, self._warmup())
            for kind in self._rounds():
                self.findings.add(kind, ADAPTER, await adapter(engine, self._batch(kind)))
                self.findings.add(kind, NAIVE, await asyncio.to_thread(naive, url, self._batch(kind)))
            if CHANGES in self.kinds:
                await self._changes(engine, dialect, ipc=ipc)

    async def _changes(self, engine: ServedEngine, dialect: Counting, *, ipc: bool) -> None:
        size = self.size
        ways: dict[str, Transfer] = {"path": FromPath()}
        if ipc:
            from offbeat.rollout.engines.vllm_ipc import FromGpu

            ways["ipc"] = FromGpu(torch.device("cuda", 0))
        traffic = Traffic(engine, dialect, self.batches, size.concurrency, size.num_tokens)
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
    async def _attached(self, url: str) -> AsyncIterator[tuple[ServedEngine, Counting]]:
        dialect = Counting(Server(url))
        engine = await ServedEngine.attach(dialect, worker="benchmark", num_slots=self.size.concurrency)
        try:
            await engine.load(self.models.next())
            yield engine, dialect
        finally:
            await engine.close()

    def _rounds(self) -> list[str]:
        """The kinds of work of one session, in order: batches, then one stream."""
        return [kind for kind in [*[BATCH] * self.size.repeats, STREAM] if kind in self.kinds]

    def _batch(self, kind: str) -> Batch:
        num_at_once = self.size.concurrency
        num_requests = num_at_once * (self.size.stream_factor if kind == STREAM else 1)
        return self.batches.make(num_requests, self.size.num_tokens, num_at_once)

    def _warmup(self) -> Batch:
        return self.batches.make(self.size.concurrency, max(self.size.num_tokens // 4, 1), self.size.concurrency)


def measured(options: argparse.Namespace, size: Size, folder: Path, log: Path) -> Findings:
    """What breaks late leaves the rest standing: a GPU's time is dear."""
    say(f"writing two versions in the shape {size.shape} below {folder}")
    bench = Bench(size, Models(SHAPES[size.shape], folder), options.only)
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
            num_slots=size.concurrency,
            num_prompt_tokens=size.num_prompt_tokens,
            num_tokens=size.num_tokens,
        )
    )
    bench.offline(told, log)
    asyncio.run(bench.started(told, folder, log))
    if not options.quick:
        bench.offline(told, log)


# The report


def bars_of(findings: Findings, *, decides: bool) -> dict[str, report.Bar | report.Unmeasured]:
    ratios = findings.ratios(BATCH, ADAPTER)
    if not ratios:
        return {BAR: report.Unmeasured(TARGET)}
    bar = report.at_least(TARGET, ratios, quick=False)
    return {BAR: bar if decides else replace(bar, holds=None)}


def rows_of(findings: Findings) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for kind, rates in findings.rates.items():
        for way, found in rates.items():
            ratios = findings.ratios(kind, way)
            share = f"{statistics.median(ratios):.2f}" if ratios else ""
            rows.append((f"tokens/s, {kind}, {way}", *spread(found, "{:.0f}"), share))
    for way, lost in losses(findings.windows).items():
        rows.append((f"seconds lost a change, {way}", *spread([loss.lost_s for loss in lost], "{:.2f}"), ""))
        rows.append((f"seconds still a change, {way}", *spread([loss.still_s for loss in lost], "{:.2f}"), ""))
        rows.append((f"seconds of a load, {way}", *spread([loss.load_s for loss in lost], "{:.2f}"), ""))
    return rows


def spread(values: Sequence[float], form: str) -> tuple[str, str]:
    low, high = form.format(min(values)), form.format(max(values))
    return form.format(statistics.median(values)), f"{low} to {high}"


def raw_of(findings: Findings) -> dict[str, Any]:
    kinds = [kind for kind in (BATCH, STREAM) if kind in findings.rates]
    return {
        "engine": findings.engine,
        "failure": findings.failure,
        "tokens_per_s": {kind: rounded(findings.rates[kind]) for kind in kinds},
        "naive_over_in_process": {kind: rounded(findings.ratios(kind, NAIVE)) for kind in kinds},
        "adapter_over_in_process": {kind: rounded(findings.ratios(kind, ADAPTER)) for kind in kinds},
        "changes": {way: [rounded(asdict(loss)) for loss in found] for way, found in losses(findings.windows).items()},
        "windows": [rounded(asdict(window)) for window in findings.windows],
    }


def rounded(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: rounded(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [rounded(inner) for inner in value]
    return round(value, 3) if isinstance(value, float) else value


def say(text: str) -> None:
    print(f"engines: {text}", file=sys.stderr, flush=True)


def options_of(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.engines", description="Engines behind HTTP.")
    parser.add_argument("--quick", action="store_true", help="a tiny shape, few tokens, two starts; decides nothing")
    parser.add_argument("--python", default=sys.executable, metavar="PATH", help="of an environment with the engine")
    parser.add_argument("--url", help="a server that runs already, instead of one that is started")
    parser.add_argument("--shape", choices=SHAPES)
    parser.add_argument("--concurrency", type=int, help="requests at a time")
    parser.add_argument("--tokens", type=int, dest="num_tokens", help="of each answer")
    parser.add_argument("--repeats", type=int)
    parser.add_argument("--server-arg", action="append", default=[], metavar="WORD", help="for the engine; repeatable")
    parser.add_argument("--only", type=kinds, default=[BATCH, STREAM, CHANGES], metavar="KINDS", help="comma-separated")
    parser.add_argument("--log", type=Path, help="a file for what the engine says; kept then")
    return parser.parse_args(arguments)


def kinds(text: str) -> list[str]:
    chosen, allowed = text.split(","), (BATCH, STREAM, CHANGES)
    if unknown := set(chosen) - set(allowed):
        raise argparse.ArgumentTypeError(f"{', '.join(sorted(unknown))}: allowed are {', '.join(allowed)}")
    return chosen


def size_of(options: argparse.Namespace) -> Size:
    size = QUICK if options.quick else FULL if torch.cuda.is_available() else SMALL
    given = {name: getattr(options, name) for name in ("shape", "concurrency", "num_tokens", "repeats")}
    return replace(size, **{name: value for name, value in given.items() if value is not None})


def room_for(shape: str) -> Path | None:
    """A folder in memory, where two versions fit twice; else wherever temporary files go."""
    needed = 8 * SHAPES[shape].num_parameters
    return MEMORY if MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > needed else None


def main() -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # an orderly end: no engine goes on alone
    options, load = options_of(), Load()
    size, findings = size_of(options), Findings()
    decides = not options.quick and torch.cuda.is_available() and replace(size, repeats=FULL.repeats) == FULL
    try:
        if not options.url:
            find_vllm(options.python)
        with tempfile.TemporaryDirectory(dir=room_for(size.shape), prefix="engines-") as folder:
            findings = measured(options, size, Path(folder), options.log or Path(folder) / "engine.log")
    except UserError as error:
        say(str(error))
        if not options.quick:
            return 2
    except OffbeatError as error:
        say(str(error))
        return 1
    report.show(
        "engines",
        ("", "median", "spread", "x in process"),
        rows_of(findings),
        bars_of(findings, decides=decides),
        quick=options.quick,
        size=asdict(size),
        server_arguments=options.server_arg,
        **load.shares(),
        **raw_of(findings),
    )
    if findings.failure:
        say(findings.failure)
    return 1 if findings.failure else 0


if __name__ == "__main__":
    sys.exit(main())
