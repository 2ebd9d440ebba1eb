"""With `exact`, a run that trains adapters and is killed ends in the very adapter of one that was left alone."""

import json

import pytest
from killed_runs import final_digest, finish, kill, lines, start, train, wait_for_lines

pytest.importorskip("peft")
NUM_STEPS = 8
CONFIG = f"""
[run]
dir = "runs"
seed = 7
steps = {NUM_STEPS}
exact = true
threads = 1
[model]
lora_rank = 4
[batch]
groups_per_step = 2
group_size = 4
[rollout]
slots = 16
max_new_tokens = 8
[optimizer]
lr = 3e-3
[eval]
every = 0
[checkpoint]
every = 3
[log]
console = "quiet"
"""


@pytest.mark.full
@pytest.mark.timeout(600)
def test_a_run_of_adapters_killed_before_and_after_its_first_checkpoint_ends_bit_equal(tmp_path):
    (tmp_path / "config.toml").write_text(CONFIG)
    train(tmp_path, "config.toml", "--run.name", "calm")

    run = tmp_path / "runs" / "stormy"
    process = start(tmp_path, "config.toml", "--run.name", "stormy")
    for num_steps in (2, 5):  # without a checkpoint, and two steps past one
        wait_for_lines(run / "metrics.jsonl", lines(run / "metrics.jsonl") + num_steps, process)
        kill(process)
        process = start(tmp_path, "--resume", "runs/stormy")
    finish(process)

    resumed = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines() if '"resume"' in line]
    assert [event["step"] for event in resumed][:1] == [0], "the first kill came after a checkpoint"
    assert resumed[-1]["step"] >= 3, "the second kill came before a checkpoint"
    assert final_digest(run, NUM_STEPS) == final_digest(tmp_path / "runs" / "calm", NUM_STEPS)
