"""Windows of one user who follows a page with several of them open: real processes, in one folder, on a port of their
own."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from doc_reader import ROOT

SMALL = "--batch.groups-per-step=4 --eval.prompts=8 --rollout.lease-s=3 --checkpoint.every=20"
WITHIN_S = 240.0


def _free_port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


class Terminals:
    """Windows of one user, side by side in one folder."""

    def __init__(self, folder: Path, inside: Sequence[str] = (), port: str | None = None):
        """`inside`: words that run a command on another machine. `port`: None takes a free one of this machine."""
        self.folder, self._open, self._inside = folder, list[subprocess.Popen](), inside
        self.port = port or _free_port()
        (folder / "bin").mkdir()
        command = folder / "bin" / "offbeat"
        command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m offbeat "$@"\n')
        command.chmod(0o755)
        (folder / "examples").symlink_to(ROOT / "examples")
        self._environment = {
            **os.environ,
            "PATH": f"{command.parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT / "src"),
            "XDG_CACHE_HOME": str(folder / "cache"),
            "OMP_NUM_THREADS": "1",
        }

    def start(self, line: str, *more: str) -> subprocess.Popen:
        with open(self.folder / f"terminal-{len(self._open) + 1}.txt", "wb") as output:
            window = subprocess.Popen(
                [*self._inside, "bash", "-c", self._own(line, *more)],
                cwd=self.folder,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        self._open.append(window)
        return window

    def say(self, line: str, *more: str) -> str:
        """Runs a command to its end and returns what it prints; it must end well."""
        done = subprocess.run(
            [*self._inside, "bash", "-c", self._own(line, *more)],
            cwd=self.folder,
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=WITHIN_S,
            check=False,
        )
        assert done.returncode == 0, (line, done.stderr)
        return done.stdout

    def _own(self, line: str, *more: str) -> str:
        """The line on a port that nobody else uses."""
        return " ".join([line.replace("8700", self.port), *more])

    def screen(self) -> str:
        return "\n".join(f"== {file.name}\n{file.read_text()}" for file in sorted(self.folder.glob("terminal-*.txt")))

    def until(self, what: str, is_so) -> None:
        deadline_s = time.monotonic() + WITHIN_S
        while not is_so():
            assert time.monotonic() < deadline_s, f"{what}: not within {WITHIN_S} s\n{self.screen()}"
            time.sleep(0.3)

    def wait(self, window: subprocess.Popen) -> int:
        try:
            return window.wait(WITHIN_S)
        except subprocess.TimeoutExpired:
            pytest.fail(f"did not end within {WITHIN_S} s\n{self.screen()}")

    def close(self) -> None:
        for window in self._open:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(window.pid, signal.SIGKILL)
            window.wait()
