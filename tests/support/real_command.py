"""The real command in a folder of its own, and what it left there."""

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from contextlib import contextmanager
from pathlib import Path

WITHIN_S = 120.0
QUICK = (
    *("--batch.groups-per-step=2", "--batch.group-size=2", "--rollout.slots=4", "--rollout.max-new-tokens=8"),
    *("--eval.every=0", "--run.threads=1", "--log.console=quiet", "--run.name=a"),
)
ENDLESS = "--run.steps=1000000"
MARK = "OFFBEAT_TEST_MARK"
REWARDS = """
import os, time


def raising(response):
    raise ValueError("no egg,\\nno hen")


def hanging(response):
    time.sleep(600)


def nan(response):
    return float("nan")


def text(response):
    return "good"


def away(response):
    if os.path.exists("away"):
        raise ConnectionError("the judge is away")
    return float(len(response))


def now_and_then(response):
    with open("calls", "a") as file:  # a count that outlives the process
        file.write(".")
    number = os.path.getsize("calls")
    if number in (5, 10):
        return raising(response) if number == 5 else nan(response)
    if number in (15, 20):
        return text(response) if number == 15 else hanging(response)
    if number == 40:
        os._exit(3)
    return 1.0
"""


class Command:
    """The real command in a folder of its own; a mark in their environment tells its processes from all others."""

    def __init__(self, folder: Path):
        self.folder, self.mark = folder, uuid.uuid4().hex
        path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path if entry)
        self.environment = {**os.environ, "PYTHONPATH": path, MARK: self.mark}
        (folder / "rewards.py").write_text(REWARDS)

    def start(self, *words: str) -> subprocess.Popen[str]:
        pipe = subprocess.PIPE
        command = [sys.executable, "-m", "offbeat", *words]
        return subprocess.Popen(command, cwd=self.folder, env=self.environment, stdout=pipe, stderr=pipe, text=True)

    def __call__(self, *words: str) -> tuple[int, str, str]:
        return ended(self.start(*words))

    def fails(self, *words: str, status: int = 2) -> str:
        """Runs a command that must fail; returns its line."""
        found, out, errors = self(*words)
        line = only_line(errors)
        assert (found, out) == (status, ""), errors
        return line

    def succeeds(self, *words: str) -> str:
        status, out, errors = self(*words)
        assert (status, errors) == (0, "")
        return out

    def processes(self) -> dict[int, str]:
        """Process ids and command lines of all that we started, directly or not, and that are still alive."""
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if f"{MARK}={self.mark}".encode() in (folder / "environ").read_bytes():
                    found[int(folder.name)] = (folder / "cmdline").read_text().replace("\0", " ")
            except OSError:  # gone meanwhile, or not ours to look at
                continue
        return found


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    try:
        out, errors = process.communicate(timeout=WITHIN_S)
    except subprocess.TimeoutExpired:
        process.kill()
        _, errors = process.communicate()
        raise AssertionError(f"still running after {WITHIN_S:.0f} s: {errors}") from None
    return process.returncode, out, errors


def only_line(errors: str) -> str:
    assert errors.startswith("offbeat: "), errors
    assert errors.count("\n") == 1, errors
    return errors.removeprefix("offbeat: ").removesuffix("\n")


def line_after_warnings(errors: str) -> str:
    """The line of a run that may have warned of failed samples before."""
    return only_line("".join(line for line in errors.splitlines(True) if not line.startswith("warning: ")))


def wait_until(condition, what: str, process: subprocess.Popen[str] | None = None) -> None:
    deadline_s = time.monotonic() + WITHIN_S
    while not condition():
        if process is not None and process.poll() is not None:
            raise AssertionError(f"the run ended while we waited for {what}: {process.communicate()}")
        assert time.monotonic() < deadline_s, f"waited in vain for {what}"
        time.sleep(0.01)


def rows(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def events(run: Path, kind: str) -> list[dict]:
    return [event for event in rows(run / "events.jsonl") if event["event"] == kind]


def checkpoints(run: Path) -> list[int]:
    return sorted(int(folder.name) for folder in (run / "checkpoints").iterdir())


def get_on(run: Path, process: subprocess.Popen[str], num_rows: int = 3) -> None:
    """Waits until a run has trained some more steps."""
    enough = len(rows(run / "metrics.jsonl")) + num_rows
    wait_until(lambda: len(rows(run / "metrics.jsonl")) >= enough, f"{num_rows} more steps", process)


@contextmanager
def command_in(folder: Path):
    """A command that must leave no process behind."""
    command = Command(folder)
    yield command
    try:
        wait_until(lambda: not command.processes(), "the command's processes to be gone")
    finally:
        for pid in command.processes():
            os.kill(pid, signal.SIGKILL)
