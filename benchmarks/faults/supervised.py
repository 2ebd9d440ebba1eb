"""A supervised run to be hurt: its processes by name, witnessed kills, and what must hold afterwards."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from offbeat.ledger.ledger import Ledger

T = TypeVar("T")

WITHIN_S = 240.0
MARK = "OFFBEAT_TEST_RUN"
"""Every process of a run inherits this variable, its children's children too."""
TINY = (
    *("--run.name=a", "--run.seed=3", "--batch.groups-per-step=2", "--batch.group-size=4", "--optimizer.lr=3e-4"),
    *("--rollout.max-new-tokens=8", "--rollout.slots=16", "--rollout.lease-s=4", "--eval.every=0", "--run.threads=1"),
    *("--log.console=quiet", "--rollout.max-attempts=20"),  # on busy cores a lease may end before its worker is heard
)
PACED = ("--rollout.engine=paced", "--paced.base-s=0.02", "--loss.max-sample-gap=1000", "--loss.max-logprob-gap=1000")
"""Workers without torch, which start in no time; what they generate teaches nothing, and need not."""


def until(look: Callable[[], T], what: str, within_s: float = WITHIN_S) -> T:
    """What `look` finds, as soon as it finds something."""
    deadline_s = time.monotonic() + within_s
    while not (found := look()):
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
        """What Offbeat itself has complained of, a line each."""
        lines = (self.folder / "errors").read_text().splitlines(keepends=True)
        return "".join(line for line in lines if line.startswith(("offbeat:", "Traceback", "warning:")))

    def diary(self) -> list[dict[str, Any]]:
        return rows(self.run / "logs" / "supervisor.jsonl")

    def pid(self, name: str) -> int | None:
        """The process that plays a role now."""
        told = [row for row in self.diary() if row["process"] == name]
        return told[-1]["pid"] if told and told[-1]["event"] == "started" else None

    def playing(self, name: str) -> int:
        """The same, as soon as there is one."""
        found = until(lambda: self.pid(name), f"a {name}")
        assert found is not None
        return found

    def port(self) -> int:
        """Where the coordinator listens, now and after every restart."""
        self.playing("coordinator")
        return int(json.loads((self.run / "serve.json").read_text())["near_url"].rsplit(":", 1)[1])

    def kill(self, name: str) -> int:
        """Kills whoever plays a role, and waits until the supervisor has seen it; returns the number of the dead."""
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
        """Waits for the end; returns what was said on stderr."""
        try:
            ended = self.process.wait(WITHIN_S)
        finally:
            self.end()
        assert ended == status, f"status {ended}: {self.errors}"
        until(lambda: not self.living(), "the last process to end", 30.0)
        return self.errors

    def end(self) -> None:
        """However it stands; its processes go with it."""
        self.process.kill()
        self.process.wait()

    def living(self) -> list[int]:
        """Processes of this run, however they came to be."""
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
    """Whole lines of a file that may be written to at the moment."""
    text = file.read_text() if file.is_file() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def final_digest(run: Path) -> str:
    with Ledger(run / "ledger.sqlite", read_only=True) as ledger:
        version = ledger.latest_version()
    assert version is not None
    return version.digest


def check_whole(run: Path, num_steps: int, groups_per_step: int = 2) -> None:
    """The run is finished; every step was trained once, on groups of its own; none was forgotten on the way."""
    with Ledger(run / "ledger.sqlite", read_only=True) as ledger:
        assert ledger.verify().violations == ()
    connection = sqlite3.connect(f"file:{run / 'ledger.sqlite'}?mode=ro", uri=True)
    trained = connection.execute("SELECT step FROM batches WHERE state = 'trained' ORDER BY step").fetchall()
    members = connection.execute(
        "SELECT m.task FROM batch_members m JOIN batches b ON b.id = m.batch WHERE b.state = 'trained'"
    ).fetchall()
    ordinals = connection.execute(
        "SELECT ordinal FROM groups WHERE state = 'trained' AND purpose = 'train' ORDER BY ordinal"
    ).fetchall()
    drawn = {ordinal for (ordinal,) in connection.execute("SELECT ordinal FROM groups WHERE purpose = 'train'")}
    connection.close()
    assert [step for (step,) in trained] == list(range(num_steps))
    assert len(members) == len(set(members))
    assert len(ordinals) == len(set(ordinals)) == num_steps * groups_per_step
    assert drawn == set(range(len(drawn))), "an ordinal was left out"
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["finished"], summary["steps"]) == (True, num_steps)
