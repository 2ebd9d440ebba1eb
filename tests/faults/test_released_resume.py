"""Runs whose answers are trained without their siblings, killed and resumed: batches keep the baselines they had."""

from __future__ import annotations

import json

import pytest
from killed_runs import final_digest, train

from offbeat.ledger.ledger import Ledger
from offbeat.observability.metric_files import read_metrics

NUM_STEPS = 8
COMMON = f"""
[run]
dir = "runs"
seed = 5
steps = {NUM_STEPS}
threads = 1
exact = EXACT
[batch]
groups_per_step = 3
group_size = 4
gate = "release"
[checkpoint]
every = 3
[eval]
every = 0
[log]
console = "quiet"
"""
EXACT = (
    COMMON.replace("EXACT", "true")
    + """
[[task]]
source = "arithmetic"
reward = "picky.py:reward"
[reward]
max_failure_share = 1.0
[rollout]
slots = 16
max_new_tokens = 12
[optimizer]
lr = 3e-4
"""
)
PICKY = """
def reward(response, answer):
    if len(response) % 3 == 0:
        raise ValueError("of no length that is judged")
    return float(response.strip() == answer) + 0.1 * len(response)
"""
"""So many answers fail, and some for good, that the next prompt's fill the step, and its siblings are of the next."""
UNEVEN = (
    COMMON.replace("EXACT", "false")
    + """
[schedule]
mode = "overlap"
max_staleness = 3
[loss]
advantage = "recording.py:advantage"
[rollout]
engine = "paced"
slots = 16
max_new_tokens = 200
[paced]
median_tokens = 20
sigma = 1.2
"""
)
RECORDING = """
import json
from offbeat.trainer.advantages import siblings_normalised

def advantage(rewards, groups):
    found = siblings_normalised(rewards, groups)
    with open("seen.jsonl", "a") as file:
        file.write(json.dumps([rewards.tolist(), groups.tolist(), found.tolist()]) + chr(10))
    return found
"""


@pytest.mark.full
@pytest.mark.timeout(600)
def test_with_exact_a_killed_run_ends_bit_equal_though_prompts_reach_across_steps(tmp_path):
    (tmp_path / "config.toml").write_text(EXACT)
    (tmp_path / "picky.py").write_text(PICKY)
    train(tmp_path, "config.toml", "--run.name", "calm")
    train(tmp_path, "config.toml", "--run.name", "stormy", dies_at="step-committed:5")  # a step past the checkpoint
    train(tmp_path, "--resume", "runs/stormy", dies_at="submission-stored:15")  # within what it forgot
    train(tmp_path, "--resume", "runs/stormy")
    rows = [row for row in read_metrics(tmp_path / "runs" / "calm" / "metrics.jsonl") if "reward" in row]
    assert any(row["early_share"] > 0 for row in rows), "no prompt's answers were trained in two steps"
    assert final_digest(tmp_path / "runs" / "stormy", NUM_STEPS) == final_digest(tmp_path / "runs" / "calm", NUM_STEPS)
    with Ledger(tmp_path / "runs" / "stormy" / "ledger.sqlite", read_only=True) as ledger:
        assert ledger.counts().dropped_groups["abandoned"] > 0, "nothing was there to count twice"


@pytest.mark.full
@pytest.mark.timeout(600)
def test_a_batch_claimed_before_a_kill_has_the_same_advantages_after_it(tmp_path):
    (tmp_path / "config.toml").write_text(UNEVEN)
    (tmp_path / "recording.py").write_text(RECORDING)
    train(tmp_path, "config.toml", "--run.name", "long", dies_at="step-committed:6")  # two steps past the checkpoint
    train(tmp_path, "--resume", "runs/long")
    seen = [json.loads(line) for line in (tmp_path / "seen.jsonl").read_text().splitlines()]
    assert len(seen) == 6 + NUM_STEPS - 3
    assert seen[6] == seen[3], "the step that the checkpoint was followed by"
    assert any(len(rewards) > 12 for rewards, *_ in seen), "no sibling outside a batch was known"
    final_digest(tmp_path / "runs" / "long", NUM_STEPS)
