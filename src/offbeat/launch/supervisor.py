"""Runs coordinator, trainer and workers of a run as processes on this machine, and restarts them (see `processes`).

The coordinator writes to this terminal, the others write to files in the run's logs/.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sys
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from offbeat.client.credentials import TOKEN_VARIABLE
from offbeat.config.load import load
from offbeat.config.schema import SERVED, Config
from offbeat.config.secrets import SECRETS
from offbeat.errors import OffbeatError
from offbeat.launch import gpus
from offbeat.launch.given import Given, handed_over
from offbeat.launch.join_file import write
from offbeat.launch.joining import READY, new_token
from offbeat.launch.processes import END_WITHIN_S, Child, Processes
from offbeat.launch.run_folder import ADDRESS, CONFIG, LEDGER, METRICS, SUMMARY, RunFolder, has_begun
from offbeat.launch.stopping import REASONS, Stopping
from offbeat.observability.sinks import send

READY_WITHIN_S = 300.0
END_FINISHED_WITHIN_S = 10.0
"""Seconds that child processes get to end once the run is over and saved."""
FOLLOW_EVERY_S = 0.2


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


@dataclass(frozen=True)
class Devices:
    """The GPUs of this machine by role, as words for `CUDA_VISIBLE_DEVICES`."""

    training: Sequence[str]
    rollout: Sequence[str]
    num_workers: int
    name: str
    """Name of this machine, from which its workers get theirs."""


class Supervisor(Processes):
    """Starts, watches and restarts the processes of one run."""

    def __init__(
        self,
        config: Config,
        serve: Sequence[str],
        resume: Sequence[str],
        *,
        from_scratch: bool = False,
        join_file: Path | None = None,
        devices: Devices | None = None,
        given: Given | None = None,
        num_read: int = 0,
    ):
        """`serve` holds the arguments of the coordinator's first start. `resume` holds those of its restarts, without
        the run's folder, which is added. With `from_scratch`, the trainer's first process may begin the run again if
        the checkpoints are lost; the trainer's later processes continue that run. `join_file` is written when the
        run can be joined. With `devices`, trainer and workers have GPUs of their own. `given` is what a Python program
        adds to the configuration. Its sinks get the rows of metrics.jsonl after the first `num_read` bytes."""
        super().__init__(
            (config.rollout.workers or 0) + config.trainer.ranks,
            is_quiet=config.log.console == "quiet",
            sets_threads=config.run.threads is None,
        )
        self.given = given or Given()
        self.config, self._resume, self._from_scratch = config, resume, from_scratch
        self.coordinator = Child("coordinator", serve)
        self._join_file, self._devices = join_file, devices
        self.run, self.url = Path(), ""
        self._sinks = list(self.given.sinks)
        self._num_read = num_read
        self._handed_over: dict[str, str] = {}
        self._is_finished = False
        self._reasons_out, self._reasons_in = os.pipe()

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
                if self._join_file is not None:
                    served = json.loads((self.run / ADDRESS).read_text())
                    await asyncio.to_thread(write, self._join_file, self.run, served["url"], self.config)
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
        if (devices := self._devices) is not None:
            for child in (self.trainer, *self.ranks):
                child.environment = {gpus.VARIABLE: ",".join(devices.training)}
            own = ["--workers", str(devices.num_workers), "--devices", ",".join(devices.rollout)]
            own += ["--dir", str(self.run / "node"), "--logs", str(logs), "--name", devices.name]
            own += [f"--engine.tensor-parallel={self.config.engine.tensor_parallel}"]
            self.workers.append(Child("node", ["node", *join, *own], logs / "node.log", "rollout"))
        for number in range(1, (self.config.rollout.workers or 0) + 1):
            name = f"worker-{number}"
            own = ["--name", name, "--dir", str(self.run / "workers" / name)]
            if self.config.weights.deltas == "always":
                own.append("--fetch-weights")
            if self.config.rollout.engine in SERVED:
                own += ["--engine-log", str(logs / f"{name}-engine.log")]
            self.workers.append(Child(name, ["worker", *join, *own], logs / f"{name}.log", "rollout"))

    async def _start(self, child: Child) -> None:
        await (self._start_coordinator() if child is self.coordinator else super()._start(child))

    async def _token(self, role: str) -> dict[str, str]:
        uses = self._devices.num_workers if self._devices is not None and role == "rollout" else 1
        return {TOKEN_VARIABLE: await asyncio.to_thread(new_token, self.run, role, uses)}

    def _logs(self) -> Path:
        return self.run / "logs"

    def _names_mistakes(self) -> bool:
        return not has_begun(self.run)  # then its folder is removed, with the logs

    async def _end_all(self) -> None:
        """Asks all running children to end, and kills those that do not end in time."""
        children = (self.trainer, *self.ranks, *self.workers, self.coordinator)
        # Without a coordinator, a worker cannot hand work back; finished work is in its spool.
        is_served = self.coordinator.is_alive
        numbers = {c: signal.SIGTERM if is_served or c is self.trainer else signal.SIGKILL for c in children}
        await self._end(children, numbers, END_FINISHED_WITHIN_S if self._is_finished else END_WITHIN_S)


def _line(descriptor: int) -> bytes:
    with open(descriptor, "rb") as pipe:
        return pipe.readline()
