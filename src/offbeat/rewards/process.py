"""One reward process, as its pool sees it: started under a deadline, given work, killed when a sample hangs.

A sample's deadline runs from the moment at which the process begins to judge it.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Self, cast

from offbeat.errors import DeadlineError, OffbeatError, UserError
from offbeat.files import cannot_write
from offbeat.rewards import guard, wire

MAX_LOG_BYTES = 32 << 20
READ_BYTES = 1 << 16
CLOSE_WITHIN_S = 5.0
LAST_BYTE = b"\0"


class RewardLog:
    """Log of the output of reward processes, in a file of bounded size. Use it as the standard error of a process.

    A thread copies the output to the file. A file that has grown to `MAX_LOG_BYTES` is renamed to `NAME.1`, and a new
    one is begun. On a full disk the log is cut short, but no sample fails.
    """

    def __init__(self, path: Path):
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            raise cannot_write(path, error) from error
        self._lock = threading.Lock()
        self._read, self._write = os.pipe()
        self._is_closing = False
        self._copying = threading.Thread(target=self._copy, name="reward-log", daemon=True)
        self._copying.start()

    def fileno(self) -> int:
        return self._write

    def write(self, text: str) -> None:
        """Adds text of the pool's own to the log."""
        self._keep(text.encode())

    def move(self, path: Path) -> None:
        """Appends the log so far to another file and continues there; deletes the old file."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with self._lock:
            self._file.close()
            try:
                self._file = path.open("ab", buffering=0)
            except OSError as error:
                raise cannot_write(path, error) from error
            self._file.write(self.path.read_bytes())
            self.path.unlink()
            self.path = path

    def close(self) -> None:
        self._is_closing = True
        os.write(self._write, LAST_BYTE)  # the pipe may never end: a process that a reward left behind may hold it
        os.close(self._write)
        self._copying.join(CLOSE_WITHIN_S)
        if not self._copying.is_alive():
            os.close(self._read)
        with self._lock, suppress(OSError):
            self._file.close()

    def _copy(self) -> None:
        while data := os.read(self._read, READ_BYTES):
            is_last = self._is_closing and data.endswith(LAST_BYTE)
            self._keep(data.removesuffix(LAST_BYTE) if is_last else data)
            if is_last:
                return

    def _keep(self, data: bytes) -> None:
        with self._lock, suppress(OSError, ValueError):  # ValueError: it is closed
            if self._file.tell() + len(data) > MAX_LOG_BYTES:
                self._file.close()
                os.replace(self.path, self.path.with_name(f"{self.path.name}.1"))
                self._file = self.path.open("ab", buffering=0)
            self._file.write(data)


GRACE_S = 2.0
"""Seconds that the pool adds to a deadline in two cases. Until the process has begun the first sample of a message,
they are added because the machine may be busy. Where samples are judged together (`RewardsLoaded.in_turn` is False),
they are added because an async function's process enforces the deadline itself."""
EXIT_S = 5.0
"""Longest wait for a killed process to end; this takes milliseconds unless the machine is overloaded."""


@dataclass(frozen=True)
class ProcessOutcome:
    """Outcome of one message to a reward process: samples without an answer, and why the process was lost, if it
    was."""

    unanswered: tuple[int, ...] = ()
    """Indices of samples that the process handed back, or had not answered when it hung or died."""
    error: str | None = None
    """Why the process was lost; None if it is alive."""
    culprit: int | None = None
    """Index of the sample that caused the loss of the process; None if unknown."""


class _Pipes(asyncio.SubprocessProtocol):
    """Collects the messages of a process and notes its end."""

    def __init__(self) -> None:
        self.buffer, self.messages = bytearray(), deque[wire.Ready | wire.RewardRefused | wire.Answers]()
        self.is_junk = False
        """Whether the process sent bytes that are not a message; everything after them is ignored."""
        self.news, self.over, self.exited = asyncio.Event(), asyncio.Event(), asyncio.Event()

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        if not self.is_junk:
            self.buffer += data
            try:
                self.messages.extend(wire.take_from_process(self.buffer))
            except wire.Junk:
                self.is_junk = True
        self.news.set()

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:
        if fd == 1:
            self.over.set()
            self.news.set()

    def process_exited(self) -> None:
        self.exited.set()

    async def receive(self, until_s: float) -> bool:
        """Waits for a message, junk or the end of the pipe; returns False if the deadline passes first."""
        while not self._has_news():
            self.news.clear()
            try:
                async with asyncio.timeout(max(until_s - time.monotonic(), 0.0)):
                    await self.news.wait()
            except TimeoutError:
                return self._has_news()
        return True

    def _has_news(self) -> bool:
        return bool(self.messages) or self.is_junk or self.over.is_set()


class RewardProcess:
    """A running reward process; create it with `start`. Once `judge` reports an error, the process is dead and reaped,
    and must not be used again."""

    def __init__(self, transport: asyncio.SubprocessTransport, pipes: _Pipes, progress: wire.Progress, lifeline: int):
        self._transport, self._pipes, self._progress = transport, pipes, progress
        self._lifeline: int | None = lifeline
        self.rewards: dict[str, wire.RewardsLoaded] = {}
        self.timeout_s = 0.0

    @classmethod
    async def start(cls, setup: wire.Setup, log: RewardLog, within_s: float) -> Self:
        """Starts a process that loads its rewards within `within_s`; raises `UserError` if one cannot be loaded."""
        with ExitStack() as stack:
            cell = stack.enter_context(_new_cell())
            until, lifeline = os.pipe()
            stack.callback(os.close, until)
            stack.push(lambda kind, *_: os.close(lifeline) if kind else None)
            transport, pipes = await asyncio.get_running_loop().subprocess_exec(
                _Pipes,
                *(sys.executable, "-I", "-S", guard.__file__, str(until), str(os.getpid())),
                *(sys.executable, "-P", "-u", "-X", "faulthandler", "-m", "offbeat.rewards.child", str(cell.fileno())),
                stderr=log.fileno(),
                env=_environment(),
                pass_fds=(cell.fileno(), until),
                start_new_session=True,  # so Ctrl-C in the terminal reaches only us
            )
            process = cls(transport, pipes, wire.Progress(cell.fileno()), lifeline)
        try:
            await process._load(setup, within_s)
        except BaseException:
            await process.kill()
            raise
        return process

    async def _load(self, setup: wire.Setup, within_s: float) -> None:
        self._send(setup)
        if not await self._pipes.receive(time.monotonic() + within_s):
            raise DeadlineError(
                f"a reward process did not load its rewards ({', '.join(setup.names)}) within {within_s:.0f} s"
            )
        if not self._pipes.messages:
            raise OffbeatError(f"a reward process ended while loading {', '.join(setup.names)}: {await self._end()}")
        reply = self._pipes.messages.popleft()
        if isinstance(reply, wire.RewardRefused):
            raise UserError(reply.message)
        self.rewards, self.timeout_s = cast(wire.Ready, reply).rewards, setup.timeout_s

    async def judge(
        self, reward: str, samples: Sequence[dict[str, Any]], on_answer: Callable[[wire.RewardAnswer], None]
    ) -> ProcessOutcome:
        """Has the process judge `samples` with `reward`; calls `on_answer` with each answer as it arrives. Returns
        which samples have no answer, and why the process was lost, if it was."""
        unanswered = set(range(len(samples)))
        before, sent_s = self._progress.read(), time.monotonic()
        in_turn = self.rewards[reward].in_turn
        self._send(wire.Work(reward, list(samples)))
        while True:
            seen = self._progress.read()
            deadline_s = self._deadline_s(before, seen, sent_s, in_turn)
            # Checks again after timeout_s at the latest: by then the process has begun another sample, or hangs in one.
            in_time = await self._pipes.receive(min(deadline_s, time.monotonic() + self.timeout_s))
            if in_time and self._pipes.messages:
                if self._take_answers(unanswered, on_answer):
                    return ProcessOutcome(tuple(sorted(unanswered)))
            elif in_time or (time.monotonic() >= deadline_s and self._progress.read() == seen):
                break
        error = f"crash: {await self._end()}" if in_time else wire.timeout_error(self.timeout_s)
        at = self._progress.read() if in_time else seen  # after a deadline it may have moved on to another sample
        await self.kill()
        self._take_answers(unanswered, on_answer)  # answers sent before the end still count
        in_turn = in_turn and not self._pipes.is_junk  # junk may lie in the pipe since an earlier sample
        return ProcessOutcome(
            tuple(sorted(unanswered)), error, _culprit(unanswered, at.num_begun - before.num_begun, in_turn)
        )

    def _take_answers(self, unanswered: set[int], on_answer: Callable[[wire.RewardAnswer], None]) -> bool:
        """Passes the received answers to `on_answer` and removes their samples from `unanswered`; returns whether the
        process is free again."""
        last = False
        while self._pipes.messages:
            message = self._pipes.messages.popleft()
            if not isinstance(message, wire.Answers) or not unanswered.issuperset(a.index for a in message.answers):
                self._pipes.is_junk = True
                self._pipes.messages.clear()
                return False
            last = message.last
            for answer in message.answers:
                unanswered.remove(answer.index)
                on_answer(answer)
        return last

    def _deadline_s(self, before: wire.Moment, seen: wire.Moment, sent_s: float, in_turn: bool) -> float:
        if seen.num_begun == before.num_begun:
            return sent_s + self.timeout_s + GRACE_S
        return seen.begun_s + self.timeout_s + (0.0 if in_turn else GRACE_S)

    async def kill(self) -> None:
        """Kills the process and everything it started, and reaps it."""
        if self._lifeline is not None:
            os.close(self._lifeline)
            self._lifeline = None
        with suppress(TimeoutError):  # not even SIGKILL ended it in time: go on
            async with asyncio.timeout(EXIT_S):
                await self._pipes.exited.wait()
                await self._pipes.over.wait()  # until then, answers already written may still arrive
        self._transport.close()  # kills the guard if it is still alive
        self._progress.close()

    async def _end(self) -> str:
        """Describes how the process ended; call it once the pipe is closed or holds junk."""
        if self._pipes.is_junk:
            return "the reward wrote into the pipe of the reward process"
        try:
            async with asyncio.timeout(EXIT_S):
                await self._pipes.exited.wait()
        except TimeoutError:
            return "the reward process closed its pipe"
        status = self._transport.get_returncode()
        assert status is not None
        if status == wire.HARMED:
            return "the reward closed or replaced a descriptor of the reward process"
        if status < 0:
            return f"the reward process was killed by {signal.Signals(-status).name}"
        return f"the reward process ended with status {status}"

    def _send(self, message: wire.Setup | wire.Work) -> None:
        pipe = cast(asyncio.WriteTransport, self._transport.get_pipe_transport(0))
        pipe.write(wire.frame(message))


def _culprit(unanswered: set[int], num_begun: int, in_turn: bool) -> int | None:
    """Returns the index of the sample to blame for a lost process; None if unknown. If samples ran one after another
    (`in_turn`), it is the last one begun, otherwise the only unanswered one."""
    if in_turn:
        return num_begun - 1 if num_begun - 1 in unanswered else None
    return next(iter(unanswered)) if num_begun and len(unanswered) == 1 else None


def _new_cell() -> IO[bytes]:
    """Creates the file that `wire.Progress` maps. It is in memory if possible, because on a full disk a write to a
    mapped file kills the process."""
    if hasattr(os, "memfd_create"):
        cell: IO[bytes] = os.fdopen(os.memfd_create("offbeat"), "w+b", 0)
    else:
        cell = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 - `start` closes it
    cell.write(bytes(wire.Progress.SIZE))
    return cell


def _environment() -> dict[str, str]:
    """Returns the environment of a reward process: the pool's, with its import path added. The default is one OpenMP
    thread, to leave the cores to training."""
    path = os.pathsep.join(entry for entry in sys.path if entry)
    return {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": path}
