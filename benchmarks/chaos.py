"""A supervised run under load while its processes are killed at random, its lines cut and its calls sent twice.

    python -m benchmarks.chaos [--kills 200] [--seed N] [--partial] [--quick]

Coordinator, trainer and two workers are the supervisor's; two more workers join over a bad line, which sends one call
in ten twice, up to two seconds late, and is cut now and then for longer than a lease. Workers have paced engines, so
that they start in no time and the disk and the protocol do the work. Weights travel as what changed: the two outside
fetch them from each other and over the line, the others from the coordinator. A kill counts when whoever started the
process saw it die of it; a cut when it was longer than a lease. In the end the run is asked to stop, and its ledger is
held against what crossed the line: what was acknowledged must be there, nothing may have been trained twice or too
late. With --partial the run stops at every batch and carries on what is unfinished, so that beginnings are handed back
and out again all the time.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from benchmarks.faults.audit import Audit, audit
from benchmarks.faults.proxy import FaultProxy, Line
from benchmarks.faults.supervised import PACED, Supervised, rows
from benchmarks.report import Bar, show
from offbeat.launch.joining import new_token

BOUND = 2
LEASE_S = 3.0
CUT_S = 1.5 * LEASE_S
PROGRESS_WITHIN_S = 180.0
SHARES = {"trainer": 0.11, "coordinator": 0.22}
"""Of the kills; workers have the rest. A trainer takes longest to start, and kills without progress prove little."""
OUTSIDE = ("outside-1", "outside-2")
WORKERS = ("worker-1", "worker-2", *OUTSIDE)
SETTINGS = (
    *PACED,
    *("--run.name=a", "--run.steps=1000000", "--run.seed=3", "--run.threads=1", "--checkpoint.every=2"),
    *("--batch.groups-per-step=4", "--batch.group-size=4", "--rollout.max-new-tokens=24", "--rollout.slots=8"),
    *(f"--schedule.max-staleness={BOUND}", "--rollout.workers=2"),
    *(f"--rollout.lease-s={LEASE_S}", "--eval.every=25", "--eval.prompts=4", "--log.console=quiet"),
    *("--weights.deltas=always", "--weights.anchor-every=5", "--model.dtype=bfloat16"),
)
OVERLAP = ("--schedule.mode=overlap",)
PARTIAL = ("--schedule.mode=alternate", "--schedule.over-provision=2", "--paced.sigma=1")
"""Twice the groups of a step, with a long tail: half of what is begun is unfinished when a batch is complete."""


class Outside:
    """A worker of another machine, as it were: it joins over the line, and is started again by us."""

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
        """Kills in this order, with something else that goes wrong in between, and sees that the run gets on."""
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
        """A worker that is suspended for longer than a lease, and goes on as if nothing had happened."""
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

    async def _replay(self) -> None:
        """Sends recorded submissions once more, long after: none may be stored a second time."""
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
        run.process.send_signal(signal.SIGINT)
        await asyncio.to_thread(run.finish, 128 + signal.SIGINT)
    finally:
        run.end()
    return made, audit(run.run, proxy.seen.acknowledged), time.monotonic() - start_s


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.chaos", description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, help="how many (200; with --quick 8)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--partial", action="store_true", help="stop at every batch and carry on what is unfinished")
    parser.add_argument("--quick", action="store_true", help="a few kills: shows that it works, decides little")
    parser.add_argument("--keep", metavar="FOLDER", type=Path, help="leave the run there")
    arguments = parser.parse_args()
    num_kills = arguments.kills or (8 if arguments.quick else 200)
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.keep or Path(temporary)
        folder.mkdir(exist_ok=True)
        chosen = chaos(folder, num_kills, arguments.seed, partial=arguments.partial)
        made, found, seconds = asyncio.run(chosen)
    report(made, found, seconds, num_kills, quick=arguments.quick)
    return 0


def report(made: Chaos, found: Audit, seconds: float, num_kills: int, *, quick: bool) -> None:
    roles = Counter({"worker": sum(made.witnessed[name] for name in WORKERS)})
    roles.update({name: made.witnessed[name] for name in SHARES})
    num_witnessed = sum(roles.values())
    seen = made.proxy.seen
    figures: dict[str, Any] = {
        **{f"kills of {role}": count for role, count in sorted(roles.items())},
        f"cuts longer than a lease ({LEASE_S:g} s)": made.num_cuts,
        "suspensions longer than a lease": made.num_freezes,
        "calls sent twice": sum(seen.copies.values()),
        "submissions replayed at the end": made.num_replays,
        "acknowledged over the line": len(seen.acknowledged),
        "beginnings handed back": found.num_partials,
        "refused as fenced": seen.statuses[410],
        "steps trained": found.num_trained,
        "seconds": round(seconds, 1),
    }
    bars = {
        "lost": _none(len(found.lost) + len(found.violations), quick),
        "doubled": _none(len(found.doubled), quick),
        "over_bound": _none(max(0, found.max_staleness - BOUND), quick),
        "witnessed": Bar(num_witnessed, num_kills, None if quick else num_witnessed >= num_kills, (num_witnessed,) * 2),
    }
    table = [[name, str(value)] for name, value in figures.items()]
    table += [["wrong", line] for line in (*found.lost, *found.doubled, *found.violations)[:20]]
    show(
        "chaos", ["what", "count"], table, bars, figures=figures, statuses=dict(seen.statuses), copies=dict(seen.copies)
    )


def _none(count: int, quick: bool) -> Bar:
    """A few kills can show that something is lost, not that nothing ever is."""
    return Bar(count, 0, None if quick and count == 0 else count == 0, (count, count))


if __name__ == "__main__":
    sys.exit(main())
