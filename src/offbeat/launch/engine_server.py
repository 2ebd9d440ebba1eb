"""The process of an engine's server: started on this machine, watched, and ended with its worker.

It listens where no other user can call it or pass for it (`engine_doors`). What it prints is appended to a log. A guard
(`engine_guard`) ends it and all that it started when this process ends, however that ends.
"""

from __future__ import annotations

import asyncio
import re
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from offbeat.launch import engine_guard
from offbeat.launch.engine_doors import Door
from offbeat.launch.engine_guard import GRACE_S, VANISH_WITHIN_S, kill_group
from offbeat.rollout.engine import EngineError
from offbeat.rollout.engines.served.http import Server, ServerAway, ServerRefused

HEALTH = "/health"
LOOK_EVERY_S = 0.5
LOOK_WITHIN_S = 5.0
KILLED = -9
FAILED = 1
MAX_READ_BYTES = 2**18
"""Of a log, from its end: more than any traceback."""
MAX_TOLD = 300
PREFIX = re.compile(r"^(\([^)]* pid=\d+\) *|[A-Z]+ [0-9-]+ [0-9:.]+ +|\[[^]]*\] *)+")
"""What loggers put before a line: process, level, time, place."""
TELLING = re.compile(r"(^|\s)([\w.]*(Error|Exception|Interrupt|Exit)\b|error): *\S|out of memory", re.IGNORECASE)
SAYS_NOTHING = re.compile(r"see (root cause|stack trace)|initialization failed|died unexpectedly", re.IGNORECASE)


class ServerEnded(EngineError):
    """The process of a server has ended, or was ended because it did not answer."""

    def __init__(self, message: str, status: int):
        super().__init__(message)
        self.status = status
        """As of a process: negative where a signal killed it; never 0, because nobody asked it to end."""


class EngineServer:
    """One server after the other, at most one at a time; `stop` in the end."""

    def __init__(
        self,
        name: str,
        command: Callable[[Sequence[str]], Sequence[str]],
        environment: Mapping[str, str],
        *,
        door: Callable[[], Door],
        log: Path,
        lock: Path,
        start_within_s: float,
    ):
        """`name` is what errors call it. Each start has a `door` of its own; `command` is given the words for it."""
        self.name, self.log, self.start_within_s = name, log, start_within_s
        self._command, self._environment, self._lock = command, dict(environment), lock
        self._new_door = door
        self._door: Door | None = None
        self._guard: asyncio.subprocess.Process | None = None
        self._ended: asyncio.Future[int] | None = None
        self._group = 0
        self._log_start = 0

    async def start(self) -> None:
        """Returns once it answers; raises `ServerEnded` where it ends before, or does not answer in time."""
        assert self._guard is None, "stop it first"
        door = self._door = self._new_door()
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self._log_start = log.tell()
            self._guard = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", engine_guard.__file__, str(self._lock), door.folder),
                *self._command(door.words),
                env={**self._environment, **door.environment},
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                start_new_session=True,  # a Ctrl-C in the terminal is for the worker
            )
        self._ended = asyncio.ensure_future(self._watch(self._guard))
        server, deadline_s = Server(door.url, api_key=door.key), time.monotonic() + self.start_within_s
        try:
            while not await self._answers(server, door):
                if time.monotonic() > deadline_s:
                    await self.stop()
                    why = f"no answer within engine.start_within_s = {self.start_within_s:g} s"
                    raise ServerEnded(f"{self.name}: {why}: {self._last_words()}", FAILED)
        finally:
            await server.close()

    async def _answers(self, server: Server, door: Door) -> bool:
        assert self._ended is not None
        with suppress(ServerAway, ServerRefused):
            await server.text(HEALTH, within_s=LOOK_WITHIN_S)
            is_ours = await door.is_ours(server)
            if not self._ended.done():
                if is_ours:
                    return True
                await self.stop()
                raise ServerEnded(f"{self.name}: ended, because another process answers at {door.url}", KILLED)
        await asyncio.wait({self._ended}, timeout=LOOK_EVERY_S)
        if self._ended.done():
            raise await self.ended()
        return False

    @property
    def url(self) -> str:
        """Where the latest start listens; "": there was none."""
        return "" if self._door is None else self._door.url

    @property
    def key(self) -> str | None:
        """What it asks for; None: nothing."""
        return None if self._door is None else self._door.key

    @property
    def status(self) -> int | None:
        """How its process ended; None while it runs."""
        return self._ended.result() if self._ended is not None and self._ended.done() else None

    async def ended(self) -> ServerEnded:
        """Waits for the process to end, and tells how it did."""
        assert self._ended is not None
        status = await asyncio.shield(self._ended)
        how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
        return ServerEnded(f"{self.name}: its process {how}: {self._last_words()}", status or FAILED)

    async def stop(self) -> None:
        """Returns once the server and all that it started are gone, asked first and then killed."""
        guard, self._guard = self._guard, None
        if guard is None:
            return
        assert guard.stdin is not None
        assert self._ended is not None
        guard.stdin.close()
        await asyncio.wait({self._ended}, timeout=GRACE_S + 2 * VANISH_WITHIN_S)
        if not self._ended.done():
            with suppress(ProcessLookupError):
                guard.kill()
            await asyncio.wait({self._ended})
        if self._door is not None and self._door.folder:  # where the guard could not see to it
            shutil.rmtree(self._door.folder, ignore_errors=True)

    async def _watch(self, guard: asyncio.subprocess.Process) -> int:
        """How the server ended, as the guard tells; where that was killed itself, nobody is left but us."""
        assert guard.stdout is not None
        self._group = int(await guard.stdout.readline() or 0)
        told = await guard.stdout.readline()
        await guard.wait()
        if not told and self._group:
            kill_group(self._group)
        return int(told or KILLED)

    def _last_words(self) -> str:
        return f"{telling_line(self._printed())} (see {self.log})"

    def _printed(self) -> str:
        """What it printed since it was started, or the end of that."""
        with self.log.open("rb") as log:
            size = log.seek(0, 2)
            log.seek(max(self._log_start, size - MAX_READ_BYTES))
            return log.read().decode(errors="replace")


def telling_line(text: str) -> str:
    """The last line that says what went wrong; where none does, the last one."""
    lines = [PREFIX.sub("", line).strip() for line in text.splitlines()]
    lines = [line for line in lines if line]
    errors = [line for line in lines if TELLING.search(line)]
    chosen = [line for line in errors if not SAYS_NOTHING.search(line)] or errors or lines or ["it said nothing"]
    return chosen[-1] if len(chosen[-1]) <= MAX_TOLD else f"{chosen[-1][:MAX_TOLD]}…"
