"""Kills processes of a supervised run, cuts its lines and repeats its calls; then audits its ledger."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
import time
from collections import Counter
from contextlib import AsyncExitStack
from pathlib import Path

from benchmarks.chaos.audit import Audit, audit
from benchmarks.chaos.fault_proxy import FaultProxy, Line
from benchmarks.common.supervised import PACED, Supervised, rows
from offbeat.launch.joining import new_token

BOUND = 2
LEASE_S = 3.0
CUT_S = 1.5 * LEASE_S
PROGRESS_WITHIN_S = 180.0
SHARES = {"trainer": 0.11, "coordinator": 0.22}
"""Shares of the kills by role; workers get the rest. A trainer takes longest to start, and a kill without progress
since the last one proves little."""
OUTSIDE = ("outside-1", "outside-2")
WORKERS = ("worker-1", "worker-2", *OUTSIDE)
SETTINGS = (
    *PACED,
    *("--run.name=a", "--run.steps=1000000", "--run.seed=3", "--run.threads=1", "--checkpoint.every=2"),
    *("--batch.groups-per-step=4", "--batch.group-size=4", "--rollout.max-new-tokens=24", "--rollout.slots=8"),
    *(f"--schedule.max-staleness={BOUND}", "--rollout.workers=2"),
    *(f"--rollout.lease-s={LEASE_S}", "--eval.every=25", "--eval.prompts=4", "--log.console=quiet"),
    *("--weights.deltas=always", "--model.dtype=bfloat16"),
)
OVERLAP = ("--schedule.mode=overlap",)
PARTIAL = ("--schedule.mode=alternate", "--schedule.over-provision=2", "--paced.sigma=1")
"""Options for partial rollouts. With twice the groups of a step and a long tail, half of the answers begun are
unfinished when a batch is complete."""


class Outside:
    """A worker that stands for one on another machine: it joins over the line, and `kill` restarts it."""

    def __init__(self, name: str, run: Supervised, url: str):
        self.name, self.run, self.url = name, run, url
        self.process: asyncio.subprocess.Process | None = None
        self.num_killed = 0

    async def start(self) -> None:
        token = await asyncio.to_thread(new_token, self.run.run, "rollout")
        folder = self.run.folder / self.name
        with (self.run.folder / f"{self.name}.log").open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "offbeat", "worker", "--join", self.url),
                *("--name", self.name, "--dir", str(folder)),
                *("--fetch-weights", "--site", "outside", "--peer-address", "127.0.0.1:0"),
                env={**os.environ, **self.run.environment, "OFFBEAT_TOKEN": token},
                stdout=log,
                stderr=log,
            )

    async def kill(self) -> bool:
        assert self.process is not None
        if self.process.returncode is None:
            self.process.send_signal(signal.SIGKILL)
        is_witnessed = await self.process.wait() == -signal.SIGKILL
        await self.start()
        return is_witnessed

    async def end(self) -> None:
        if self.process is not None and self.process.returncode is None:
            self.process.send_signal(signal.SIGKILL)
            await self.process.wait()


class Chaos:
    def __init__(self, run: Supervised, proxy: FaultProxy, outside: dict[str, Outside], seed: int):
        self.run, self.proxy, self.outside = run, proxy, outside
        self.rng = random.Random(seed)
        self.witnessed: Counter[str] = Counter()
        self.num_cuts = self.num_freezes = self.num_replays = 0

    async def kill_all(self, names: list[str]) -> None:
        """Kills processes in this order, with cuts and freezes in between, and checks that the run makes progress."""
        every = max(4, len(names) // 12)
        for number, name in enumerate(names):
            if number % every == every - 1:
                await self._cut() if (number // every) % 2 == 0 else await self._freeze()
            if name == "trainer" or number % 10 == 9:
                await self._progress()  # or a trainer that is killed at every start would be all that we test
            self.witnessed[name] += await self._kill(name)
            await asyncio.sleep(self.rng.uniform(0.0, 1.0))
        await self._progress()
        await self._replay()

    async def _kill(self, name: str) -> bool:
        if name in self.outside:
            return await self.outside[name].kill()
        return await asyncio.to_thread(self.run.kill, name) > 0

    async def _cut(self) -> None:
        self.num_cuts += await self.proxy.partition(CUT_S) > LEASE_S

    async def _freeze(self) -> None:
        """Suspends a worker for longer than a lease and lets it continue."""
        pid = await asyncio.to_thread(self.run.playing, "worker-1")
        start_s = time.monotonic()
        os.kill(pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(CUT_S)
        finally:
            os.kill(pid, signal.SIGCONT)
        self.num_freezes += time.monotonic() - start_s > LEASE_S

    async def _progress(self) -> None:
        """Waits until two more steps are trained."""

        def num_steps() -> int:
            return sum("reward" in row for row in rows(self.run.run / "metrics.jsonl"))

        wanted, deadline_s = num_steps() + 2, time.monotonic() + PROGRESS_WITHIN_S
        while num_steps() < wanted:
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"no two steps within {PROGRESS_WITHIN_S:.0f} s; see {self.run.folder}")
            await asyncio.sleep(0.1)

    async def crossing(self) -> None:
        """Waits until an answer of a worker behind the proxy is acknowledged."""
        deadline_s = time.monotonic() + PROGRESS_WITHIN_S
        while not self.proxy.seen.acknowledged:
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"no answer crossed the proxy in {PROGRESS_WITHIN_S:.0f} s; see {self.run.folder}")
            await asyncio.sleep(0.1)

    async def _replay(self) -> None:
        """Sends recorded submissions again, long after the first time; none may be stored twice."""
        calls = self.proxy.seen.submissions
        for call in self.rng.sample(calls, min(50, len(calls))):
            self.num_replays += await self.proxy.replay(call) in (200, 410)


async def chaos(folder: Path, num_kills: int, seed: int, *, partial: bool = False) -> tuple[Chaos, Audit, float]:
    rng = random.Random(seed)
    counts = {role: max(1, round(share * num_kills)) for role, share in SHARES.items()}
    names = [role for role, count in counts.items() for _ in range(count)]
    names += [WORKERS[n % len(WORKERS)] for n in range(num_kills - len(names))]
    rng.shuffle(names)
    start_s = time.monotonic()
    run = Supervised(folder, *SETTINGS, *(PARTIAL if partial else OVERLAP))
    try:
        port = await asyncio.to_thread(run.port)
        async with AsyncExitStack() as stack:
            proxy = await stack.enter_async_context(FaultProxy(port, Line(twice=0.1, late_s=2.0), seed))
            outside = {name: Outside(name, run, proxy.url) for name in OUTSIDE}
            for worker in outside.values():
                stack.push_async_callback(worker.end)
                await worker.start()
            made = Chaos(run, proxy, outside, seed)
            await made.kill_all(names)
            await made.crossing()
        run.process.send_signal(signal.SIGINT)
        await asyncio.to_thread(run.finish, 128 + signal.SIGINT)
    finally:
        run.end()
    return made, audit(run.run, proxy.seen.acknowledged), time.monotonic() - start_s
