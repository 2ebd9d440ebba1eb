"""Starts a reward process; when the reward process ends, kills all processes that were started from it.

    guard LIFELINE OWNER COMMAND ...     COMMAND gets the guard's process id as its last argument

OWNER is the process id of the pool, and LIFELINE the descriptor of a pipe that the pool holds open. The guard kills all
its descendants when the reward process ends, when the owner dies, or when the pipe closes. On Linux, orphans become
children of the guard, so it finds even a daemon with its own session. On other systems it kills the process group and
those descendants that `ps` still shows as such. If the reward process has ended by itself, the guard exits with the
same status. It runs as a file and imports only the standard library, to start quickly.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import subprocess
import sys
import threading
import time

WITHIN_S = 4.0
"""Time limit to find, kill and reap all descendants; it takes milliseconds unless the machine is overloaded."""
POLL_EVERY_S = 0.005
CANNOT_START = 127
SET_PARENT_DEATH_SIGNAL, SET_CHILD_SUBREAPER = 1, 36
"""Options of Linux's prctl."""


def main(lifeline: int, owner: int, command: list[str]) -> None:
    if sys.platform == "linux":
        prctl = ctypes.CDLL(None).prctl
        prctl(SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGTERM, 0, 0, 0)  # in case a fork of the owner holds the lifeline open
    if os.getppid() != owner:
        os._exit(1)
    os.set_inheritable(lifeline, False)
    child = _start(command)
    signal.signal(signal.SIGTERM, lambda *_: _end(child))
    threading.Thread(target=_end_with_lifeline, args=(lifeline, child), daemon=True).start()
    status = _wait_for(child)
    _clear(child)
    _end_like(status)


def _start(command: list[str]) -> int:
    child = os.fork()
    if child:
        nothing = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):  # the pipes are between the pool and the reward process
            os.dup2(nothing, stream)
        return child
    try:
        os.setsid()
        os.execv(command[0], [*command, str(os.getppid())])
    finally:
        os._exit(CANNOT_START)


def _wait_for(child: int) -> int:
    """Waits for the child and returns its wait status; also reaps orphans that end before the child does."""
    while True:
        pid, status = os.wait()
        if pid == child:
            return status


def _end_with_lifeline(lifeline: int, child: int) -> None:
    while os.read(lifeline, 1):
        pass  # nothing is ever written
    _end(child)


def _end(child: int) -> None:
    _clear(child)
    os._exit(1)


def _clear(child: int) -> None:
    """Kills all descendants of this process. All are stopped before any is killed, so that none escapes by forking."""
    deadline_s = time.monotonic() + WITHIN_S
    stopped: set[int] = set()
    while (found := descendants(os.getpid()) - stopped) and time.monotonic() < deadline_s:
        for pid in found:
            _send(pid, signal.SIGSTOP)
        stopped |= found
    for pid in stopped:
        _send(pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):  # no child is left
        while time.monotonic() < deadline_s:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                time.sleep(POLL_EVERY_S)


def _send(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def _end_like(status: int) -> None:
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the reward process has dumped its own, if allowed
        with contextlib.suppress(OSError):  # SIGKILL
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.WEXITSTATUS(status))


def descendants(ancestor: int) -> set[int]:
    """Returns the ids of a process's children, grandchildren and so on."""
    parents = parents_by_proc() if os.path.isdir("/proc/self") else parents_by_ps()
    found, new = set[int](), {ancestor}
    while new := {pid for pid, parent in parents.items() if parent in new} - found:
        found |= new
    return found


def parents_by_proc() -> dict[int, int]:
    """Returns the parent of every process, from /proc."""
    parents = {}
    for name in os.listdir("/proc"):
        if name.isdecimal():
            # The process may have ended meanwhile.
            with contextlib.suppress(OSError, ValueError, IndexError), open(f"/proc/{name}/stat", "rb") as file:
                parents[int(name)] = int(file.read().rpartition(b")")[2].split()[1])
    return parents


def parents_by_ps() -> dict[int, int]:
    """Returns the parent of every process, from ps; empty if there is no ps."""
    try:
        with subprocess.Popen(["ps", "-A", "-o", "pid=,ppid="], stdout=subprocess.PIPE, text=True) as ps:
            assert ps.stdout is not None
            pairs = [line.split() for line in ps.stdout]
    except OSError:
        return {}
    return {int(pid): int(parent) for pid, parent in pairs if int(pid) != ps.pid}


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
