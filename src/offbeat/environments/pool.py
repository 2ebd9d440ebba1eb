"""The processes that hold a worker's environments: each runs many episodes, and is killed when one of them hangs.

Guarantees:

- Every wait has a deadline. An environment that does not answer within it fails its own episode. Its process takes no
  further episode and is killed as soon as it holds no other one, or at once if the others can be replayed.
- When a process dies, its episodes are lost (`EnvironmentLost`). If several of them were in a step, nobody knows which
  one is to blame, so each is marked as a suspect: begun again in a process of its own, the guilty one fails alone.
- `close` leaves no process behind, and neither does a pool that is itself killed (see `offbeat.rewards.guard`).
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Self, cast

from offbeat.environments import wire
from offbeat.environments.protocol import Turn
from offbeat.errors import DeadlineError, OffbeatError, UserError
from offbeat.rewards import guard
from offbeat.rewards.process import EXIT_S, RewardLog
from offbeat.rewards.wire import Junk

START_S = 120.0
"""Time limit for the start of a process; a user's module may import a lot."""
PONG_WITHIN_S = 0.5
"""Time limit for the answer to a ping. A process that misses it hangs as a whole, in code that never lets go."""
CUT_GRACE_S = 1.0
"""Seconds that are added to the time limit of a turn with calls, because the process itself gives up slow tools."""
MAX_EPISODES = 2000
"""Number of episodes after which a process is replaced, in case that they leave something behind."""


class EnvironmentFailed(OffbeatError):
    """An environment raised, returned something unusable, or did not answer in time: the attempt at its task fails."""


class EnvironmentLost(OffbeatError):
    """An environment was lost with its process. It can be begun again; if `is_suspect`, in a process of its own,
    because it may have been what ended the process."""

    def __init__(self, message: str, *, is_suspect: bool):
        super().__init__(message)
        self.is_suspect = is_suspect


class _Pipes(asyncio.SubprocessProtocol):
    """Passes the messages of a process on, and notes its end."""

    def __init__(self) -> None:
        self.buffer = bytearray()
        self.process: EnvironmentProcess | None = None
        self.exited = asyncio.Event()

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        self.buffer += data
        assert self.process is not None
        try:
            for message in wire.take_from_process(self.buffer):
                self.process.received(message)
        except Junk:
            self.buffer.clear()
            self.process.ended("an environment wrote into the pipe of its process")

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:
        if fd == 1 and self.process is not None:
            self.process.ended("")

    def process_exited(self) -> None:
        self.exited.set()


class EnvironmentProcess:
    """A running process with environments; create it with `start`."""

    def __init__(self, transport: asyncio.SubprocessTransport, pipes: _Pipes, lifeline: int):
        self._transport, self._pipes, self._lifeline = transport, pipes, lifeline
        pipes.process = self
        loop = asyncio.get_running_loop()
        self._loaded: asyncio.Future[wire.Loaded | wire.RefusedLoad] = loop.create_future()
        self._pong: asyncio.Future[None] | None = None
        self.parts: dict[str, wire.PartInfo] = {}
        self.sessions: dict[int, EnvironmentSession] = {}
        self.num_begun = self.num_stuck = 0
        self.is_condemned = self.is_over = False
        """Whether the process takes no further episodes; whether it has ended or is being killed."""

    @classmethod
    async def start(cls, setup: wire.Load, log: RewardLog) -> Self:
        """Starts a process and loads all parts; raises `UserError` if one cannot be loaded."""
        with ExitStack() as stack:
            until, lifeline = os.pipe()
            stack.callback(os.close, until)
            stack.push(lambda kind, *_: os.close(lifeline) if kind else None)
            path = os.pathsep.join(entry for entry in sys.path if entry)
            transport, pipes = await asyncio.get_running_loop().subprocess_exec(
                _Pipes,
                *(sys.executable, "-I", "-S", guard.__file__, str(until), str(os.getpid())),
                *(sys.executable, "-P", "-u", "-X", "faulthandler", "-m", "offbeat.environments.child"),
                stderr=log.fileno(),
                # One arena and one thread of numpy: otherwise each thread of an environment reserves its own memory.
                env={"OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2", **os.environ, "PYTHONPATH": path},
                pass_fds=(until,),
                start_new_session=True,
            )
            process = cls(transport, pipes, lifeline)
        try:
            process.send(setup)
            async with asyncio.timeout(START_S):
                found = await process._loaded
        except TimeoutError:
            await process.kill()
            raise DeadlineError(f"environments did not load within {START_S:.0f} s; see {log.path}") from None
        except BaseException:
            await process.kill()
            raise
        if isinstance(found, wire.RefusedLoad):
            await process.kill()
            raise UserError(found.message)
        process.parts = found.parts
        return process

    def send(self, message: wire.ToProcess) -> None:
        pipe = cast("asyncio.WriteTransport | None", self._transport.get_pipe_transport(0))
        if pipe is not None and not pipe.is_closing():
            pipe.write(wire.frame(message))

    def received(self, message: wire.FromProcess) -> None:
        if isinstance(message, wire.Loaded | wire.RefusedLoad):
            if not self._loaded.done():
                self._loaded.set_result(message)
        elif isinstance(message, wire.Pong):
            if self._pong is not None and not self._pong.done():
                self._pong.set_result(None)
        elif (session := self.sessions.get(message.episode)) is not None:
            if isinstance(message, wire.Stepped):
                self.num_stuck = message.num_stuck
            session.answered(message)

    def ended(self, why: str) -> None:
        """Notes that the process has ended or must end; its episodes are lost."""
        if not self._loaded.done():
            self._loaded.set_exception(OffbeatError(why or "a process with environments ended while it loaded them"))
        if self.is_over:
            return
        self.is_over = self.is_condemned = True
        busy = [session for session in self.sessions.values() if session.is_busy]
        for session in list(self.sessions.values()):
            session.lost(
                why or "the process of the environment ended", is_suspect=session.is_busy, is_alone=len(busy) == 1
            )
        self.sessions.clear()
        self._release()

    async def is_responsive(self) -> bool:
        if self._pong is None or self._pong.done():
            self._pong = asyncio.get_running_loop().create_future()
            self.send(wire.Ping())
        try:
            await asyncio.wait_for(asyncio.shield(self._pong), PONG_WITHIN_S)
        except TimeoutError:
            return False
        return True

    def _release(self) -> None:
        """Lets the guard kill the process and everything it started."""
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1

    async def kill(self) -> None:
        self.ended("the process of the environment was ended")
        with suppress(TimeoutError):
            async with asyncio.timeout(EXIT_S):
                await self._pipes.exited.wait()
        self._transport.close()


class EnvironmentSession:
    """The environment of one episode, as its worker sees it. One call at a time; a call that is no longer waited for
    goes on, and the next `step` with the same turn gets its answer."""

    def __init__(self, pool: EnvironmentPool, process: EnvironmentProcess, number: int, part: str):
        self._pool, self._process, self.number, self.part = pool, process, number, part
        self._answer: asyncio.Future[wire.Began | wire.Stepped] | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._error: OffbeatError | None = None
        self._turn: Turn | None = None

    @property
    def info(self) -> wire.PartInfo:
        return self._process.parts[self.part]

    @property
    def is_busy(self) -> bool:
        return self._answer is not None and not self._answer.done()

    def begin(self, problem: Mapping[str, Any], seed: int) -> asyncio.Future[Any]:
        """Begins the episode; the result is a `wire.Began`."""
        return self._ask(wire.Begin(self.number, self.part, dict(problem), seed), self._pool.step_timeout_s)

    def step(self, turn: Turn) -> asyncio.Future[Any]:
        """Hands a turn over; the result is a `wire.Stepped`."""
        if self._turn is not None and self._turn == turn and self._answer is not None:
            return self._answer
        self._turn = turn
        limit_s = self._pool.step_timeout_s
        if turn.calls:
            limit_s = limit_s * min(len(turn.calls), self._pool.parallel_calls) + CUT_GRACE_S
        return self._ask(wire.Step(self.number, turn), limit_s)

    def _ask(self, message: wire.Begin | wire.Step, limit_s: float) -> asyncio.Future[Any]:
        loop = asyncio.get_running_loop()
        self._answer = loop.create_future()
        self._answer.add_done_callback(_seen)
        if self._error is not None:
            self._answer.set_exception(self._error)
            return self._answer
        self._process.send(message)
        self._deadline = loop.call_later(limit_s, self._overdue, limit_s)
        return self._answer

    def answered(self, message: wire.FromProcess) -> None:
        self._stop_clock()
        if self._answer is None or self._answer.done():
            return
        if isinstance(message, wire.Failed):
            self._fail(EnvironmentFailed(message.error))
            self._pool.ended(self)
        elif isinstance(message, wire.Began | wire.Stepped):
            self._answer.set_result(message)

    def lost(self, why: str, *, is_suspect: bool, is_alone: bool) -> None:
        """Notes that the process has ended. An episode that was the only one in a step is what ended it."""
        if is_suspect and (is_alone or self._process.num_begun == 1):
            self._fail(EnvironmentFailed(f"it ended its process: {why}"))
        else:
            self._fail(EnvironmentLost(why, is_suspect=is_suspect))

    def close(self) -> None:
        """Ends the episode; a second call does nothing."""
        self._stop_clock()
        if self._error is None:
            if self.is_busy:  # what runs on would be nobody's, so the process goes when its other episodes have ended
                self._process.is_condemned = True
            self._process.send(wire.Close(self.number))
        self._fail(EnvironmentFailed("the episode is closed"))
        self._pool.ended(self)

    def _overdue(self, limit_s: float) -> None:
        self._deadline = None
        if self.is_busy:
            self._pool.spawn(self._give_up(limit_s))

    async def _give_up(self, limit_s: float) -> None:
        process = self._process
        if not await process.is_responsive():
            process.ended("a process with environments no longer answers")
            return
        if self.is_busy:
            self._fail(EnvironmentFailed(f"no answer within {limit_s:g} s (environment.step_timeout_s)"))
            process.is_condemned = True
            self._pool.ended(self)
            if all(session.info.deterministic for session in process.sessions.values()):
                for session in process.sessions.values():
                    session._fail(
                        EnvironmentLost("its process was ended, because another episode hung", is_suspect=False)
                    )
                process.ended("another environment in its process hung")

    def _fail(self, error: OffbeatError) -> None:
        self._error = self._error or error
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(error)

    def _stop_clock(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


def _seen(answer: asyncio.Future[Any]) -> None:
    """Marks an error as seen: after an interruption, nobody may wait for the answer."""
    if not answer.cancelled():
        answer.exception()


class EnvironmentPool:
    """Processes that hold the environments of one worker. All methods must be called in one event loop."""

    def __init__(
        self,
        parts: Mapping[str, wire.PartSpec],
        *,
        processes: int,
        step_timeout_s: float,
        parallel_calls: int,
        memory_mb: int,
        log_path: Path,
    ):
        self.num_processes, self.step_timeout_s, self.parallel_calls = processes, step_timeout_s, parallel_calls
        self._setup = wire.Load(dict(parts), step_timeout_s, parallel_calls, memory_mb * 2**20)
        self._log = RewardLog(log_path)
        self._processes: list[EnvironmentProcess] = []
        self._background: set[asyncio.Task[None]] = set()
        self._starting = asyncio.Lock()
        self._num_episodes = 0
        self.info: dict[str, wire.PartInfo] = {}

    async def start(self) -> dict[str, wire.PartInfo]:
        """Starts a first process; returns what it found out about each part, or raises `UserError`."""
        if not self._processes:
            self._processes.append(await EnvironmentProcess.start(self._setup, self._log))
            self.info = self._processes[0].parts
        return self.info

    async def open(self, part: str, *, alone: bool = False) -> EnvironmentSession:
        """Returns a new episode's environment, not begun yet; `alone`: in a process of its own."""
        if alone or self.info[part].isolated:
            process = await EnvironmentProcess.start(self._setup, self._log)
            process.is_condemned = True
            self._processes.append(process)
        else:
            process = await self._free()
        self._num_episodes += 1
        session = EnvironmentSession(self, process, self._num_episodes, part)
        process.sessions[session.number] = session
        process.num_begun += 1
        process.is_condemned |= process.num_begun >= MAX_EPISODES
        return session

    async def _free(self) -> EnvironmentProcess:
        """Returns the process with the fewest episodes; starts one if there are fewer than `num_processes`."""
        taking = [process for process in self._processes if not process.is_condemned]
        if len(taking) < self.num_processes and (not taking or min(len(p.sessions) for p in taking)):
            async with self._starting:
                taking = [process for process in self._processes if not process.is_condemned]
                if len(taking) < self.num_processes:
                    taking.append(await EnvironmentProcess.start(self._setup, self._log))
                    self._processes.append(taking[-1])
        return min(taking, key=lambda process: len(process.sessions))

    def ended(self, session: EnvironmentSession) -> None:
        """Forgets an episode; a process that takes no more of them and has none left is killed."""
        process = session._process
        process.sessions.pop(session.number, None)
        process.is_condemned |= process.num_stuck > 0
        if process.is_condemned and not process.sessions and process in self._processes:
            self._processes.remove(process)
            self.spawn(process.kill())

    def spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def close(self) -> None:
        processes, self._processes = self._processes, []
        await asyncio.gather(*(process.kill() for process in processes))
        if self._background:
            await asyncio.wait(list(self._background), timeout=EXIT_S)
        self._log.close()
