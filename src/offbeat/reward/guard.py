"""Kills reward processes, and all that they started, when whoever owns them dies without a word.

A SIGKILLed owner cannot clean up, and what a reward started (a compiler, a test run) would live on. So a small process
of its own keeps the list of process groups; the end of its input tells it that the owner is gone. It is run as a file
with the standard library alone, so that it starts in a blink.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys

WAIT_S = 5.0
"""More than enough for a process that only has to notice the end of its input."""


class Guard:
    """The owner's side; one per pool."""

    def __init__(self) -> None:
        self._groups: set[int] = set()
        self._process: subprocess.Popen[bytes] | None = None

    def watch(self, group: int) -> None:
        self._groups.add(group)
        self._tell(f"+{group}\n")

    def forget(self, group: int) -> None:
        self._groups.discard(group)
        self._tell(f"-{group}\n")

    def close(self) -> None:
        """Ends the guard, which kills what is still on its list."""
        if self._process is not None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            self._process.wait(WAIT_S)

    def _tell(self, line: str) -> None:
        if self._process is None:
            self._process = _start_guard()
        try:
            _write(self._process, line)
        except BrokenPipeError:  # someone killed the guard: a new one learns the whole list
            self._process.wait(WAIT_S)
            self._process = _start_guard()
            _write(self._process, "".join(f"+{group}\n" for group in self._groups))


def _start_guard() -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-I", "-S", os.path.abspath(__file__)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        bufsize=0,
        start_new_session=True,  # a Ctrl-C in the terminal is for the owner
    )


def _write(process: subprocess.Popen[bytes], text: str) -> None:
    assert process.stdin is not None
    process.stdin.write(text.encode())


def kill_group(group: int) -> None:
    """SIGKILL to a process group; one that is already gone is fine."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


def main() -> None:
    groups: set[int] = set()
    for line in sys.stdin:
        group = int(line[1:])
        (groups.add if line[0] == "+" else groups.discard)(group)
    for group in groups:
        kill_group(group)


if __name__ == "__main__":
    main()
