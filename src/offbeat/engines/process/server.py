"""Starts and stops the process of an engine's server on this machine.

Other users of the machine cannot call the server (`endpoints`). When the worker ends, `guard` ends the server.
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

from offbeat.engines.http_calls import ServerAway, ServerRefused
from offbeat.engines.process import guard
from offbeat.engines.process.endpoints import Endpoint
from offbeat.engines.protocol import EngineError

CHECK_EVERY_S = 0.5
KILLED = -9
FAILED = 1
MAX_READ_BYTES = 2**18
"""Bytes read from the end of a log to find an error; longer than any traceback."""
MAX_QUOTED = 300
PREFIX = re.compile(r"^(\([^)]* pid=\d+\) *|[A-Z]+ [0-9-]+ [0-9:.]+ +|\[[^]]*\] *)+")
"""Matches the process, level, time and module that loggers put at the start of a line."""
ERROR = re.compile(r"(^|\s)([\w.]*(Error|Exception|Interrupt|Exit)\b|error): *\S|out of memory", re.IGNORECASE)
UNINFORMATIVE = re.compile(r"see (root cause|stack trace)|initialization failed|died unexpectedly", re.IGNORECASE)


class ServerEnded(EngineError):
    """A server's process has ended by itself, or was ended because it did not answer properly."""

    def __init__(self, message: str, status: int):
        super().__init__(message)
        self.status = status
        """Exit status, or the negative number of the signal that killed the process. Never 0, because a server that
        ends without being asked has failed."""


class EngineServer:
    """An engine's server, one process at a time. It can be started again after `stop`. Call `stop` when done."""

    def __init__(
        self,
        name: str,
        command: Callable[[Sequence[str]], Sequence[str]],
        environment: Mapping[str, str],
        *,
        new_endpoint: Callable[[], Endpoint],
        log: Path,
        lock: Path,
        start_within_s: float,
    ):
        """`name` appears in errors. Each start makes a new endpoint and passes the endpoint's options to `command`,
        which returns the command line. The server starts once an earlier server is gone and that server's guard has
        released the lock on the file `lock`. The server's output is appended to `log`. A server that does not answer
        within `start_within_s` seconds is stopped."""
        self.name, self.log, self.start_within_s = name, log, start_within_s
        self._command, self._environment, self._lock = command, dict(environment), lock
        self._new_endpoint = new_endpoint
        self._endpoint: Endpoint | None = None
        self._guard: asyncio.subprocess.Process | None = None
        self._ended: asyncio.Future[int] | None = None
        self._group = 0
        self._log_start = 0

    async def start(self) -> None:
        """Starts the server and returns once it answers; raises `ServerEnded` if it ends first or takes too long."""
        assert self._guard is None, f"{self.name}: the server is already running; call stop first"
        endpoint = self._endpoint = self._new_endpoint()
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self._log_start = log.tell()
            self._guard = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", guard.__file__, str(self._lock), endpoint.folder),
                *self._command(endpoint.words),
                env={**self._environment, **endpoint.environment},
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                start_new_session=True,  # a Ctrl-C in the terminal is for the worker
            )
        self._ended = asyncio.ensure_future(self._watch(self._guard))
        deadline_s = time.monotonic() + self.start_within_s
        while not await self._answers(endpoint):
            if time.monotonic() > deadline_s:
                await self.stop()
                why = f"no answer within engine.start_within_s = {self.start_within_s:g} s"
                raise ServerEnded(f"{self.name}: {why}: {self._last_error()}", FAILED)

    async def _answers(self, endpoint: Endpoint) -> bool:
        assert self._ended is not None
        with suppress(ServerAway, ServerRefused):
            is_ours = await endpoint.answers()
            if not self._ended.done():
                if is_ours:
                    return True
                await self.stop()
                raise ServerEnded(f"{self.name}: stopped, because another process answers at {endpoint.url}", KILLED)
        await asyncio.wait({self._ended}, timeout=CHECK_EVERY_S)
        if self._ended.done():
            raise await self.ended()
        return False

    @property
    def url(self) -> str:
        """URL of the server started last; "" before the first start."""
        return "" if self._endpoint is None else self._endpoint.url

    @property
    def key(self) -> str | None:
        return None if self._endpoint is None else self._endpoint.key

    @property
    def status(self) -> int | None:
        """Exit status of the process; None while it runs."""
        return self._ended.result() if self._ended is not None and self._ended.done() else None

    async def ended(self) -> ServerEnded:
        """Waits for the process to end and returns (does not raise) an error that says why it ended."""
        assert self._ended is not None
        status = await asyncio.shield(self._ended)
        how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
        return ServerEnded(f"{self.name}: its process {how}: {self._last_error()}", status or FAILED)

    async def stop(self) -> None:
        """Ends the server with all processes that it started; returns once they are gone."""
        process, self._guard = self._guard, None
        if process is None:
            return
        assert process.stdin is not None
        assert self._ended is not None
        process.stdin.close()
        await asyncio.wait({self._ended}, timeout=guard.GRACE_S + 2 * guard.VANISH_WITHIN_S)
        if not self._ended.done():
            with suppress(ProcessLookupError):
                process.kill()
            await asyncio.wait({self._ended})
        if self._endpoint is not None and self._endpoint.folder:  # in case the guard was killed
            shutil.rmtree(self._endpoint.folder, ignore_errors=True)

    async def _watch(self, process: asyncio.subprocess.Process) -> int:
        """Waits for the server's guard (`process`) to end; returns the server's exit status. Kills the server if its
        guard was killed."""
        assert process.stdout is not None
        self._group = int(await process.stdout.readline() or 0)
        status = await process.stdout.readline()
        await process.wait()
        if not status and self._group:
            guard.kill_group(self._group)
        return int(status or KILLED)

    def _last_error(self) -> str:
        """Returns the last error in the log since the latest start, with the log's path."""
        with self.log.open("rb") as log:
            size = log.seek(0, 2)
            log.seek(max(self._log_start, size - MAX_READ_BYTES))
            return f"{error_line(log.read().decode(errors='replace'))} (see {self.log})"


def error_line(text: str) -> str:
    """Returns the last line of a log that names an error, preferably one that is not a mere hint, such as "see stack
    trace". If no line names an error, returns the last line."""
    lines = [PREFIX.sub("", line).strip() for line in text.splitlines()]
    lines = [line for line in lines if line]
    errors = [line for line in lines if ERROR.search(line)]
    chosen = [line for line in errors if not UNINFORMATIVE.search(line)] or errors or lines or ["no output"]
    return chosen[-1] if len(chosen[-1]) <= MAX_QUOTED else f"{chosen[-1][:MAX_QUOTED]}…"
