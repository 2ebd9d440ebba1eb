"""Runs of the real command that are killed and taken up again, and the weights that they end with."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from offbeat.ledger.ledger import Ledger
from offbeat.testing import crash_points

WITHIN_S = 300.0


def start(folder: Path, *arguments: str, dies_at: str | None = None) -> subprocess.Popen[bytes]:
    """`offbeat train` in a folder; `dies_at` names a place of `offbeat.testing.crash_points` where it kills itself."""
    environment = {**os.environ, **({crash_points.AT: dies_at} if dies_at else {})}
    command = [sys.executable, "-m", "offbeat", "train", *arguments]
    return subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, bufsize=0
    )


def finish(process: subprocess.Popen[bytes], status: int = 0) -> None:
    _, errors = process.communicate(timeout=WITHIN_S)
    assert process.returncode == status, errors.decode()


def train(folder: Path, *arguments: str, dies_at: str | None = None) -> None:
    """Trains to the end, or to the place where the process dies."""
    finish(start(folder, *arguments, dies_at=dies_at), -signal.SIGKILL if dies_at else 0)


def kill(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=WITHIN_S)
    assert process.returncode == -signal.SIGKILL, "the run ended before it was killed"


def wait_for_lines(file: Path, num_lines: int, process: subprocess.Popen[bytes]) -> None:
    """Waits until a file has grown so long while the process runs."""
    until_s = time.monotonic() + WITHIN_S
    while lines(file) < num_lines:
        assert process.poll() is None, f"ended too early: {process.stderr and process.stderr.read().decode()}"
        assert time.monotonic() < until_s, f"the run did not get on: {file} has {lines(file)} lines"
        time.sleep(0.01)


def lines(file: Path) -> int:
    return file.read_bytes().count(b"\n") if file.exists() else 0


def final_digest(run: Path, num_steps: int) -> str:
    """The digest of the weights that a finished run ended with; its ledger must hold."""
    with Ledger(run / "ledger.sqlite", read_only=True) as ledger:
        assert ledger.verify().violations == ()
        version = ledger.latest_version()
    assert version is not None
    assert version.step == num_steps
    return version.digest
