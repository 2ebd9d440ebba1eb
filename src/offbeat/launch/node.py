"""One machine of a run that is coordinated elsewhere: its workers and the trainer ranks that stand here.

Each child is an ordinary `offbeat worker` or `offbeat trainer` with GPUs of its own. A child that dies is restarted
under its name (`processes`). A worker that cannot go on, because it was shut out for example, does not take the others
along. The node ends when the run is over, when it is asked to, or when the process that started it has ended.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from offbeat.client.credentials import TOKEN_VARIABLE
from offbeat.errors import RunStopped
from offbeat.launch import gpus, parent_watch
from offbeat.launch.processes import END_WITHIN_S, Child, Processes, gang_places, tell
from offbeat.launch.run_folder import LOCK, FolderInUse, FolderLock
from offbeat.launch.stopping import Stopping

FREE_WITHIN_S = 5.0
LOOK_EVERY_S = 1.0
"""Seconds between two looks at whether the process that started the node still lives."""


@dataclass(frozen=True)
class GangPart:
    """The trainer ranks on one machine, and how they meet those of other machines."""

    num_here: int = 0
    num_ranks: int = 0
    """Ranks on all machines together."""
    first: int = 0
    meet: tuple[str, int] | None = None
    """Address and port at which the ranks of several machines meet; None: all of them are here."""


@dataclass(frozen=True)
class NodePlan:
    """What one machine runs."""

    name: str
    num_workers: int
    gpus: Sequence[str]
    """Words for `CUDA_VISIBLE_DEVICES`; the trainer's ranks get the first ones."""
    gpus_per_worker: int = 1
    gang: GangPart = GangPart()


class Node(Processes):
    """Starts, watches and restarts the processes of one machine of a run."""

    def __init__(
        self,
        plan: NodePlan,
        folder: Path,
        logs: Path,
        join: Sequence[str],
        tokens: dict[str, str],
        words: Sequence[str],
    ):
        """`join` holds the options with which each child joins the run, `tokens` a join token by role, and `words` the
        keys of the configuration that concern this machine."""
        has_threads = any(word.startswith("--run.threads") for word in words)
        super().__init__(plan.num_workers + plan.gang.num_here, sets_threads=not has_threads)
        self._log_folder, self._plan, self._tokens = logs, plan, tokens
        self._given_up: list[str] = []
        logs.mkdir(parents=True, exist_ok=True)
        num_training = plan.gang.num_here
        for rank in range(num_training):
            number = plan.gang.first + rank
            name, is_first = f"trainer-rank-{number}" if number else "trainer", number == 0
            own = [*join, "--dir", str(folder / "trainer"), *words]
            child = Child(name, ["trainer", *own], logs / f"{name}.log", "trainer" if is_first else None)
            if rank:
                self.ranks.append(child)
            else:
                self.trainer = child
            child.environment = self._gpus(plan.gpus[:num_training])
        left = plan.gpus[num_training:] if plan.gpus else ()
        for number, share in enumerate(gpus.shares(left, plan.num_workers, plan.gpus_per_worker), start=1):
            name = f"worker-{number}"
            own = [*join, "--name", f"{plan.name}-{number}", "--dir", str(folder / "workers" / name)]
            own += ["--engine-log", str(logs / f"{name}-engine.log"), *words]
            child = Child(name, ["worker", *own], logs / f"{name}.log", "rollout", self._gpus(share))
            self.workers.append(child)

    def _logs(self) -> Path:
        return self._log_folder

    def _gpus(self, share: Sequence[str]) -> dict[str, str]:
        return {gpus.VARIABLE: ",".join(share)} if self._plan.gpus else {}

    async def run_to_end(self) -> str | None:
        """Runs until all children have ended, and returns None; or until the node is asked to stop, and returns why.
        Raises `RunStopped` if the trainer cannot go on, or if no worker can."""
        stopping = Stopping()
        keeping: list[asyncio.Task[None]] = []
        with ExitStack() as stack:
            stack.enter_context(stopping.listening())
            for descriptor in (self._read, self._write):
                stack.callback(os.close, descriptor)
            asked = asyncio.ensure_future(stopping.requested.wait())
            watching = asyncio.ensure_future(_until_orphaned(stopping))
            try:
                keeping += [asyncio.ensure_future(self._keep_worker(child)) for child in self.workers]
                if self._plan.gang.num_here:
                    keeping.append(asyncio.ensure_future(self._keep_gang()))
                pending: set[asyncio.Task[None]] = set(keeping)
                while pending and not asked.done():
                    done, _ = await asyncio.wait({*pending, asked}, return_when=asyncio.FIRST_COMPLETED)
                    pending -= done
                    for task in done - {asked}:
                        task.result()
            finally:
                children = (self.trainer, *self.ranks, *self.workers)
                for child in children:
                    child.keeps_going = False
                await self._end(children, dict.fromkeys(children, signal.SIGTERM), END_WITHIN_S)
                for task in (asked, watching, *keeping):
                    task.cancel()
        if stopping.why is None and self._given_up and len(self._given_up) == len(self.workers):
            raise RunStopped(f"node {self._plan.name}: no worker can go on: {self._given_up[-1]}")
        return stopping.why

    async def _keep_worker(self, child: Child) -> None:
        try:
            await self._keep(child)
        except RunStopped as error:
            self._given_up.append(str(error))
            tell(f"node {self._plan.name}: {error}; the others go on")

    def _gang_places(self, num_ranks: int) -> list[dict[str, str]]:
        gang = self._plan.gang
        if gang.meet is None:
            return super()._gang_places(num_ranks)
        return gang_places(num_ranks, gang.num_ranks, gang.first, *gang.meet)

    async def _start(self, child: Child) -> None:
        await _until_free(child)
        await super()._start(child)

    async def _token(self, role: str) -> dict[str, str]:
        token = self._tokens.get(role)
        return {TOKEN_VARIABLE: token} if token else {}


async def _until_free(child: Child) -> None:
    """Waits until no process uses a child's folder: those of a node that was killed still hand back their work."""
    words = list(child.arguments)
    lock = Path(words[words.index("--dir") + 1]) / ("trainer.lock" if words[0] == "trainer" else LOCK)
    deadline_s = time.monotonic() + parent_watch.GRACE_S + FREE_WITHIN_S
    while lock.is_file() and time.monotonic() < deadline_s:
        try:
            FolderLock(lock).release()
            return
        except FolderInUse:
            await asyncio.sleep(0.2)


async def _until_orphaned(stopping: Stopping) -> None:
    """Asks the node to stop once the process that started it has ended. Started with nohup, it goes on without."""
    parent = os.getppid()
    while signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        await asyncio.sleep(LOOK_EVERY_S)
        if os.getppid() != parent:
            stopping.request("the process that started it has ended")
            return
