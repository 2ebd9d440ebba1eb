"""Whole runs that stop at the batch and carry on what is unfinished, with every engine that runs here."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_local import small

import offbeat
from offbeat.ledger.ledger import Ledger
from offbeat.observability.metric_files import read_metrics

NUM_STEPS, GROUPS_PER_STEP, GROUP_SIZE = 5, 3, 4
ENGINES = {
    "embedded": {},
    "paced": {
        "paced": {"base_s": 0.002, "median_tokens": 10, "sigma": 1.0},
        "loss": {"max_logprob_gap": 1000.0},
    },
}


def train(folder: Path, engine: str, **sections) -> tuple[dict, list[dict], Ledger]:
    rollout = {"engine": engine, "max_new_tokens": 24, "slots": 16}
    run = {"steps": NUM_STEPS}
    config = small(folder, engine, run=run, rollout=rollout, optimizer={"lr": 1e-5}, **ENGINES[engine], **sections)
    summary = offbeat.train(config).summary
    rows = [row for row in read_metrics(folder / engine / "metrics.jsonl") if "reward" in row]
    return summary, rows, Ledger(folder / engine / "ledger.sqlite", read_only=True)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_run_that_stops_at_the_batch_trains_all_that_it_generated_within_its_bound(tmp_path, engine):
    summary, rows, ledger = train(tmp_path, engine, schedule={"max_staleness": 1, "over_provision": 2.0})
    num_samples = NUM_STEPS * GROUPS_PER_STEP * GROUP_SIZE
    assert summary["trajectories"] == {"accepted": num_samples, "trained": num_samples, "waiting": 0, "dropped": 0}
    assert summary["max_staleness_trained"] == 1, "nothing was carried over from one version to the next"
    assert [row["over_provision"] for row in rows] == [2.0] * NUM_STEPS
    assert rows[0]["off_policy_share"] == 0.0
    assert max(row["off_policy_share"] for row in rows) > 0.0
    with ledger:
        assert ledger.verify().violations == ()
        counts = ledger.counts()
    assert (counts.failed_tasks, counts.dropped_groups, counts.tokens.wasted) == ({}, {}, {})
    assert (counts.tokens.masked["stale"], counts.tokens.partial) == (0, 0)
    if engine == "embedded":
        assert all(row["logprob_gap"] < 1e-4 for row in rows if row["off_policy_share"] < 1.0)


def test_an_overlapping_run_whose_answers_end_as_they_began_has_one_version_in_each(tmp_path):
    schedule = {"mode": "overlap", "max_staleness": 2, "new_version": "finish"}
    summary, _, ledger = train(tmp_path, "paced", schedule=schedule)
    assert summary["max_staleness_trained"] <= 2
    with ledger:
        assert ledger.verify().violations == ()
        versions = ledger.execute("SELECT MAX(num) FROM (SELECT COUNT(*) num FROM segments GROUP BY task)")
        assert versions.fetchone() == (1,)
