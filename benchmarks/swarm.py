"""Two hundred workers at one coordinator, over HTTP on loopback: what the ledger costs the server, and for how long.

The coordinator is a process of its own, bound to one core; the workers, real ones with paced engines, are tasks of this
process, on another core. Measured are

- submissions per second while workers offer more than the server can take, over those of the same server (application,
  access checks, parsing) with a stand-in behind it that acknowledges at once and remembers nothing. The two servers run
  side by side and are loaded in turn. Both rates are also told per second of the server's CPU time: where the workers'
  core is busier than the server's, the ratio of rates flatters, and the bar is the lower of the two ratios;
- how long an acknowledgement takes, at that load and at a load that leaves air;
- whether the coordinator's memory stays flat over five minutes at that lighter load.

A quick run has one short round, in which connections are still being opened, and decides nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import report
from benchmarks.crowd.workers import NUM_SLOTS, Crowd, Phase
from benchmarks.load import TICKS_PER_S, Load
from offbeat.errors import OffbeatError

RATE_TARGET, GROWTH_TARGET = 0.5, 0.05
NUM_WORKERS = 200
ANSWER_S = 0.5
"""With 1,600 slots, 2,700 answers a second: more than any server here can take."""
LIGHT_ANSWER_S = 8.0
"""A hundred and seventy answers a second: a fraction of what it can take."""
SERVER_CORE, WORKERS_CORE = 0, 1
MEMORY_EVERY_S = 1.0
WARMUP_ANSWERS = 2 * NUM_SLOTS
"""From each worker, on average, before anything is measured: by then all connections are open."""

MemoryLog = list[tuple[float, float]]
"""Seconds, and the megabytes that the server had resident then."""


@dataclass(frozen=True)
class Lengths:
    """How long each part of the benchmark takes, in seconds."""

    rounds: int
    warmup_s: float
    """At most."""
    loaded_s: float
    memory_s: float


FULL = Lengths(rounds=5, warmup_s=60.0, loaded_s=20.0, memory_s=300.0)
QUICK = Lengths(rounds=1, warmup_s=8.0, loaded_s=6.0, memory_s=6.0)


class Server:
    """A coordinator's process, seen from outside."""

    def __init__(self, process: subprocess.Popen[str]):
        self.process = process
        told = self._read()
        self.url, self.secrets = told["url"], told["secrets"]

    def _read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise OffbeatError(f"the coordinator's process ended with status {self.process.wait()}")
        return json.loads(line)

    def stop(self) -> dict[str, Any]:
        """Ends it; returns what its ledger holds."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        told = self._read()
        self.process.wait(timeout=60)
        return told

    def cpu_s(self) -> float:
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS_PER_S

    def memory_bytes(self) -> int:
        status = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        return 1024 * next(int(line.split()[1]) for line in status if line.startswith("VmRSS"))


@contextmanager
def started(folder: Path, *, stand_in: bool) -> Iterator[Server]:
    command = [sys.executable, "-m", "benchmarks.crowd.server", str(folder), "--workers", str(NUM_WORKERS)]
    command += ["--core", str(SERVER_CORE)] if (os.cpu_count() or 1) > 1 else []
    command += ["--stand-in"] if stand_in else []
    process = subprocess.Popen(command, cwd=report.REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield Server(process)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


@dataclass(frozen=True)
class Loaded:
    """A server under load."""

    rate: float
    per_cpu_s: float
    """Submissions per second of the server's CPU time."""
    p50_ms: float
    p99_ms: float
    server_share: float
    """How busy the server's core was with it."""
    workers_share: float


def put_under_load(server: Server, answer_s: float, lengths: Lengths, seconds: float) -> tuple[Loaded, MemoryLog]:
    """Lets a crowd work at a server; its memory is looked at meanwhile."""
    gc.collect()
    memory: MemoryLog = []

    async def sample() -> None:
        start_s = time.monotonic()
        while True:
            memory.append((round(time.monotonic() - start_s, 1), round(server.memory_bytes() / 1e6, 1)))
            await asyncio.sleep(MEMORY_EVERY_S)

    async def phase() -> tuple[Phase, float, float]:
        async with Crowd(server.url, server.secrets, answer_s) as crowd:
            await crowd.warm_up(WARMUP_ANSWERS * len(server.secrets), lengths.warmup_s)
            sampling = asyncio.create_task(sample())
            server_s, ours_s = server.cpu_s(), _cpu_s()
            done = await crowd.work(seconds)
            server_s, ours_s = server.cpu_s() - server_s, _cpu_s() - ours_s
            sampling.cancel()
            return done, server_s, ours_s

    done, server_s, ours_s = asyncio.run(phase())
    loaded = Loaded(
        rate=done.rate,
        per_cpu_s=done.num_submissions / max(server_s, 1e-9),
        p50_ms=done.percentile_ms(50),
        p99_ms=done.percentile_ms(99),
        server_share=server_s / done.seconds,
        workers_share=ours_s / done.seconds,
    )
    return loaded, memory


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def growth(memory: MemoryLog) -> float:
    """By which share of itself memory would grow in five minutes, by the line that fits it best."""
    seconds, megabytes = zip(*memory, strict=True)
    return float(300.0 * np.polyfit(seconds, megabytes, 1)[0] / statistics.fmean(megabytes))


def measure(folder: Path, lengths: Lengths) -> tuple[dict[str, list[Loaded]], MemoryLog, dict[str, Any]]:
    """Both servers overloaded in turn, then the ledger's lightly loaded, and what it holds in the end."""
    loads: dict[str, list[Loaded]] = {"ledger": [], "stand-in": []}
    with ExitStack() as stack:
        servers = {name: stack.enter_context(started(folder / name, stand_in=name == "stand-in")) for name in loads}
        if len(os.sched_getaffinity(0)) > 1:
            os.sched_setaffinity(0, {WORKERS_CORE})
        for number in range(lengths.rounds):
            for name, server in servers.items():
                loads[name].append(put_under_load(server, ANSWER_S, lengths, lengths.loaded_s)[0])
                say(f"round {number + 1}, {name}: {told(loads[name][-1])}")
        light, memory = put_under_load(servers["ledger"], LIGHT_ANSWER_S, lengths, lengths.memory_s)
        loads["light"] = [light]
        say(f"light load: {told(light)}")
        held = servers["ledger"].stop()
        servers["stand-in"].stop()
    if held["violations"]:
        raise OffbeatError(f"the ledger's accounts do not hold: {held['violations'][:3]}")
    return loads, memory, held


def say(text: str) -> None:
    print(f"swarm: {text}", file=sys.stderr, flush=True)


def told(loaded: Loaded) -> str:
    return (
        f"{loaded.rate:,.0f} submissions/s, p50 {loaded.p50_ms:.0f} ms, p99 {loaded.p99_ms:.0f} ms, server "
        f"{loaded.server_share:.0%} of its core, workers {loaded.workers_share:.0%} of theirs"
    )


def bars_of(loads: dict[str, list[Loaded]], memory: MemoryLog, quick: bool) -> dict[str, report.Bar]:
    pairs = list(zip(loads["ledger"], loads["stand-in"], strict=True))
    ratios = [min(ours.rate / other.rate, ours.per_cpu_s / other.per_cpu_s) for ours, other in pairs]
    bars = {
        "submissions/s over a server without a ledger": report.at_least(RATE_TARGET, ratios, quick=quick),
        "memory growth in five minutes": report.at_most(GROWTH_TARGET, [growth(memory)], quick=quick),
    }
    return {name: replace(bar, holds=None) if quick else bar for name, bar in bars.items()}


def rows_of(loads: dict[str, list[Loaded]]) -> list[tuple[str, ...]]:
    def row(name: str, values: Sequence[Loaded]) -> tuple[str, ...]:
        def median(figure: str) -> float:
            return statistics.median(getattr(value, figure) for value in values)

        return (
            name,
            f"{median('rate'):,.0f}",
            f"{median('per_cpu_s'):,.0f}",
            f"{median('p50_ms'):,.0f}",
            f"{median('p99_ms'):,.0f}",
            f"{median('server_share'):.0%}",
            f"{median('workers_share'):.0%}",
        )

    names = {"ledger": "ledger, overloaded", "stand-in": "stand-in, overloaded", "light": "ledger, light load"}
    return [row(names[name], values) for name, values in loads.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description="Two hundred workers at one coordinator.")
    parser.add_argument("--quick", action="store_true", help="one short round: ends within a minute")
    options = parser.parse_args()
    lengths, load = QUICK if options.quick else FULL, Load()
    cache = report.REPOSITORY / ".cache"
    cache.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache, prefix="swarm-") as folder:
        loads, memory, held = measure(Path(folder), lengths)
    report.show(
        "swarm",
        ("server", "submissions/s", "per CPU s", "p50 ms", "p99 ms", "its core", "workers' core"),
        rows_of(loads),
        bars_of(loads, memory, options.quick),
        quick=options.quick,
        num_workers=NUM_WORKERS,
        num_slots=NUM_SLOTS,
        num_accepted=held["accepted"],
        **load.shares(),
        loads={name: [vars(value) for value in values] for name, values in loads.items()},
        memory_megabytes=memory,
    )


if __name__ == "__main__":
    main()
