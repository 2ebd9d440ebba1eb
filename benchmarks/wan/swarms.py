"""The same training run with workers that share the trainer's disk (`near`), and with workers far away (`far`).

Both consist of the processes that a user would start: a coordinator, a trainer and three workers. Each far worker has a
disk of its own and a line of its own to the coordinator, and reaches nothing else. The last far worker joins when part
of the run is over.
"""

from __future__ import annotations

import asyncio
import os
import re
import statistics
import sys
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.common.supervised import Supervised, rows
from benchmarks.wan.far_link import Distance, FarLink
from offbeat.errors import DeadlineError
from offbeat.launch.joining import new_token

WORKERS = ("early-1", "early-2", "late")
RUN_WITHIN_S = 1800.0
PATIENCE_S = 10.0
LEAVE_WITHIN_S = 20.0
LOOK_EVERY_S = 0.5
FIGURE = re.compile(r'offbeat_worker_weights_total{worker="(.*)",figure="(.*)"} (.*)')
BYTES = "_bytes"


@dataclass
class Traffic:
    """Costs of new versions at far workers, and the traffic on their lines."""

    told: dict[str, dict[str, float]] = field(default_factory=dict)
    """Figures that each worker last reported about itself, by worker."""
    num_bytes_down: int = 0
    num_bytes_up: int = 0
    num_lost: int = 0
    """Number of lost segments."""

    def num_bytes(self) -> dict[str, int]:
        """Bytes of weights that all workers fetched, by kind."""
        sums: Counter[str] = Counter()
        for figures in self.told.values():
            sums.update({name.removesuffix(BYTES): int(n) for name, n in figures.items() if name.endswith(BYTES)})
        return dict(sums)

    def num_versions(self) -> int:
        """Number of versions that all workers together have fetched."""
        return int(sum(figures.get("versions", 0) for figures in self.told.values()))

    def still_s(self) -> float:
        """Mean seconds for which generation stood still for a version, at the worker where they were longest. The first
        version of a worker does not count, because nothing is running when it is loaded."""
        told = [(figures["still_s"], figures.get("versions", 0)) for figures in self.told.values()]
        return max((still_s / (count - 1) for still_s, count in told if count > 1), default=0.0)


@dataclass(frozen=True)
class Swarm:
    """A finished run."""

    run: Path
    seconds: float
    """Seconds since the start of the first process."""
    traffic: Traffic

    def steps(self) -> list[dict[str, Any]]:
        return _steps(self.run)

    def step_s(self) -> float:
        """Median seconds of a step, without the first step, which waits for workers to start."""
        return statistics.median(row["seconds"] for row in self.steps()[1:])

    def still_share(self) -> float:
        """Share of a step for which generation at a far worker stands still for a version."""
        return self.traffic.still_s() / self.step_s()


def near(folder: Path, settings: Sequence[str]) -> Swarm:
    """Runs all processes on one disk; workers read versions where the trainer wrote them."""
    folder.mkdir(parents=True)
    start_s = time.monotonic()
    run = Supervised(folder, *settings, f"--rollout.workers={len(WORKERS)}")
    try:
        while not _is_over(run, start_s):
            time.sleep(LOOK_EVERY_S)
        seconds = time.monotonic() - start_s
        run.finish()
    finally:
        run.end()
    return Swarm(run.run, seconds, Traffic())


async def far(folder: Path, settings: Sequence[str], distance: Distance, seed: int, late_after: int) -> Swarm:
    """Runs coordinator and trainer here and workers behind lines; the last worker joins after `late_after` steps."""
    folder.mkdir(parents=True)
    start_s = time.monotonic()
    run = Supervised(folder, *settings, "--rollout.workers=0", "--weights.deltas=always")
    traffic = Traffic()
    try:
        port = await asyncio.to_thread(run.port)
        async with AsyncExitStack() as stack:
            links = [
                await stack.enter_async_context(FarLink(port, distance, len(WORKERS) * seed + number))
                for number in range(len(WORKERS))
            ]
            *early, late = [FarWorker(name, run, link.url) for name, link in zip(WORKERS, links, strict=True)]
            for worker in (*early, late):
                stack.push_async_callback(worker.end)
            for worker in early:
                await worker.start()
            while not _is_over(run, start_s):
                if late.process is None and len(_steps(run.run)) >= late_after:
                    await late.start()
                traffic.told |= await asyncio.to_thread(_told, f"http://127.0.0.1:{port}/metrics")
                await asyncio.sleep(LOOK_EVERY_S)
            seconds = time.monotonic() - start_s
        await asyncio.to_thread(run.finish)
    finally:
        run.end()
    traffic.num_bytes_down = sum(link.down.num_bytes for link in links)
    traffic.num_bytes_up = sum(link.up.num_bytes for link in links)
    traffic.num_lost = sum(way.num_lost for link in links for way in (link.down, link.up))
    return Swarm(run.run, seconds, traffic)


class FarWorker:
    """A worker with a disk of its own, at the other end of a line."""

    def __init__(self, name: str, run: Supervised, url: str):
        self.name, self.run, self.url = name, run, url
        self.process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        token = await asyncio.to_thread(new_token, self.run.run, "rollout")
        with (self.run.folder / f"{self.name}.log").open("wb") as log:
            self.process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "offbeat", "worker", "--join", self.url, "--fetch-weights"),
                "--trust-coordinator",  # which may be given a model of this machine
                *("--name", self.name, "--dir", str(self.run.folder / self.name), "--patience", str(PATIENCE_S)),
                env={**os.environ, **self.run.environment, "OFFBEAT_TOKEN": token},
                stdout=log,
                stderr=log,
            )

    async def end(self) -> None:
        """Waits until the worker leaves by itself after the run's end; kills it if it does not leave in time."""
        if self.process is None:
            return
        try:
            await asyncio.wait_for(self.process.wait(), LEAVE_WITHIN_S)
        except TimeoutError:
            self.process.kill()
            await self.process.wait()


def _is_over(run: Supervised, start_s: float) -> bool:
    if time.monotonic() - start_s > RUN_WITHIN_S:
        raise DeadlineError(f"{run.run}: not over after {RUN_WITHIN_S:.0f} s; see {run.folder}")
    return run.process.poll() is not None


def _steps(run: Path) -> list[dict[str, Any]]:
    return [row for row in rows(run / "metrics.jsonl") if "reward" in row]


def _told(url: str) -> dict[str, dict[str, float]]:
    """Returns the figures that workers reported about themselves; empty while the coordinator does not listen."""
    told: dict[str, dict[str, float]] = {}
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            found = FIGURE.findall(answer.read().decode())
    except (urllib.error.URLError, OSError):
        return {}
    for worker, name, value in found:
        told.setdefault(worker, {})[name] = float(value)
    return told
