"""Python for the model: one interpreter per episode in a sandbox, `tools = ["python"]`.

The sandbox is bubblewrap with every namespace of its own: no network, no files but the system's and this Python's, to
read, an own /tmp of limited size, no environment variables, no other processes. As root the interpreter gives up its
rights and runs as a user of its own; limits of processes bind nobody who is root. Memory, processes, files and time are
limited, and so is what a run may print. When the sandbox ends, the kernel ends all processes in it.

The interpreter keeps its variables from one call to the next. If a run ends it or takes too long, the next call begins
with a new one, and the model is told.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from offbeat.environments import sandboxed_python
from offbeat.errors import UserError

MAX_OUTPUT_CHARS = 1 << 14
"""Characters of what a run prints that are kept, half from its beginning and half from its end."""
NOBODY = 65534
FIRST_USER = 200_000
"""First of the user ids that sandboxes get when they are started as root: each its own, so that each has its own limit
of processes."""
NUM_USERS = 60_000
MAX_PROCESSES = 32
TMP_BYTES = 16 << 20
WATCH_EVERY_S = 0.1
START_WITHIN_S = 20.0
INSTALL = "on Debian: apt install bubblewrap"
_users = itertools.count(os.getpid() * 64)


class SandboxMissing(UserError):
    """This machine cannot run sandboxes; the message is one line with the remedy."""


class SandboxDied(Exception):
    """The interpreter of a sandbox has ended, or must be ended; the message says why."""


def check_sandbox() -> None:
    """Raises `SandboxMissing` unless a sandbox can be started here."""
    if shutil.which("bwrap") is None:
        raise SandboxMissing(f'tools = ["python"]: there is no bwrap to make a sandbox with; {INSTALL}')
    try:
        tried = subprocess.run(
            [*_sandbox(TMP_BYTES), "/bin/true"], capture_output=True, text=True, timeout=START_WITHIN_S
        )
    except subprocess.TimeoutExpired:
        raise SandboxMissing(f'tools = ["python"]: bwrap has started nothing within {START_WITHIN_S:.0f} s') from None
    if tried.returncode:
        why = " ".join(tried.stderr.split())[:200]
        raise SandboxMissing(
            f'tools = ["python"]: bwrap cannot make a sandbox here ({why}); allow user namespaces, or give the '
            "container the right SYS_ADMIN"
        )


class PythonSandbox:
    """An interpreter in a sandbox, started at its first call. One call runs at a time."""

    sequential = True

    def __init__(self, timeout_s: float = 20.0, memory_mb: int = 512, tmp_bytes: int = TMP_BYTES):
        self.timeout_s, self.memory_mb, self.tmp_bytes = timeout_s, memory_mb, tmp_bytes
        self._process: asyncio.subprocess.Process | None = None
        self._output: _Output | None = None
        self._turn = asyncio.Lock()

    async def python(self, code: str) -> str:
        """Runs Python code and returns what it prints, and the value of its last line. Variables, imports and files in
        /tmp are kept until the end of the conversation. There is no network.

        Args:
            code: The code to run.
        """
        async with self._turn:
            try:
                if self._process is None:
                    await self._start()
                return await self._run(code)
            except SandboxDied as died:
                printed = await self._end()
                return f"{printed}error: {died}; the next call begins with a new interpreter"
            except asyncio.CancelledError:
                await self._end()
                raise

    async def close(self) -> None:
        await self._end()

    async def _end(self) -> str:
        """Ends the interpreter and everything that it has started; returns what it had printed."""
        process, output = self._process, self._output
        self._process = self._output = None
        if process is None or output is None:
            return ""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(START_WITHIN_S):
                await process.wait()
        return output.take()

    async def _start(self) -> None:
        check = shutil.which("bwrap")
        if check is None:
            raise SandboxMissing(f'tools = ["python"]: there is no bwrap to make a sandbox with; {INSTALL}')
        answers, answer_end = os.pipe()
        printed, print_end = os.pipe()
        try:
            self._process = await asyncio.create_subprocess_exec(
                *_sandbox(self.tmp_bytes),
                *(sys.executable, "-I", "-u", "/interpreter.py", str(answer_end)),
                *(str(self.memory_mb), str(self.tmp_bytes), str(MAX_PROCESSES), str(MAX_OUTPUT_CHARS)),
                stdin=asyncio.subprocess.PIPE,
                stdout=print_end,
                stderr=print_end,
                pass_fds=(answer_end,),
                start_new_session=True,
            )
        finally:
            os.close(answer_end)
            os.close(print_end)
        self._output = _Output(printed, answers)
        async with asyncio.timeout(START_WITHIN_S):
            ready = await self._output.answer()
        if ready != {"ready": True}:
            raise SandboxDied(f"the sandbox did not start: {self._output.take().strip()[:200]}")

    async def _run(self, code: str) -> str:
        process, output = self._process, self._output
        assert process is not None
        assert process.stdin is not None
        assert output is not None
        with contextlib.suppress(ConnectionError):  # it has ended: no answer says so
            process.stdin.write((json.dumps(code) + "\n").encode())
            await process.stdin.drain()
        watch = asyncio.ensure_future(self._watch(process.pid))
        waiting = asyncio.ensure_future(output.answer())
        try:
            done, _ = await asyncio.wait({watch, waiting}, timeout=self.timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            watch.cancel()
            waiting.cancel()
        if waiting not in done:
            if watch in done:
                raise SandboxDied(f"it used more than {self.memory_mb} MiB of memory")
            raise SandboxDied(f"no end within {self.timeout_s:g} s")
        answer = waiting.result()
        if not isinstance(answer, dict) or not isinstance(answer.get("result"), str):
            raise SandboxDied("the code has ended the interpreter")
        return output.take() + answer["result"][:MAX_OUTPUT_CHARS]

    async def _watch(self, pid: int) -> None:
        """Returns when all processes of the sandbox together use more memory than is allowed."""
        while True:
            await asyncio.sleep(WATCH_EVERY_S)
            if _resident_bytes(pid) > self.memory_mb << 20:
                return


class _Output:
    """Output of a sandbox, cut to a limit while it arrives, and its answers."""

    def __init__(self, printed: int, answers: int):
        self._printed, self._answers = printed, answers
        self._head, self._tail, self._num_left_out = bytearray(), bytearray(), 0
        self._line, self._lines = bytearray(), list[bytes]()
        self._news = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        for descriptor in (printed, answers):
            os.set_blocking(descriptor, False)
            self._loop.add_reader(descriptor, self._read, descriptor)
        self._open = {printed, answers}

    async def answer(self) -> Any:
        """Waits for an answer and returns it; None if the sandbox has ended or has written something else."""
        while not self._lines and self._answers in self._open:
            self._news.clear()
            await self._news.wait()
        if not self._lines:
            return None
        try:
            return json.loads(self._lines.pop(0))
        except (ValueError, RecursionError):
            return None

    def take(self) -> str:
        """Returns what was printed since the last time. What was printed before an answer has been read with it."""
        self._read(self._printed)
        note = f"\n[{self._num_left_out} characters left out]\n".encode() if self._num_left_out else b""
        text = (bytes(self._head) + note + bytes(self._tail)).decode(errors="replace")
        self._head, self._tail, self._num_left_out = bytearray(), bytearray(), 0
        return text

    def _read(self, descriptor: int) -> None:
        while descriptor in self._open:
            try:
                data = os.read(descriptor, 1 << 16)
            except BlockingIOError:
                return
            if not data:
                self._loop.remove_reader(descriptor)
                os.close(descriptor)
                self._open.discard(descriptor)
                self._news.set()
                return
            if descriptor == self._printed:
                self._keep(data)
                if len(data) < 1 << 16:
                    return
            else:
                self._line += data
                if len(self._line) > 1 << 20:
                    self._line = bytearray(b"junk\n")
                *whole, rest = self._line.split(b"\n")
                self._lines += [bytes(line) for line in whole][:2]
                self._line = rest
                self._news.set()
                return

    def _keep(self, data: bytes) -> None:
        half = MAX_OUTPUT_CHARS // 2
        room = half - len(self._head)
        self._head += data[:room]
        self._tail += data[max(room, 0) :]
        if len(self._tail) > half:
            self._num_left_out += len(self._tail) - half
            del self._tail[:-half]


def _sandbox(tmp_bytes: int) -> list[str]:
    """Returns the beginning of a command that runs the rest of it in a sandbox."""
    is_root = os.geteuid() == 0  # it needs no user namespace, in which there would be no user to become
    own = ("--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try")
    unshared = own if is_root else ("--unshare-all",)
    # An own /tmp first: this Python may lie in the real one.
    places = ["--perms", "1777", "--size", str(tmp_bytes), "--tmpfs", "/tmp"]
    shown = {"/usr", "/lib", "/lib64", "/bin", "/sbin", sys.prefix, sys.base_prefix, sys.exec_prefix}
    for place in sorted(shown):
        if not Path(place).is_dir():
            continue
        target = os.readlink(place) if os.path.islink(place) else ""
        for parent in reversed(Path(place).parents[:-1]):  # by itself bwrap makes them for root alone
            if str(parent) == "/tmp":
                continue
            places += ["--perms", "0755", "--dir", str(parent)]
        places += ["--symlink", target, place] if target else ["--ro-bind", place, place]
    places += ["--perms", "0755", "--dir", "/etc"]
    for place in ("/etc/ld.so.cache", "/etc/alternatives", "/etc/localtime"):
        places += ["--ro-bind-try", place, place]
    command = [
        *("bwrap", *unshared, "--die-with-parent", "--new-session", "--clearenv", *places),
        *("--proc", "/proc", "--dev", "/dev"),
        *("--remount-ro", "/dev", "--chdir", "/tmp", "--hostname", "sandbox"),
        *("--ro-bind", sandboxed_python.__file__, "/interpreter.py"),
        *("--setenv", "HOME", "/tmp", "--setenv", "PATH", "/usr/bin:/bin", "--setenv", "LANG", "C.UTF-8"),
        *("--setenv", "OMP_NUM_THREADS", "1", "--setenv", "OPENBLAS_NUM_THREADS", "1"),
    ]
    if is_root:
        user = str(FIRST_USER + next(_users) % NUM_USERS)
        drop = ("setpriv", "--reuid", user, "--regid", str(NOBODY), "--clear-groups", "--no-new-privs")
        command += [*drop, "--bounding-set=-all", "--inh-caps=-all"]
    return command


def _resident_bytes(pid: int) -> int:
    """Returns the memory of a process and of all that it has started, without what they share with one another."""
    parents: dict[int, int] = {}
    for name in os.listdir("/proc"):
        if name.isdecimal():
            with contextlib.suppress(OSError, ValueError, IndexError), open(f"/proc/{name}/stat", "rb") as file:
                parents[int(name)] = int(file.read().rpartition(b")")[2].split()[1])
    found, new = {pid}, {pid}
    while new := {child for child, parent in parents.items() if parent in new} - found:
        found |= new
    total = 0
    for one in found:
        with contextlib.suppress(OSError, ValueError, IndexError), open(f"/proc/{one}/statm", "rb") as file:
            _, resident, shared, *_ = map(int, file.read().split())
            total += (resident - shared) * resource.getpagesize()
    return total
