"""The page about swarms is true: its terminals are opened as it says, a worker is killed, and the run ends well."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from doc_reader import ROOT, blocks

PAGE = ROOT / "docs" / "swarm.md"
LINES = [line for block in blocks(PAGE, "sh") for line in block.splitlines()]
TRAIN, JOIN, SHOW, VERIFY, TOKEN, LIST, REVOKE, SERVE, TRAINER = LINES
SMALL = "--batch.groups-per-step=4 --eval.prompts=8 --rollout.lease-s=3 --checkpoint.every=20"
WITHIN_S = 240.0


class Terminals:
    """Windows of one user, side by side in one folder."""

    def __init__(self, folder: Path):
        self.folder, self._open = folder, list[subprocess.Popen]()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = str(free.getsockname()[1])
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
                ["bash", "-c", self._own(line, *more)],
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
            ["bash", "-c", self._own(line, *more)],
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


@pytest.fixture
def terminals(tmp_path: Path) -> Iterator[Terminals]:
    opened = Terminals(tmp_path)
    yield opened
    opened.close()


def producers(terminals: Terminals) -> dict[str, int]:
    """How many trajectories each worker has handed in."""
    told = json.loads(terminals.say(SHOW, "--json"))
    return {producer["worker"]: producer["num_trajectories"] for producer in told["producers"]}


def is_serving(terminals: Terminals) -> bool:
    return (terminals.folder / "runs" / "swarm" / "serve.json").is_file()


def test_three_terminals_a_late_worker_is_killed_halfway_and_the_run_finishes(terminals: Terminals):
    first = terminals.start(TRAIN, SMALL, "--run.steps=150 --serve.port", terminals.port)
    terminals.until("the coordinator listens", lambda: is_serving(terminals))
    second = terminals.start(JOIN)
    terminals.until("a worker hands something in", lambda: producers(terminals))
    third = terminals.start(JOIN)
    terminals.until("the late worker hands something in", lambda: len(producers(terminals)) == 2)
    assert first.poll() is None, f"the run ended too early to kill anyone\n{terminals.screen()}"
    os.killpg(third.pid, signal.SIGKILL)
    assert terminals.wait(first) == 0, terminals.screen()
    assert terminals.wait(second) == 0, terminals.screen()
    assert "everything holds" in terminals.say(VERIFY)
    story = terminals.say(SHOW)
    assert all(name in story for name in producers(terminals))
    summary = json.loads((terminals.folder / "runs" / "swarm" / "summary.json").read_text())
    assert summary["steps"] == 150
    assert summary["max_staleness_trained"] <= 2


def test_coordinator_trainer_and_worker_each_in_a_terminal_of_their_own(terminals: Terminals):
    serve = terminals.start(SERVE, SMALL, "--run.steps=4 --serve.port", terminals.port)
    terminals.until("the coordinator listens", lambda: is_serving(terminals))
    trainer = terminals.start(TRAINER)
    worker = terminals.start(JOIN)
    assert [terminals.wait(window) for window in (serve, trainer, worker)] == [0, 0, 0], terminals.screen()
    assert "everything holds" in terminals.say(VERIFY)
    assert len(terminals.say(TOKEN).strip()) > 30
    listed = terminals.say(LIST)
    assert "trainer" in listed
    (name,) = producers(terminals)
    assert "revoked" in terminals.say(REVOKE.replace("NAME", name))
