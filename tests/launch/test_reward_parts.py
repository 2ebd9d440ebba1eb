"""Rewards of several parts in whole runs: weights, positions, the penalty for length, and what metrics tell of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import offbeat
from offbeat.errors import UserError
from offbeat.ledger.ledger import Ledger
from offbeat.observability.metric_files import read_metrics


def config(folder: Path, **reward) -> dict:
    return {
        "run": {"dir": str(folder), "name": "run", "steps": 2, "threads": 1},
        "batch": {"groups_per_step": 2, "group_size": 3},
        "reward": reward,
        "rollout": {"max_new_tokens": 6, "slots": 16},
        "eval": {"every": 2, "prompts": 3},
        "log": {"console": "quiet"},
    }


def parts(response: str, answer: str) -> dict[str, float]:
    return {"right": float(answer in response), "characters": float(len(response))}


def test_weights_and_the_penalty_are_stored_with_the_parts_and_metrics_show_them_raw(tmp_path):
    weights = {"characters": -0.25, "overlong": 2.0}
    offbeat.train(config(tmp_path, weights=weights, overlong_tokens=4), reward=parts)
    members, evaluated = [], []
    with Ledger(tmp_path / "run" / "ledger.sqlite", read_only=True) as ledger:
        assert ledger.verify().violations == ()
        for row, trajectory in ledger.walk_trajectories():
            look = ledger.task_detail(row.task)
            by_name = {part.name: part for part in look.rewards}
            assert (by_name["right"].weight, by_name["characters"].weight) == (1.0, -0.25)
            total = by_name["right"].value - 0.25 * by_name["characters"].value
            if row.purpose == "eval":
                evaluated.append(by_name.keys())
            else:
                members.append({name: part.value for name, part in by_name.items()})
                assert by_name["overlong"].value == -max(0, trajectory.num_tokens - 2) / 4
                total += 2.0 * by_name["overlong"].value
            assert look.reward == pytest.approx(total, abs=1e-12)
    assert evaluated == [{"right", "characters"}] * 6
    rows = [row for row in read_metrics(tmp_path / "run" / "metrics.jsonl") if "reward" in row]
    for name in ("right", "characters", "overlong"):
        mean = sum(member[name] for member in members) / len(members)
        assert sum(row[f"part/{name}"] for row in rows) / 2 == pytest.approx(mean)


def test_a_reward_of_one_number_has_no_parts_to_show(tmp_path):
    offbeat.train(config(tmp_path))
    assert not [
        key for row in read_metrics(tmp_path / "run" / "metrics.jsonl") for key in row if key.startswith("part/")
    ]


def test_a_reward_may_say_where_it_was_earned_and_nowhere_else(tmp_path):
    def placed(response, tokens):
        last = len(tokens) - 1
        return [(min(0, last), 1.0, "begun"), (-1 if last < 3 else last + 1, 0.5, "ended")]

    offbeat.train(
        {**config(tmp_path, max_failure_share=1.0), "run": {**config(tmp_path)["run"], "steps": 1}}, reward=placed
    )
    with Ledger(tmp_path / "run" / "ledger.sqlite", read_only=True) as ledger:
        looks = [(ledger.task_detail(row.task), found.num_tokens) for row, found in ledger.walk_trajectories()]
    assert {num_tokens > 3 for _, num_tokens in looks} == {True, False}
    for look, num_tokens in looks:
        if num_tokens > 3:
            assert look.error == (
                f"value: the reward 'ended' is at position {num_tokens}, outside its answer of {num_tokens} tokens"
            )
        else:
            assert [(part.position, part.name) for part in look.rewards] == [(0, "begun"), (-1, "ended")]


def test_a_weight_of_a_part_that_the_reward_does_not_give_stops_the_run_before_it_begins(tmp_path):
    with pytest.raises(UserError, match=r"^reward\.weights\.rigth = 2: .*did you mean 'right'\?$"):
        offbeat.train(config(tmp_path, weights={"rigth": 2}), reward=parts)
    assert not (tmp_path / "run" / "ledger.sqlite").exists()


def test_a_reward_is_tried_on_a_problem_of_each_task_that_it_judges(tmp_path):
    for name, column, unit in (("one", "answer", " apples"), ("two", "solution", "")):
        rows = [json.dumps({"prompt": f"{i}+1=", column: f"{i + 1}{unit}"}) for i in range(4)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(rows))
    (tmp_path / "judge.py").write_text("def reward(response, answer):\n    return int(answer) / 9\n")
    reward = f"{tmp_path}/judge.py:reward"
    task = [
        {"source": "file", "path": str(tmp_path / f"{name}.jsonl"), "prompt": "prompt", "reward": reward}
        for name in ("one", "two")
    ]
    task[1]["answer"] = "solution"
    with pytest.raises(UserError, match=r"its trial on task one failed: "):
        offbeat.train({**config(tmp_path), "task": task})
