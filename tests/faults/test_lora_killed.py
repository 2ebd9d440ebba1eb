"""With `exact`, a run that trains adapters and is killed ends in the very adapter of one that was left alone."""

import json
import signal

import pytest
from test_exact_resume import finish, lines, start, wait_for

from offbeat.ledger.ledger import Ledger

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


def digests(run) -> dict[int, str]:
    """Of each step's living version."""
    with Ledger(run / "ledger.sqlite", read_only=True) as ledger:
        assert ledger.verify().violations == ()
        latest = ledger.latest_version()
        assert latest.step == NUM_STEPS
        versions = [ledger.version(number) for number in range(latest.number + 1)]
    return {version.step: version.digest for version in versions}


@pytest.mark.timeout(600)
def test_a_run_of_adapters_killed_before_and_after_its_first_checkpoint_ends_bit_equal(tmp_path):
    (tmp_path / "config.toml").write_text(CONFIG)
    finish(start(tmp_path, "config.toml", "--run.name", "calm"))

    run = tmp_path / "runs" / "stormy"
    process = start(tmp_path, "config.toml", "--run.name", "stormy")
    for num_steps in (2, 5):  # without a checkpoint, and two steps past one
        assert wait_for(run / "metrics.jsonl", lines(run / "metrics.jsonl") + num_steps, process)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert process.returncode == -signal.SIGKILL, "the run ended before it was killed"
        process = start(tmp_path, "--resume", "runs/stormy")
    finish(process)

    resumed = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines() if '"resume"' in line]
    assert [event["step"] for event in resumed][:1] == [0], "the first kill came after a checkpoint"
    assert resumed[-1]["step"] >= 3, "the second kill came before a checkpoint"
    assert digests(run) == digests(tmp_path / "runs" / "calm")
