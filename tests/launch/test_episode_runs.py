"""Runs with tools and environments: what is refused before anything starts, and a run from its start to its answers."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from pathlib import Path

import pytest
from doc_reader import ROOT

from offbeat.config import from_dict
from offbeat.config.schema import Config
from offbeat.errors import UserError
from offbeat.launch import local
from offbeat.launch.episode_parts import describe
from offbeat.ledger.ledger import Ledger

CODE = '''
from offbeat.environments.protocol import Done

def add(a: int, b: int) -> int:
    """Adds."""
    return a + b

def silent(a: int) -> int:
    return a

class Game:
    def __init__(self, size: int = 3):
        pass
    def begin(self, problem, seed):
        return "go"
    def step(self, turn):
        return Done(1.0)

class Broken(Game):
    def begin(self, problem, seed):
        raise RuntimeError("no such level")

class Half:
    def begin(self, problem, seed):
        pass
'''


def a_config(task: dict, **more: dict) -> Config:
    return from_dict({"task": [task], **more})


@pytest.mark.parametrize(
    ("task", "more", "why"),
    [
        ({"tools": ["{file}:silent"]}, {}, "silent has no docstring"),
        ({"tools": ["{file}:add", "{file}:add"]}, {}, "both have a tool named 'add'"),
        ({"tools": ["{file}:nobody"]}, {}, "has no function 'nobody'"),
        ({"source": "environment", "path": "{file}:Half"}, {}, "it has no method 'step'"),
        ({"source": "environment", "path": "{file}:Broken"}, {}, "begin failed: RuntimeError: no such level"),
        ({"source": "environment", "path": "{file}:Game", "options": {"sise": 4}}, {}, "task.options of .*sise"),
        ({"source": "environment", "path": "{file}:Game"}, {"run": {"exact": True}}, "deterministic = True"),
    ],
    ids=["no docstring", "clash", "missing", "no step", "begin raises", "options", "exact"],
)
def test_what_cannot_work_is_refused_in_one_line_before_anything_starts(tmp_path, task, more, why):
    file = tmp_path / "mine.py"
    file.write_text(CODE)
    text = json.dumps({"source": "arithmetic", **task}).replace("{file}", str(file))
    with pytest.raises(UserError, match=why) as refusal:
        asyncio.run(describe(a_config(json.loads(text), **more)))
    assert "\n" not in str(refusal.value)


def test_tools_do_not_go_together_with_waiting_for_answers_before_weights_are_loaded():
    overlap = {"mode": "overlap", "new_version": "finish"}
    with pytest.raises(UserError, match=r'schedule\.new_version = "finish": cannot be used with tools'):
        a_config({"source": "arithmetic", "tools": ["a.py:b"]}, schedule=overlap)


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """Two steps of the calculator's example."""
    folder = tmp_path_factory.mktemp("runs")
    file = ROOT / "examples" / "calculator.py"
    task = {
        "source": "function",
        "path": f"{file}:problem",
        "reward": f"{file}:reward",
        "tools": [f"{file}:calculator"],
    }
    config = a_config(
        task,
        run={"dir": str(folder), "name": "a", "steps": 2},
        model={"path": "offbeat-tiny-tools"},
        batch={"groups_per_step": 4, "group_size": 4},
        rollout={"max_prompt_tokens": 16, "max_new_tokens": 48, "slots": 16},
        environment={"max_turns": 3, "max_turn_tokens": 16},
        eval={"every": 0},
        log={"console": "quiet"},
    )
    local.train(config)
    return folder / "a"


@pytest.mark.full
def test_a_run_with_a_tool_trains_on_sampled_tokens_alone(run):
    with Ledger(run / "ledger.sqlite", read_only=True) as ledger:
        assert ledger.verify().violations == ()
    connection = sqlite3.connect(run / "ledger.sqlite")
    totals = connection.execute("SELECT SUM(num_tokens), SUM(num_sampled_tokens), MAX(num_turns) FROM trajectories")
    num_tokens, num_sampled, most_turns = totals.fetchone()
    (num_trained,) = connection.execute("SELECT SUM(num_trained_tokens) FROM batches").fetchone()
    connection.close()
    assert num_trained == num_sampled < num_tokens
    assert most_turns >= 2


@pytest.mark.full
def test_metrics_tell_turns_and_calls(run):
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "reward" in row]
    assert all(1 <= row["turns"] <= 3 and row["calls"] > 0 and row["cut_calls"] == 0 for row in steps)
