"""Whole runs that drop groups without a signal and draw others in their place."""

from collections.abc import Sequence
from pathlib import Path

import pytest

import offbeat
from offbeat.ledger.ledger import Ledger
from offbeat.ledger.records import Counts
from offbeat.observability.metric_files import read_metrics

SCHEDULES = [{"mode": "alternate"}, {"mode": "overlap", "max_staleness": 2}]


def train(folder: Path, schedule: dict, max_redraws: float, reward=None) -> tuple[Sequence[dict], Counts]:
    config = {
        "run": {"dir": str(folder), "name": "run", "steps": 4, "threads": 1},
        "batch": {"groups_per_step": 3, "group_size": 3, "drop_no_signal": True, "max_redraws": max_redraws},
        "schedule": schedule,
        "rollout": {"max_new_tokens": 12, "slots": 16},
        "eval": {"every": 2, "prompts": 4},
        "log": {"console": "quiet"},
    }
    assert offbeat.train(config, reward=reward).summary["steps"] == 4
    with Ledger(folder / "run" / "ledger.sqlite", read_only=True) as ledger:
        report = ledger.verify()
    assert report.violations == ()
    return [row for row in read_metrics(folder / "run" / "metrics.jsonl") if "reward" in row], report.counts


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: schedule["mode"])
def test_every_answer_trained_on_has_a_signal_where_there_is_room_to_look_for_one(tmp_path, schedule):
    rows, counts = train(tmp_path, schedule, max_redraws=30)
    assert [row["signal_share"] for row in rows] == [1.0] * 4
    assert counts.groups["trained"] == 4 * 3
    assert 0 < sum(row["dropped_no_signal"] for row in rows) <= counts.dropped_groups["no_signal"]
    assert counts.tokens.wasted["no_signal"] > 0
    if schedule["mode"] == "alternate":
        assert sum(row["dropped_no_signal"] for row in rows) == counts.dropped_groups["no_signal"]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: schedule["mode"])
def test_a_run_without_any_signal_goes_through_its_steps_all_the_same(tmp_path, schedule):
    rows, counts = train(tmp_path, schedule, max_redraws=1.5, reward=lambda response: 1.0)
    assert [row["signal_share"] for row in rows] == [0.0] * 4
    assert counts.groups["trained"] == 4 * 3
    dropped = [row["dropped_no_signal"] for row in rows]
    assert max(dropped) <= 5, "1.5 times 3 groups, and the next is taken"
    if schedule["mode"] == "alternate":
        assert dropped == [5] * 4
        assert counts.groups == {"trained": 12, "dropped": 20}
