"""With `exact`, a run that drops groups without a signal and is killed ends in the weights of one that was left alone:
what it dropped before it died, in steps that it forgets, stays dropped, and nothing else is drawn in its place."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from offbeat import crash
from offbeat.ledger.ledger import Ledger
from offbeat.watch.history import read_metrics

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


def run(folder: Path, *arguments: str, dies_at: str | None = None) -> None:
    environment = {**os.environ, **({crash.AT: dies_at} if dies_at else {})}
    command = [sys.executable, "-m", "offbeat", "train", *arguments]
    ended = subprocess.run(command, cwd=folder, env=environment, capture_output=True, timeout=300)
    assert ended.returncode == (-signal.SIGKILL if dies_at else 0), ended.stderr.decode()


def outcome(folder: Path) -> tuple[str, list[int], dict[str, int]]:
    """The weights' digest, what each surviving step dropped, and dropped groups by reason."""
    with Ledger(folder / "ledger.sqlite", read_only=True) as ledger:
        assert ledger.verify().violations == ()
        version = ledger.latest_version()
        dropped = dict(ledger.counts().dropped_groups)
    assert version is not None
    assert version.step == NUM_STEPS
    return version.digest, [row["dropped_no_signal"] for row in read_metrics(folder / "metrics.jsonl")], dropped


@pytest.mark.timeout(600)
def test_a_killed_run_drops_the_same_groups_and_ends_bit_equal(tmp_path):
    (tmp_path / "config.toml").write_text(CONFIG)
    run(tmp_path, "config.toml", "--run.name", "calm")
    run(tmp_path, "config.toml", "--run.name", "stormy", dies_at="step-committed:6")  # two steps past the checkpoint
    run(tmp_path, "--resume", "runs/stormy", dies_at="submission-stored:40")  # within one of the steps that it forgot
    run(tmp_path, "--resume", "runs/stormy")
    calm_digest, calm_steps, calm_dropped = outcome(tmp_path / "runs" / "calm")
    digest, steps, dropped = outcome(tmp_path / "runs" / "stormy")
    assert all(sum(part) > 0 for part in (calm_steps[:3], calm_steps[3:6])), "nothing was there to get wrong"
    assert dropped["abandoned"] > 0
    assert (digest, steps, dropped["no_signal"]) == (calm_digest, calm_steps, calm_dropped["no_signal"])
