"""A supervised run whose processes can be found by name and killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

WITHIN_S = 240.0
MARK = "OFFBEAT_TEST_RUN"
"""Environment variable that all descendants of a run's process inherit, by which they are found."""
PACED = ("--rollout.engine=paced", "--paced.base-s=0.02", "--loss.max-logprob-gap=1000")
"""Options for workers without torch, which start quickly. What they generate teaches nothing."""


def until(find: Callable[[], T], what: str, within_s: float = WITHIN_S) -> T:
    """Calls `find` repeatedly and returns its first true result; raises after `within_s` seconds."""
    deadline_s = time.monotonic() + within_s
    while not (found := find()):
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"waited {within_s:.0f} s for {what}")
        time.sleep(0.02)
    return found


class Supervised:
    """`offbeat train` with processes of its own, as a user starts it."""

    def __init__(self, folder: Path, *words: str, environment: Mapping[str, str] | None = None):
        self.folder, self.run = folder, folder / "runs" / "a"
        self.mark = uuid.uuid4().hex
        path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path if entry)
        self.environment = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", MARK: self.mark, **(environment or {})}
        with (folder / "errors").open("ab") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "offbeat", "train", *words],
                cwd=folder,
                env={**os.environ, **self.environment},
                stdout=subprocess.DEVNULL,
                stderr=errors,
            )

    @property
    def errors(self) -> str:
        """Error lines that Offbeat itself printed."""
        lines = (self.folder / "errors").read_text().splitlines(keepends=True)
        return "".join(line for line in lines if line.startswith(("offbeat:", "Traceback", "warning:")))

    def diary(self) -> list[dict[str, Any]]:
        return rows(self.run / "logs" / "supervisor.jsonl")

    def pid(self, name: str) -> int | None:
        """Returns the pid of the process `name` that runs now; None if there is none."""
        told = [row for row in self.diary() if row["process"] == name]
        return told[-1]["pid"] if told and told[-1]["event"] == "started" else None

    def playing(self, name: str) -> int:
        """Waits until a process `name` runs and returns its pid."""
        found = until(lambda: self.pid(name), f"a {name}")
        assert found is not None
        return found

    def port(self) -> int:
        """Returns the coordinator's port, which stays the same after a restart."""
        self.playing("coordinator")
        return int(json.loads((self.run / "serve.json").read_text())["near_url"].rsplit(":", 1)[1])

    def kill(self, name: str) -> int:
        """Kills the process `name` and waits until the supervisor has seen it end; returns its pid."""
        pid = self.playing(name)
        os.kill(pid, signal.SIGKILL)
        until(lambda: self.was_killed(pid), f"the end of {name}")
        return pid

    def was_killed(self, pid: int) -> bool:
        return any(row["pid"] == pid and row.get("status") == -signal.SIGKILL for row in self.diary())

    def until_step(self, step: int) -> None:
        """Returns once a row of this step or a later one is written."""

        def is_there() -> bool:
            assert self.process.poll() is None, f"ended before step {step}: {self.errors}"
            return any(row["step"] >= step for row in rows(self.run / "metrics.jsonl") if "reward" in row)

        until(is_there, f"step {step}")

    def finish(self, status: int = 0) -> str:
        """Waits for the run's end with exit status `status`; returns the error lines."""
        try:
            ended = self.process.wait(WITHIN_S)
        finally:
            self.end()
        assert ended == status, f"status {ended}: {self.errors}"
        until(lambda: not self.living(), "the last process to end", 30.0)
        return self.errors

    def end(self) -> None:
        """Kills the supervisor, with which its processes end."""
        self.process.kill()
        self.process.wait()

    def living(self) -> list[int]:
        """Returns the pids of all living processes of this run, found by `MARK`."""
        found = []
        for entry in Path("/proc").glob("[0-9]*/environ"):
            try:
                is_ours = f"{MARK}={self.mark}".encode() in entry.read_bytes().split(b"\0")
            except OSError:  # it has gone, or is somebody else's
                continue
            if is_ours and entry.parent.joinpath("stat").read_text().rsplit(")", 1)[1].split()[0] != "Z":
                found.append(int(entry.parent.name))
        return found


def rows(file: Path) -> list[dict[str, Any]]:
    """Returns the complete rows of a JSON lines file that may be being written."""
    text = file.read_text() if file.is_file() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
