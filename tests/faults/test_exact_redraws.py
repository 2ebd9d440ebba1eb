"""With `exact`, a run that drops groups without a signal and is killed ends in the weights of one that was left alone:
what it dropped before it died, in steps that it forgets, stays dropped, and nothing else is drawn in its place."""

from __future__ import annotations

from pathlib import Path

import pytest
from killed_runs import final_digest, train

from offbeat.ledger.ledger import Ledger
from offbeat.observability.metric_files import read_metrics

NUM_STEPS = 8
CONFIG = f"""
[run]
dir = "runs"
seed = 5
steps = {NUM_STEPS}
exact = true
threads = 1
[batch]
groups_per_step = 3
group_size = 3
drop_no_signal = true
max_redraws = 2
[rollout]
slots = 16
max_new_tokens = 12
[optimizer]
lr = 3e-4
[eval]
every = 0
[checkpoint]
every = 3
[log]
console = "quiet"
"""


def outcome(folder: Path) -> tuple[str, list[int], dict[str, int]]:
    """The weights' digest, what each surviving step dropped, and dropped groups by reason."""
    with Ledger(folder / "ledger.sqlite", read_only=True) as ledger:
        dropped = dict(ledger.counts().dropped_groups)
    return (
        final_digest(folder, NUM_STEPS),
        [row["dropped_no_signal"] for row in read_metrics(folder / "metrics.jsonl")],
        dropped,
    )


@pytest.mark.full
@pytest.mark.timeout(600)
def test_a_killed_run_drops_the_same_groups_and_ends_bit_equal(tmp_path):
    (tmp_path / "config.toml").write_text(CONFIG)
    train(tmp_path, "config.toml", "--run.name", "calm")
    train(tmp_path, "config.toml", "--run.name", "stormy", dies_at="step-committed:6")  # two steps past the checkpoint
    train(tmp_path, "--resume", "runs/stormy", dies_at="submission-stored:40")  # within one of the steps that it forgot
    train(tmp_path, "--resume", "runs/stormy")
    calm_digest, calm_steps, calm_dropped = outcome(tmp_path / "runs" / "calm")
    digest, steps, dropped = outcome(tmp_path / "runs" / "stormy")
    assert all(sum(part) > 0 for part in (calm_steps[:3], calm_steps[3:6])), "nothing was there to get wrong"
    assert dropped["abandoned"] > 0
    assert (digest, steps, dropped["no_signal"]) == (calm_digest, calm_steps, calm_dropped["no_signal"])
