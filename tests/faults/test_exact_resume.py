"""With `exact`, a run that is killed anywhere and resumed ends in the very weights of one that was left alone."""

import json
import os
import random
import time

import pytest
from killed_runs import final_digest, finish, kill, lines, start, train, wait_for_lines

NUM_KILLS = 10
NUM_STEPS = 50
CONFIG = """
[run]
dir = "runs"
seed = 7
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


def resumes(run) -> list[dict]:
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    return [event for event in events if event["event"] == "resume"]


@pytest.mark.timeout(600)
def test_a_run_killed_between_a_commit_and_its_checkpoint_ends_bit_equal_to_an_undisturbed_one(tmp_path):
    (tmp_path / "config.toml").write_text(CONFIG)
    few = ("--run.steps=5", "--batch.groups-per-step=2")
    train(tmp_path, "config.toml", *few, "--run.name=calm")
    train(tmp_path, "config.toml", *few, "--run.name=stormy", dies_at="step-committed:4")  # one past the checkpoint
    train(tmp_path, "--resume", "runs/stormy")
    (resumed,) = resumes(tmp_path / "runs" / "stormy")
    assert resumed["step"] in (0, 3), "0 if the checkpoint was still being written"
    assert resumed["abandoned"]
    assert final_digest(tmp_path / "runs" / "stormy", 5) == final_digest(tmp_path / "runs" / "calm", 5)


@pytest.mark.full
@pytest.mark.timeout(900)
def test_a_run_killed_at_ten_random_moments_ends_bit_equal_to_an_undisturbed_one(tmp_path):
    (tmp_path / "config.toml").write_text(CONFIG)
    all_steps = f"--run.steps={NUM_STEPS}"
    train(tmp_path, "config.toml", all_steps, "--run.name=calm")

    rng = random.Random(os.environ.get("OFFBEAT_TEST_SEED", "1"))
    run = tmp_path / "runs" / "stormy"
    process = start(tmp_path, "config.toml", all_steps, "--run.name=stormy")
    for number in range(NUM_KILLS):
        # Some kills fall into the start, where the ledger is reconciled; most into later steps, and between them.
        file = run / ("events.jsonl" if number % 3 == 2 else "metrics.jsonl")
        enough = lines(file) + (1 if number % 3 == 2 else rng.randint(1, NUM_STEPS // NUM_KILLS))
        wait_for_lines(file, enough, process)
        time.sleep(rng.uniform(0, 0.3))
        kill(process)
        process = start(tmp_path, "--resume", "runs/stormy")
    finish(process)

    resumed = resumes(run)
    assert any(event["abandoned"] for event in resumed), "no kill fell between a commit and its checkpoint"
    assert any(event["step"] > 0 for event in resumed), "no run was resumed from a checkpoint"
    assert final_digest(run, NUM_STEPS) == final_digest(tmp_path / "runs" / "calm", NUM_STEPS)
