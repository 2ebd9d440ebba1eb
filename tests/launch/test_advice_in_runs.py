"""Whole runs that do not learn, and what they are told; and one that does, and is told nothing."""

import json

import pytest

import offbeat
from offbeat.observability.metric_files import read_events


def train(folder, reward=None, *, steps: int, **sections) -> list[dict]:
    """The advice in the events of a run of the shipped model."""
    config = {
        "run": {"dir": str(folder), "name": "a", "steps": steps, "threads": 1},
        "batch": {"groups_per_step": 4, "group_size": 4},
        "rollout": {"slots": 16},
        "eval": {"every": 0},
        "log": {"console": "quiet"},
    }
    offbeat.train(
        {**config, **{name: {**config.get(name, {}), **keys} for name, keys in sections.items()}}, reward=reward
    )
    return [event for event in read_events(folder / "a" / "events.jsonl") if event["event"] == "advice"]


def test_a_reward_that_takes_text_for_numbers_is_told_before_the_first_step_and_after_three(tmp_path, capsys):
    """And so is that the answers have no end."""
    found = train(tmp_path, lambda response, answer: float(answer == 42), steps=4, rollout={"max_new_tokens": 1})
    assert [event["about"] for event in found] == ["trial arithmetic", "constant reward", "cut"]
    assert found[0]["seconds"] < found[1]["seconds"]
    warnings = capsys.readouterr().err.splitlines()
    assert [line for line in warnings if line.startswith("warning: ")] == [f"warning: {e['text']}" for e in found]
    assert "rollout.max_new_tokens = 1:" in found[2]["text"]
    rows = [json.loads(line) for line in (tmp_path / "a" / "metrics.jsonl").read_text().splitlines()]
    assert {row["reward_max"] for row in rows} == {0.0}


def test_a_reward_of_the_prompt_alone_is_told_to_teach_nothing(tmp_path):
    found = train(tmp_path, lambda prompt: 1.0 + sum(map(ord, str(prompt))) % 2, steps=5)
    assert [event["about"] for event in found] == ["no signal"]


def test_a_reward_whose_best_is_0_is_not_taken_for_one_that_gives_nothing(tmp_path):
    found = train(tmp_path, lambda response, answer: -float(response.strip() != answer), steps=1)
    assert found == []


@pytest.mark.full
def test_the_demo_is_told_nothing(tmp_path):
    config = {**offbeat.config.DEMO, "run": {"steps": 40, "dir": str(tmp_path), "name": "a"}}
    offbeat.train({**config, "log": {"console": "quiet"}})
    assert [event for event in read_events(tmp_path / "a" / "events.jsonl") if event["event"] == "advice"] == []
