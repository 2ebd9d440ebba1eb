"""A prompt that is too long never ends a run: neither one that was known at the start nor one that turns up later."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import offbeat
from offbeat.ledger.ledger import Ledger

TASK = """
def problem(ordinal, seed):
    return {"prompt": "1+" * (60 if ordinal % 70 > 64 else 1) + f"{ordinal % 10}=", "answer": str(ordinal)}


def reward(response):
    return float(len(response))
"""


def run(folder: Path, task: dict, **more) -> tuple[dict, list[dict]]:
    """A run's summary and events."""
    config = {
        "run": {"dir": str(folder), "name": "a", "steps": 20, "threads": 1},
        "task": [{"reward": f"{folder}/task.py:reward", **task}],
        "batch": {"groups_per_step": 4, "group_size": 2},
        "rollout": {"max_new_tokens": 2, "slots": 16, **more},
        "eval": {"every": 0},
        "log": {"console": "quiet"},
    }
    summary = offbeat.train(config).summary
    return summary, [json.loads(line) for line in (folder / "a" / "events.jsonl").read_text().splitlines()]


def drawn(folder: Path) -> list[str]:
    """The prompts of a run in the order in which they were drawn; each must be trained on."""
    with Ledger(folder / "a" / "ledger.sqlite", read_only=True) as ledger:
        assert ledger.verify().violations == ()
        query = "SELECT problem FROM groups WHERE purpose = 'train' ORDER BY ordinal"
        return [json.loads(problem)["prompt"] for (problem,) in ledger.execute(query)]


def test_long_prompts_beyond_the_sample_are_left_out_told_once_and_recorded(tmp_path, capsys):
    (tmp_path / "task.py").write_text(TASK)
    summary, events = run(tmp_path, {"source": "function", "path": f"{tmp_path}/task.py:problem"})
    assert (summary["finished"], summary["steps"]) == (True, 20)
    left_out = [event for event in events if event["event"] == "prompt_left_out"]
    assert [event["source_ordinal"] for event in left_out] == [65, 66, 67, 68, 69]
    assert left_out[0]["why"] == "problem, problem 65: its prompt has 122 tokens, over rollout.max_prompt_tokens = 64"
    told = capsys.readouterr().err
    assert told.count("this prompt and others like it are left out: see events.jsonl") == 1
    assert drawn(tmp_path)[63:67] == ["1+3=", "1+4=", "1+0=", "1+1="]


@pytest.mark.full
def test_long_rows_are_skipped_if_that_is_wanted_and_a_resume_goes_on_in_the_same_order(tmp_path, capsys):
    (tmp_path / "task.py").write_text(TASK)
    rows = ["1+" * (60 if n % 4 == 1 else 1) + f"{n}=" for n in range(12)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"prompt": row}) + "\n" for row in rows))
    task = {"source": "file", "path": f"{tmp_path}/rows.jsonl", "shuffle": False, "held_out": 0}
    _, events = run(tmp_path, task, long_prompts="skip")
    (noted,) = [event for event in events if event["event"] == "long_prompts"]
    assert (noted["num_long"], noted["num_prompts"], noted["first"]) == (3, 12, f"{tmp_path}/rows.jsonl:2")
    assert "left out" not in capsys.readouterr().err
    short = [row for row in rows if len(row) < 60]
    offbeat.train(resume=tmp_path / "a", **{"run.steps": 23})
    assert drawn(tmp_path) == [short[n % len(short)] for n in range(92)]
