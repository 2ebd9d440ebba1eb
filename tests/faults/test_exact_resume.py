"""With `exact`, a run that is killed anywhere and resumed ends in the very weights of one that was left alone."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from offbeat.ledger.ledger import Ledger

NUM_KILLS = 10
NUM_STEPS = 50
WITHIN_S = 120.0
CONFIG = f"""
[run]
dir = "runs"
seed = 7
steps = {NUM_STEPS}
exact = true
threads = 1
[batch]
groups_per_step = 4
group_size = 4
[rollout]
slots = 16
max_new_tokens = 12
[optimizer]
lr = 3e-4
[eval]
every = 9
prompts = 6
[checkpoint]
every = 3
[log]
console = "quiet"
"""


def start(folder: Path, *arguments: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "offbeat", "train", *arguments]
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def finish(process: subprocess.Popen) -> None:
    _, errors = process.communicate(timeout=WITHIN_S)
    assert process.returncode == 0, errors.decode()


def wait_for(file: Path, num_lines: int, process: subprocess.Popen) -> bool:
    """Whether the file grew so long while the process ran."""
    until_s = time.monotonic() + WITHIN_S
    while time.monotonic() < until_s:
        if lines(file) >= num_lines:
            return True
        if process.poll() is not None:
            return False
        time.sleep(0.01)
    raise TimeoutError(f"the run did not get on: {file} has {lines(file)} lines")


def lines(file: Path) -> int:
    return file.read_bytes().count(b"\n") if file.exists() else 0


def final_digest(run: Path) -> str:
    """The digest of the weights that a finished run ended with; its ledger must hold."""
    with Ledger(run / "ledger.sqlite", read_only=True) as ledger:
        assert ledger.verify().violations == ()
        version = ledger.latest_version()
    assert version is not None
    assert version.step == NUM_STEPS
    return version.digest


@pytest.mark.timeout(900)
def test_a_run_killed_at_ten_random_moments_ends_bit_equal_to_an_undisturbed_one(tmp_path):
    (tmp_path / "config.toml").write_text(CONFIG)
    finish(start(tmp_path, "config.toml", "--run.name", "calm"))

    rng = random.Random(os.environ.get("OFFBEAT_TEST_SEED", "1"))
    run = tmp_path / "runs" / "stormy"
    process = start(tmp_path, "config.toml", "--run.name", "stormy")
    for kill in range(NUM_KILLS):
        # Some kills fall into the start, where the ledger is reconciled; most into later steps, and between them.
        file = run / ("events.jsonl" if kill % 3 == 2 else "metrics.jsonl")
        enough = lines(file) + (1 if kill % 3 == 2 else rng.randint(1, NUM_STEPS // NUM_KILLS))
        assert wait_for(file, enough, process), f"ended before kill {kill}: {process.stderr.read().decode()}"
        time.sleep(rng.uniform(0, 0.3))
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=WITHIN_S)
        assert process.returncode == -signal.SIGKILL, "the run ended before it was killed"
        process = start(tmp_path, "--resume", "runs/stormy")
    finish(process)

    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    resumed = [event for event in events if event["event"] == "resume"]
    assert any(event["abandoned"] for event in resumed), "no kill fell between a commit and its checkpoint"
    assert any(event["step"] > 0 for event in resumed), "no run was resumed from a checkpoint"
    assert final_digest(run) == final_digest(tmp_path / "runs" / "calm")
