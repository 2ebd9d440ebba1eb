"""Two servers, one with a ledger and one without, each under the load of a crowd of workers."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.common.load import TICKS_PER_S
from benchmarks.swarm.workers import NUM_SLOTS, Crowd, Phase
from offbeat.errors import OffbeatError

NUM_WORKERS = 200
ANSWER_S = 0.5
"""Time of an answer under overload. With 1,600 slots, 2,700 answers per second come, more than the server can take."""
LIGHT_ANSWER_S = 8.0
"""Time of an answer under light load: 170 answers per second, a fraction of what the server can take."""
SERVER_CORE, WORKERS_CORE = 0, 1
MEMORY_EVERY_S = 1.0
say = partial(report.say, "swarm")
WARMUP_ANSWERS = 2 * NUM_SLOTS
"""Number of answers before anything is measured; by then all connections are open."""

MemoryLog = list[tuple[float, float]]
"""Pairs of a time in seconds and the server's resident memory in megabytes at that time."""


@dataclass(frozen=True)
class Lengths:
    """How long each part of the benchmark takes, in seconds."""

    rounds: int
    warmup_s: float
    """Longest time of the warm-up."""
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
        """Ends the server; returns the counts of its ledger."""
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
def started(folder: Path, *, stand_in: bool = False, page: str = "") -> Iterator[Server]:
    """Starts a server; with `page`, a token, it also serves the run's page."""
    command = [sys.executable, "-m", "benchmarks.swarm.server", str(folder), "--workers", str(NUM_WORKERS)]
    command += ["--core", str(SERVER_CORE)] if (os.cpu_count() or 1) > 1 else []
    command += ["--stand-in"] if stand_in else []
    command += ["--page", page] if page else []
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
    """Lets a crowd of workers load a server, and records the server's memory meanwhile."""
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


def measure(folder: Path, lengths: Lengths) -> tuple[dict[str, list[Loaded]], MemoryLog, dict[str, Any]]:
    """Overloads both servers in turn, then loads the server with a ledger lightly; also returns the ledger's final
    counts."""
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


def told(loaded: Loaded) -> str:
    return (
        f"{loaded.rate:,.0f} submissions/s, p50 {loaded.p50_ms:.0f} ms, p99 {loaded.p99_ms:.0f} ms, server "
        f"{loaded.server_share:.0%} of its core, workers {loaded.workers_share:.0%} of theirs"
    )
