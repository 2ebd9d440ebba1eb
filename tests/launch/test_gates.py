"""Whole runs whose answers are trained without waiting for their siblings."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import offbeat
from offbeat.ledger.ledger import Ledger
from offbeat.ledger.records import Batch
from offbeat.observability.metric_files import read_metrics

SCHEDULES: list[dict[str, Any]] = [{"mode": "alternate"}, {"mode": "overlap", "max_staleness": 2}]
GROUPS, SIZE, STEPS = 3, 4, 4


def small(folder: Path, name: str, gate: str, **sections: Any) -> dict[str, Any]:
    return {
        "run": {"dir": str(folder), "name": name, "steps": STEPS, "threads": 1},
        "batch": {"groups_per_step": GROUPS, "group_size": SIZE, "gate": gate},
        "rollout": {"max_new_tokens": 12, "slots": 16},
        "eval": {"every": 2, "prompts": 4},
        "log": {"console": "quiet"},
        **sections,
    }


def steps_of(run: Path) -> list[dict[str, Any]]:
    return [row for row in read_metrics(run / "metrics.jsonl") if "reward" in row]


def replayed(run: Path, step: int) -> Batch:
    """A batch that was trained, as a resume would be given it."""
    with Ledger(run / "ledger.sqlite") as ledger:
        batch = ledger.claim(step)
    assert batch is not None
    return batch


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: schedule["mode"])
@pytest.mark.parametrize("gate", [pytest.param("strict", marks=pytest.mark.full), "release", "batch"])
def test_a_step_trains_as_many_answers_of_the_same_problems_whatever_its_gate(tmp_path, gate, schedule):
    summary = offbeat.train(small(tmp_path, "run", gate, schedule=schedule)).summary
    assert summary["trajectories"]["trained"] == STEPS * GROUPS * SIZE
    rows = steps_of(tmp_path / "run")
    assert [row["samples"] for row in rows] == [GROUPS * SIZE] * STEPS
    assert all(("lone_share" in row) == (gate != "strict") for row in rows)
    with Ledger(tmp_path / "run" / "ledger.sqlite", read_only=True) as ledger:
        report = ledger.verify()
        drawn = ledger.cursor().drawn
    assert report.violations == ()
    assert report.counts.groups["trained"] == STEPS * GROUPS * (1 if gate == "strict" else SIZE)
    assert report.counts.max_staleness_trained <= schedule.get("max_staleness", 0)
    assert drawn == {"arithmetic": STEPS * GROUPS}


def test_where_steps_wait_for_all_answers_each_knows_all_its_siblings(tmp_path):
    offbeat.train(small(tmp_path, "run", "release"))
    rows = steps_of(tmp_path / "run")
    assert [(row["lone_share"], row["early_share"]) for row in rows] == [(0.0, 0.0)] * STEPS
    assert all("early_length" not in row for row in rows)
    batch = replayed(tmp_path / "run", 1)
    assert set(Counter(group.prompt for group in batch.groups).values()) == {SIZE}
    assert all(group.earlier == () for group in batch.groups)


UNEVEN = {
    "schedule": {"mode": "overlap", "max_staleness": 3},
    "rollout": {"engine": "paced", "max_new_tokens": 200, "slots": 16},
    "paced": {"median_tokens": 20.0, "sigma": 1.2},
    "eval": {"every": 0},
}


@pytest.mark.full
def test_answers_of_a_long_tail_are_trained_before_their_siblings_are_there(tmp_path):
    offbeat.train(small(tmp_path, "run", "release", **UNEVEN))
    run = tmp_path / "run"
    rows = steps_of(run)
    assert sum(row["early_share"] for row in rows) > 0, "nobody was released early"
    batches = [replayed(run, step) for step in range(STEPS)]
    assert any(group.earlier for batch in batches for group in batch.groups)
    for row, batch in zip(rows, batches, strict=True):
        num_here = Counter(group.prompt for group in batch.groups)
        num_lone = sum(num_here[group.prompt] == 1 and not group.earlier for group in batch.groups)
        assert row["lone_share"] == num_lone / len(batch.groups)
