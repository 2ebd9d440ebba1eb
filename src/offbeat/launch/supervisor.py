"""Runs coordinator, trainer and workers as processes on this machine, and restarts them.

Each child process is an ordinary `offbeat` command; trainer and workers get join tokens of their own. A child that dies
is restarted (`offbeat.rules.restarts`) and continues from the ledger, its checkpoint or its spool. Children end when
this process ends, even if it is killed. The coordinator writes to this terminal, the others write to files in the run's
logs/. There, supervisor.jsonl records each start and end of a process; the terminal gets a line for each restart.

With `trainer.ranks`, the trainer is a gang of processes, its ranks, which are started and restarted together: if one
dies, those that have not ended by themselves soon after are killed.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from offbeat.client.credentials import TOKEN_VARIABLE
from offbeat.config.load import load
from offbeat.config.schema import SERVED, Config
from offbeat.config.secrets import SECRETS
from offbeat.errors import OffbeatError, RunStopped, UserError
from offbeat.launch import parent_watch
from offbeat.launch.given import Given, handed_over
from offbeat.launch.joining import READY, new_token
from offbeat.launch.run_folder import CONFIG, LEDGER, METRICS, SUMMARY, RunFolder, has_begun
from offbeat.launch.stopping import REASONS, Stopping
from offbeat.observability.sinks import send
from offbeat.rules.restarts import Restarts, RestartVerdict

READY_WITHIN_S = 300.0
END_WITHIN_S = 90.0
"""Seconds that child processes get to end, after being asked to, before they are killed."""
END_FINISHED_WITHIN_S = 10.0
"""Seconds that child processes get to end once the run is over and saved."""
LOG = "supervisor.jsonl"
USER_ERROR = 2
"""Exit status of a command that a mistake of its user has ended."""
FOLLOW_EVERY_S = 0.2
RANK_LOST = 75
"""Exit status of a trainer's rank that ended because another rank was lost (`offbeat.trainer.ranks.LOST`)."""
GANG_ENDS_WITHIN_S = 5.0
"""Seconds that a gang's other ranks get to end by themselves after one died; at once they notice closed connections."""
LOOPBACK = "lo"
"""Network interface for ranks on one machine, where there is one of this name; a host's own name may lead elsewhere."""


async def train(config: Config, given: Given, *, resume: Path | None = None) -> dict[str, Any]:
    """Runs a configuration to its end, in processes of its own, for a Python program; returns the run's summary. See
    `offbeat.launch.local.train` for the parameters."""
    new = partial(RunFolder.create, config, given.rows, from_python=given.from_python)
    before = load(resume / CONFIG) if resume else None
    with RunFolder.open(resume, config) if resume else new() as folder:
        path = folder.path
        num_read = folder.metrics_file.stat().st_size
    given.on_folder(path)
    again = ["serve", "--resume", str(path)]
    try:
        return await Supervisor(config, again, again[:1], given=given, num_read=num_read).run_to_end()
    except SystemExit as error:
        if before is not None:  # the coordinator was refused, for example for its rewards
            RunFolder.open(path, before).close()
        elif not (path / LEDGER).exists():
            shutil.rmtree(path, ignore_errors=True)
        raise OffbeatError(f"{path}: the coordinator could not start; its error is printed above") from error


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


class Supervisor:
    """Starts, watches and restarts the processes of one run."""

    def __init__(
        self,
        config: Config,
        serve: Sequence[str],
        resume: Sequence[str],
        *,
        from_scratch: bool = False,
        given: Given | None = None,
        num_read: int = 0,
    ):
        """`serve` holds the arguments of the coordinator's first start. `resume` holds those of its restarts, without
        the run's folder, which is added. With `from_scratch`, the trainer's first process may begin the run again if
        the checkpoints are lost; the trainer's later processes continue that run. `given` is what a Python program adds
        to the configuration. Its sinks get the rows of metrics.jsonl after the first `num_read` bytes."""
        self.given = given or Given()
        self.config, self._resume, self._from_scratch = config, resume, from_scratch
        self.coordinator = Child("coordinator", serve)
        self.trainer = Child("trainer", ())
        self.ranks: list[Child] = []
        """The trainer's ranks but rank 0, which is `trainer`."""
        self.workers: list[Child] = []
        self.run = Path()
        self.url = ""
        self._sinks = list(self.given.sinks)
        self._num_read = num_read
        self._handed_over: dict[str, str] = {}
        self._is_finished = False
        self._read, self._write = os.pipe()
        self._reasons_out, self._reasons_in = os.pipe()
        self._environment = {**os.environ, **_threads(config)}

    async def run_to_end(self) -> dict[str, Any]:
        stopping = Stopping()
        with ExitStack() as stack:
            stack.enter_context(stopping.listening(self.given.stop))
            for descriptor in (self._read, self._write, self._reasons_out, self._reasons_in):
                stack.callback(os.close, descriptor)
            self._handed_over = stack.enter_context(handed_over(self.given))
            for sink in self.given.sinks:
                stack.callback(sink.close)
            try:
                await self._start_coordinator()
                self._name_children()
                await self._watch(stopping)
            finally:
                await self._end_all()
                if self.url:
                    self._send_rows()
        summary = self.run / SUMMARY
        if not summary.is_file():
            raise OffbeatError(f"{self.run}: the run ended without a summary; see {self.run / 'logs'}")
        return json.loads(summary.read_text())

    async def _watch(self, stopping: Stopping) -> None:
        """Watches the child processes and restarts those that crash, until the coordinator ends."""
        asked = asyncio.ensure_future(self._stop_when(stopping))
        following = asyncio.ensure_future(self._follow())
        try:
            async with asyncio.TaskGroup() as group:
                others = [group.create_task(self._keep(child)) for child in self.workers]
                others.append(group.create_task(self._keep_gang() if self.ranks else self._keep(self.trainer)))
                await self._keep(self.coordinator)
                self._is_finished = True
                for keeping in others:
                    keeping.cancel()
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        finally:
            asked.cancel()
            following.cancel()

    async def _follow(self) -> None:
        """Sends each new row of metrics to the sinks given from Python. The coordinator sends rows to the configured
        sinks itself."""
        while self._sinks:
            self._send_rows()
            await asyncio.sleep(FOLLOW_EVERY_S)

    def _send_rows(self) -> None:
        file = self.run / METRICS
        if not self._sinks or not file.is_file():
            return
        with file.open("rb") as rows:
            rows.seek(self._num_read)
            for line in rows:
                if not line.endswith(b"\n"):
                    break  # half a row, still being written
                self._num_read += len(line)
                with suppress(ValueError):  # `read_metrics` complains of it
                    send(json.loads(line), self._sinks, lambda text: print(f"warning: {text}", file=sys.stderr))

    async def _stop_when(self, stopping: Stopping) -> None:
        """Waits for a request to stop. Then ends the trainer, which first finishes its step and saves a checkpoint, and
        after that the coordinator, which the trainer needs until its end. A second signal ends everything at once."""
        await stopping.requested.wait()
        assert stopping.why is not None
        for child in (self.trainer, *self.ranks, *self.workers):
            child.keeps_going = False
        self.trainer.send(signal.SIGTERM)
        if self.trainer.process is not None:
            await self.trainer.process.wait()
        self.coordinator.keeps_going = False
        if stopping.why in signal.Signals.__members__:
            self.coordinator.send(signal.Signals[stopping.why])
        else:
            os.write(self._reasons_in, stopping.why.encode())

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
            if status == USER_ERROR and not has_begun(self.run):  # its folder is removed, with the log
                raise UserError(f"{child.name}: {why.removeprefix('offbeat: ')}")
            log = f" (see {child.log})" if child.log else ""
            raise RunStopped(f"{child.name}: ended with status {status} and is not restarted: {why}{log}")
        if self.config.log.console != "quiet":
            _tell(_death(child, status, pause_s))
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
        """Starts all ranks, which meet at a port of their own."""
        gang = [self.trainer, *self.ranks]
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        for rank, child in enumerate(gang):
            child.environment = {
                "RANK": str(rank),
                "WORLD_SIZE": str(len(gang)),
                "LOCAL_RANK": str(rank),
                "LOCAL_WORLD_SIZE": str(len(gang)),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                **({"GLOO_SOCKET_IFNAME": LOOPBACK} if _has_loopback() else {}),
            }
            await self._start(child)

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
            _tell(_last_line(died[0][0]).removeprefix("offbeat: "))
            own = [(waiting[one], -signal.SIGKILL) for one in pending] or [(died[0][0], -signal.SIGKILL)]
        return next(iter(own), (self.trainer, 0))

    async def _ended(self, child: Child) -> int:
        assert child.process is not None
        status = await child.process.wait()
        self._note("ended", child, status=status)
        return status

    async def _start_coordinator(self) -> None:
        """Starts the coordinator, and waits until it is ready and tells its URL and run folder. After a restart, the
        coordinator resumes the run that it began at its first start."""
        read, write = os.pipe()
        arguments = self.coordinator.arguments if not self.url else [*self._resume, "--resume", str(self.run)]
        try:
            child = self.coordinator
            child.restarts.started()
            more = {READY: str(write), REASONS: str(self._reasons_out), **self._handed_over}
            child.process = await self._spawn(arguments, None, more, (write, self._reasons_out))
        finally:
            os.close(write)
        if self.url:
            self._note("started", child)
        line = await asyncio.wait_for(asyncio.to_thread(_line, read), READY_WITHIN_S)
        if not line:
            status = await child.process.wait()
            if not self.url:
                raise SystemExit(status or 1)  # the error is already on this terminal
            return  # `_keep` notices its end
        ready, is_first = json.loads(line), not self.url
        self.url, self.run = ready["url"], Path(ready["run"])
        if is_first:  # before, there was no folder for the log
            self._note("started", child)

    def _name_children(self) -> None:
        logs = self.run / "logs"
        # The coordinator may be trusted: it runs on this machine with the same user's configuration.
        join = ["--join", self.url, "--trust-coordinator"]
        if (self.run / SECRETS).is_file():
            join += ["--secrets-file", str(self.run / SECRETS)]
        self.trainer = Child("trainer", ["trainer", *join, "--dir", str(self.run)], logs / "trainer.log", "trainer")
        self.trainer.only_first = ["--from-scratch"] if self._from_scratch else []
        more = [f"--trainer.start_within_s={self.config.trainer.start_within_s:g}"]
        self.ranks = [
            Child(f"trainer-rank-{rank}", [*self.trainer.arguments, *more], logs / f"trainer-rank-{rank}.log")
            for rank in range(1, self.config.trainer.ranks)
        ]
        for number in range(1, (self.config.rollout.workers or 0) + 1):
            name = f"worker-{number}"
            own = ["--name", name, "--dir", str(self.run / "workers" / name)]
            if self.config.weights.deltas == "always":
                own.append("--fetch-weights")
            if self.config.rollout.engine in SERVED:
                own += ["--engine-log", str(logs / f"{name}-engine.log")]
            self.workers.append(Child(name, ["worker", *join, *own], logs / f"{name}.log", "rollout"))

    async def _start(self, child: Child) -> None:
        if child is self.coordinator:
            return await self._start_coordinator()
        more = dict(child.environment)
        if child.role is not None:
            more[TOKEN_VARIABLE] = await asyncio.to_thread(new_token, self.run, child.role)
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

    async def _end_all(self) -> None:
        """Asks all running children to end, and kills those that do not end in time."""
        all_children = (self.trainer, *self.ranks, *self.workers, self.coordinator)
        children = [child for child in all_children if child.is_alive]
        for child in children:
            child.keeps_going = False
            # Without a coordinator, a worker cannot hand work back; finished work is in its spool.
            child.send(signal.SIGTERM if self.coordinator.is_alive or child is self.trainer else signal.SIGKILL)
        waits = [asyncio.ensure_future(child.process.wait()) for child in children if child.process is not None]
        if waits:
            await asyncio.wait(waits, timeout=END_FINISHED_WITHIN_S if self._is_finished else END_WITHIN_S)
        for child in children:
            child.send(signal.SIGKILL)
        for child in children:
            if child.process is not None:
                self._note("ended", child, status=await child.process.wait())

    def _note(self, event: str, child: Child, **fields: Any) -> None:
        """Appends an event to supervisor.jsonl; write errors, as on a full disk, are ignored."""
        assert child.process is not None
        when = time.strftime("%Y-%m-%dT%H:%M:%S%z")
        row = {"event": event, "time": when, "process": child.name, "pid": child.process.pid, **fields}
        with suppress(OSError), (self.run / "logs" / LOG).open("a") as log:
            print(json.dumps(row), file=log)


def _death(child: Child, status: int, pause_s: float) -> str:
    how, see = (f"signal {-status}", "") if status < 0 else (f"exit status {status}", f"; see {child.log or 'above'}")
    return f"{child.name} died ({how}){see}; starting again{f' in {pause_s:g} s' if pause_s else ''}"


def _tell(text: str) -> None:
    """Prints a line. On a terminal, it first clears the coordinator's progress bar, which is drawn again below it."""
    with suppress(OSError):  # a full disk or a closed pipe must not end the run
        print(f"\r\x1b[2K{text}" if sys.stdout.isatty() else text, flush=True)


def _line(descriptor: int) -> bytes:
    with open(descriptor, "rb") as pipe:
        return pipe.readline()


def _threads(config: Config) -> dict[str, str]:
    """Returns environment variables that divide the CPU cores among trainer and workers. Returns an empty dict if
    `run.threads` or `OMP_NUM_THREADS` is set, which then decides."""
    if config.run.threads is not None or "OMP_NUM_THREADS" in os.environ:
        return {}
    num_processes = (config.rollout.workers or 0) + config.trainer.ranks
    return {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // num_processes))}


def _has_loopback() -> bool:
    return any(name == LOOPBACK for _, name in socket.if_nameindex())


def _last_line(child: Child) -> str:
    if child.log is None or not child.log.is_file():
        return "see above"
    lines = child.log.read_text(errors="replace").strip().splitlines()
    return lines[-1] if lines else "no output"
