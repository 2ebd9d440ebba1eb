"""A trainer killed while a checkpoint or a version is being written behind a step, and steps were trained meanwhile."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from killed_runs import WITHIN_S, final_digest, train
from shared_results import shared
from support_files import SUPPORT

from offbeat.ledger.ledger import Ledger
from offbeat.trainer.checkpoint import Checkpoints

pytestmark = pytest.mark.full
NUM_STEPS = 8
SMALL = (
    *("--run.name=a", "--run.seed=7", "--run.threads=1", f"--run.steps={NUM_STEPS}", "--optimizer.lr=3e-4"),
    *("--batch.groups-per-step=2", "--batch.group-size=4", "--rollout.slots=16", "--rollout.max-new-tokens=8"),
    *("--eval.every=0", "--checkpoint.every=2", "--log.console=quiet"),
)
EXACT = (*SMALL, "--run.exact=true")
OVERLAP = (*SMALL, "--schedule.mode=overlap", "--schedule.max-staleness=2")


def train_until_killed(folder: Path, what: str, step: int, *words: str) -> None:
    path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path if entry)
    done = subprocess.run(
        [sys.executable, SUPPORT / "dying_writers.py", what, str(step), "train", *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path},
        stderr=subprocess.PIPE,
        text=True,
        timeout=WITHIN_S,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL, f"it was not killed: {done.stderr}"


def trained_steps(run: Path) -> list[int]:
    connection = sqlite3.connect(f"file:{run / 'ledger.sqlite'}?mode=ro", uri=True)
    found = connection.execute("SELECT step FROM batches WHERE state = 'trained' ORDER BY step").fetchall()
    connection.close()
    return [step for (step,) in found]


def resumed(run: Path) -> list[dict]:
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    return [event for event in events if event["event"] == "resume"]


@pytest.fixture(scope="module")
def calm(tmp_path_factory) -> str:
    def run() -> str:
        folder = tmp_path_factory.mktemp("calm")
        train(folder, *EXACT)
        return final_digest(folder / "runs" / "a", NUM_STEPS)

    return shared(tmp_path_factory, "calm-writers", run)


@pytest.mark.timeout(400)
def test_a_run_killed_with_a_checkpoint_in_flight_and_later_steps_committed_ends_bit_equal(tmp_path, calm):
    run = tmp_path / "runs" / "a"
    train_until_killed(tmp_path, "checkpoint", 4, *EXACT)
    assert Checkpoints(run / "checkpoints").steps() == [2], "an unfinished checkpoint counts, or took another with it"
    assert trained_steps(run)[-1] >= 4, "no step was committed while the checkpoint was being written"
    train(tmp_path, "--resume", "runs/a")
    (resume,) = resumed(run)
    assert (resume["step"], resume["undone_steps"][0]) == (2, 4), "the batch of step 3 is trained again as it was"
    assert final_digest(run, NUM_STEPS) == calm


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("point", "step"),
    [("snapshot-taken:2", 2), ("checkpoint-drafted:2", 2), ("checkpoint-saved:2", 4), ("version-committed:4", 2)],
)
def test_a_run_killed_at_a_moment_of_a_checkpoint_ends_bit_equal(tmp_path, calm, point, step):
    run = tmp_path / "runs" / "a"
    train(tmp_path, *EXACT, dies_at=point)
    assert Checkpoints(run / "checkpoints").steps()[-1] == step
    train(tmp_path, "--resume", "runs/a")
    assert final_digest(run, NUM_STEPS) == calm
    assert Checkpoints(run / "checkpoints").steps() == [NUM_STEPS - 2, NUM_STEPS]


@pytest.mark.timeout(400)
@pytest.mark.parametrize("step", [1, 5])
def test_a_run_killed_with_a_version_in_flight_and_the_next_step_trained_loses_and_repeats_nothing(tmp_path, step):
    run = tmp_path / "runs" / "a"
    train_until_killed(tmp_path, "version", step, *OVERLAP)
    assert trained_steps(run) == list(range(step - 1)), "a step was committed before its version was on disk"
    with Ledger(run / "ledger.sqlite", read_only=True) as ledger:
        assert ledger.verify().violations == ()
        assert ledger.latest_version().step == step - 1
    train(tmp_path, "--resume", "runs/a")
    final_digest(run, NUM_STEPS)
    assert trained_steps(run) == list(range(NUM_STEPS))
    connection = sqlite3.connect(f"file:{run / 'ledger.sqlite'}?mode=ro", uri=True)
    query = "SELECT task FROM batch_members m JOIN batches b ON b.id = m.batch WHERE b.state = 'trained'"
    tasks = [task for (task,) in connection.execute(query)]
    (stalest,) = connection.execute("SELECT MAX(max_staleness) FROM batches").fetchone()
    connection.close()
    assert len(tasks) == len(set(tasks)) == NUM_STEPS * 8
    assert stalest <= 2
