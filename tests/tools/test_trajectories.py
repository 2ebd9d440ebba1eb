"""Python reads what a run generated as rows with texts, by the same steps and filters as the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from ledger_run import full_step, version

from offbeat.errors import UserError
from offbeat.ledger.ledger import Ledger
from offbeat.ledger.records import LedgerTerms
from offbeat.tools.trajectories import read_trajectories

KEYS = (
    *("task", "step", "purpose", "source", "prompt", "response", "answer", "reward", "error", "num_tokens", "worker"),
    *("ended_by", "first_version", "last_version", "parts"),
)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Two steps of four answers each; the bytes of the first are pruned."""
    (tmp_path / "config.json").write_text(json.dumps({"model": {"path": "offbeat-tiny", "tokenizer": None}}))
    with Ledger(tmp_path / "ledger.sqlite", LedgerTerms(min_group=2)) as ledger:
        ledger.publish(version(0, 0))
        full_step(ledger, 0)
        full_step(ledger, 1)
        ledger.prune(1)
    return tmp_path


def test_a_row_has_texts_figures_and_the_right_answer(run: Path):
    newest, *_ = rows = read_trajectories(run)
    assert [row["task"] for row in rows] == [8, 7, 6, 5, 4, 3, 2, 1]
    assert set(newest) == set(KEYS)
    assert (newest["step"], newest["purpose"], newest["source"], newest["answer"]) == (2, "train", "sums", "4")
    assert newest["parts"] == {"reward": newest["reward"]}
    assert isinstance(newest["prompt"], str)
    assert isinstance(newest["response"], str)
    assert (newest["first_version"], newest["last_version"], newest["ended_by"]) == (1, 1, "stop")
    assert [row["response"] is None for row in rows] == [False] * 4 + [True] * 4, "pruned"


def test_conditions_and_order_are_the_callers(run: Path):
    assert [row["task"] for row in read_trajectories(run, step=1, newest_first=False, limit=3)] == [1, 2, 3]
    assert read_trajectories(run, purpose="eval") == []
    assert read_trajectories(run, worker="nobody") == []
    with pytest.raises(UserError, match=r'^purpose = "training": must be "train", "eval", or None for both$'):
        read_trajectories(run, purpose="training")
    best = max(row["reward"] for row in read_trajectories(run))
    assert {row["reward"] for row in read_trajectories(run, min_reward=best)} == {best}
    assert all(row["reward"] < best for row in read_trajectories(run, max_reward=best - 1e-9))


def test_a_run_that_has_not_begun_is_named(tmp_path: Path):
    (tmp_path / "config.json").write_text('{"model": {"path": "offbeat-tiny"}}')
    with pytest.raises(UserError, match="holds no ledger yet"):
        read_trajectories(tmp_path)
