"""Child processes of one machine, started, watched and restarted: those of a run (`offbeat train`), or those of
a node of a run that is coordinated elsewhere (`offbeat node`).

Each child process is an ordinary `offbeat` command; trainer and workers get join tokens. A child that dies is restarted
(`offbeat.rules.restarts`) and continues from the ledger, its checkpoint or its spool. Children end when this process
ends, even if it is killed. They write to files in the folder logs/, where supervisor.jsonl records each start and end
of a process; the terminal gets a line for each restart.

With several ranks, the trainer is a gang of processes, its ranks, which are started and restarted together: if one
dies, those that have not ended by themselves soon after are killed.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from offbeat.errors import RunStopped, UserError
from offbeat.launch import parent_watch
from offbeat.rules.restarts import Restarts, RestartVerdict

END_WITHIN_S = 90.0
"""Seconds that child processes get to end, after being asked to, before they are killed."""
LOG = "supervisor.jsonl"
USER_ERROR = 2
"""Exit status of a command that a mistake of its user has ended."""
RANK_LOST = 75
"""Exit status of a trainer's rank that ended because another rank was lost (`offbeat.trainer.ranks.LOST`)."""
GANG_ENDS_WITHIN_S = 5.0
"""Seconds that a gang's other ranks get to end by themselves after one died; at once they notice closed connections."""
LOOPBACK = "lo"
"""Network interface for ranks on one machine, where there is one of this name; a host's own name may lead elsewhere."""


@dataclass(eq=False)
class Child:
    """A child process of the supervisor: its command and its current process, which a restart replaces."""

    name: str
    arguments: Sequence[str]
    log: Path | None = None
    role: str | None = None
    """Role for which the child gets a join token; None: it needs no token."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables besides those of this process."""
    only_first: Sequence[str] = ()
    """Additional arguments for the first start only."""
    process: asyncio.subprocess.Process | None = None
    restarts: Restarts = field(default_factory=lambda: Restarts(time.monotonic))
    keeps_going: bool = True

    @property
    def is_alive(self) -> bool:
        return self.process is not None and self.process.returncode is None

    def send(self, number: signal.Signals) -> None:
        if self.is_alive:
            assert self.process is not None
            with suppress(ProcessLookupError):
                self.process.send_signal(number)


class Processes:
    """Starts, watches and restarts the processes of one machine."""

    def __init__(self, num_processes: int, *, is_quiet: bool = False, sets_threads: bool = True):
        """`num_processes` share the CPU's cores, if `sets_threads`. With `is_quiet`, restarts are not printed."""
        self.trainer = Child("trainer", ())
        self.ranks: list[Child] = []
        """The trainer's ranks on this machine but the first, which is `trainer`."""
        self.workers: list[Child] = []
        self._is_quiet = is_quiet
        self._read, self._write = os.pipe()
        self._environment = {**os.environ, **(_threads(num_processes) if sets_threads else {})}

    def _logs(self) -> Path:
        """Returns the folder of the children's logs."""
        raise NotImplementedError

    def _names_mistakes(self) -> bool:
        """Whether the mistake of a user that ends a child is raised as such, with its message alone."""
        return False

    async def _keep(self, child: Child) -> None:
        """Starts a child if it has no process yet, and restarts the child until it ends without an error. Raises if the
        child dies too often, or with an error that a restart cannot fix."""
        if child.process is None:
            await self._start(child)
        while True:
            assert child.process is not None
            status = await child.process.wait()
            self._note("ended", child, status=status)
            if not await self._may_restart(child, status, child.restarts):
                return
            await self._start(child)

    async def _may_restart(self, child: Child, status: int, restarts: Restarts) -> bool:
        """Returns whether a child that ended is to be restarted, after the pause that `restarts` demands. Raises if it
        has died too often, or with an error that a restart cannot fix."""
        verdict, pause_s = restarts.ended(status)
        if verdict is RestartVerdict.DONE or not child.keeps_going:
            return False
        if verdict is RestartVerdict.GIVE_UP:
            why = _last_line(child)
            if status == USER_ERROR and self._names_mistakes():
                raise UserError(f"{child.name}: {why.removeprefix('offbeat: ')}")
            log = f" (see {child.log})" if child.log else ""
            raise RunStopped(f"{child.name}: ended with status {status} and is not restarted: {why}{log}")
        if not self._is_quiet:
            tell(_death(child, status, pause_s))
        await asyncio.sleep(pause_s)
        return child.keeps_going

    async def _keep_gang(self) -> None:
        """Keeps the trainer's ranks running, which start and end together."""
        while True:
            await self._start_gang()
            child, status = await self._gang_ended()
            child.keeps_going = self.trainer.keeps_going
            if not await self._may_restart(child, status, self.trainer.restarts):
                return

    async def _start_gang(self) -> None:
        """Starts all ranks of this machine."""
        gang = [self.trainer, *self.ranks]
        for child, place in zip(gang, self._gang_places(len(gang)), strict=True):
            child.environment = {**child.environment, **place}
            await self._start(child)

    def _gang_places(self, num_ranks: int) -> list[dict[str, str]]:
        """Returns each rank's environment variables, by which ranks meet: here at a free port of this machine."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        return gang_places(num_ranks, num_ranks, 0, "127.0.0.1", port)

    async def _gang_ended(self) -> tuple[Child, int]:
        """Waits until all ranks have ended; kills those that still run a while after another died. Returns the rank
        that is to blame, and its exit status; 0 if none is."""
        waiting = {asyncio.ensure_future(self._ended(child)): child for child in (self.trainer, *self.ranks)}
        pending, ended = set(waiting), list[tuple[Child, int]]()
        limit_s: float | None = None
        try:
            while pending:
                done, pending = await asyncio.wait(pending, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
                ended += [(waiting[one], one.result()) for one in done]
                if not done:
                    break
                if limit_s is None and any(status for _, status in ended):
                    limit_s = GANG_ENDS_WITHIN_S
            for one in pending:
                waiting[one].send(signal.SIGKILL)
            if pending:
                await asyncio.wait(pending)
        finally:
            for one in waiting:
                one.cancel()
        died = [(child, status) for child, status in ended if status]
        own = [(child, status) for child, status in died if status != RANK_LOST]
        if died and not own:  # they ended because another rank hangs, or cannot be reached
            tell(_last_line(died[0][0]).removeprefix("offbeat: "))
            own = [(waiting[one], -signal.SIGKILL) for one in pending] or [(died[0][0], -signal.SIGKILL)]
        return next(iter(own), (self.trainer, 0))

    async def _ended(self, child: Child) -> int:
        assert child.process is not None
        status = await child.process.wait()
        self._note("ended", child, status=status)
        return status

    async def _start(self, child: Child) -> None:
        more = dict(child.environment)
        if child.role is not None:
            more.update(await self._token(child.role))
        child.restarts.started()
        child.process = await self._spawn([*child.arguments, *child.only_first], child.log, more, ())
        child.only_first = ()
        self._note("started", child)

    async def _spawn(
        self, arguments: Sequence[str], log: Path | None, more: dict[str, str], descriptors: tuple[int, ...]
    ) -> asyncio.subprocess.Process:
        environment = {**self._environment, **more, parent_watch.VARIABLE: str(self._read)}
        command = [sys.executable, "-m", "offbeat", *arguments]
        with ExitStack() as stack:
            output = None if log is None else stack.enter_context(log.open("ab"))
            return await asyncio.create_subprocess_exec(
                *command,
                env=environment,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=(self._read, *descriptors),
                start_new_session=True,  # Ctrl-C reaches only the supervisor, which passes it on
            )

    async def _token(self, role: str) -> dict[str, str]:
        """Returns the environment variable with a join token for a child of this role."""
        raise NotImplementedError

    async def _end(self, children: Sequence[Child], number: Mapping[Child, signal.Signals], within_s: float) -> None:
        """Sends each running child its signal, and kills those that do not end in time."""
        running = [child for child in children if child.is_alive]
        for child in running:
            child.keeps_going = False
            child.send(number[child])
        waits = [asyncio.ensure_future(child.process.wait()) for child in running if child.process is not None]
        if waits:
            await asyncio.wait(waits, timeout=within_s)
        for child in running:
            child.send(signal.SIGKILL)
        for child in running:
            if child.process is not None:
                self._note("ended", child, status=await child.process.wait())

    def _note(self, event: str, child: Child, **fields: Any) -> None:
        """Appends an event to supervisor.jsonl; write errors, as on a full disk, are ignored."""
        assert child.process is not None
        when = time.strftime("%Y-%m-%dT%H:%M:%S%z")
        row = {"event": event, "time": when, "process": child.name, "pid": child.process.pid, **fields}
        with suppress(OSError), (self._logs() / LOG).open("a") as log:
            print(json.dumps(row), file=log)


def _death(child: Child, status: int, pause_s: float) -> str:
    how, see = (f"signal {-status}", "") if status < 0 else (f"exit status {status}", f"; see {child.log or 'above'}")
    return f"{child.name} died ({how}){see}; starting again{f' in {pause_s:g} s' if pause_s else ''}"


def tell(text: str) -> None:
    """Prints a line. On a terminal, it first clears the coordinator's progress bar, which is drawn again below it."""
    with suppress(OSError):  # a full disk or a closed pipe must not end the run
        print(f"\r\x1b[2K{text}" if sys.stdout.isatty() else text, flush=True)


def _threads(num_processes: int) -> dict[str, str]:
    """Returns environment variables that divide this process's CPU cores among `num_processes`. Returns an empty dict
    if `OMP_NUM_THREADS` is set, which then decides."""
    if "OMP_NUM_THREADS" in os.environ:
        return {}
    return {"OMP_NUM_THREADS": str(max(1, num_cores() // max(1, num_processes)))}


def num_cores() -> int:
    """Returns the number of CPU cores that this process may use; a scheduler may have given it fewer than there are."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def gang_places(num_here: int, num_ranks: int, first: int, address: str, port: int) -> list[dict[str, str]]:
    """Returns the environment variables of the `num_here` ranks of one machine, the first of which is rank `first` of
    `num_ranks`. All ranks meet at `address` and `port`."""
    is_alone = num_here == num_ranks and _has_loopback()
    return [
        {
            "RANK": str(first + number),
            "WORLD_SIZE": str(num_ranks),
            "LOCAL_RANK": str(number),
            "LOCAL_WORLD_SIZE": str(num_here),
            "MASTER_ADDR": address,
            "MASTER_PORT": str(port),
            **({"GLOO_SOCKET_IFNAME": LOOPBACK} if is_alone else {}),
        }
        for number in range(num_here)
    ]


def _has_loopback() -> bool:
    return any(name == LOOPBACK for _, name in socket.if_nameindex())


def _last_line(child: Child) -> str:
    if child.log is None or not child.log.is_file():
        return "see above"
    lines = child.log.read_text(errors="replace").strip().splitlines()
    return lines[-1] if lines else "no output"
