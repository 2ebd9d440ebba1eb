"""A run is evaluated as it is: its newest weights, its own tasks and rewards, with no export by hand."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest

from offbeat.cli.main import main
from offbeat.errors import UserError
from offbeat.launch import local
from offbeat.launch.given import Given
from offbeat.tools.evaluate import evaluate_run

SMALL = {
    "run.steps": 2,
    "run.threads": 1,
    "run.name": "a",
    "batch.groups_per_step": 2,
    "batch.group_size": 2,
    "eval.prompts": 4,
    "log.console": "quiet",
}
REWARD = "def reward(response, answer):\n    return 3.0\n"
ROWS = "".join(json.dumps({"question": f"{n}+{n}=", "answer": str(2 * n)}) + "\n" for n in range(1, 17))
TASK = """
[[task]]
source = "file"
path = "sums.jsonl"
prompt = "question"
held_out = 0.5
reward = "three.py:reward"
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on a task of its own, whose reward is always 3."""
    folder = tmp_path_factory.mktemp("evaluate")
    (folder / "sums.jsonl").write_text(ROWS)
    (folder / "three.py").write_text(REWARD)
    (folder / "own.toml").write_text(TASK)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert main(["train", "own.toml", *(f"--{key}={value}" for key, value in SMALL.items())]) == 0
    return folder


def figures(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, float]:
    assert main(["eval", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.full
def test_a_run_and_its_exported_model_are_scored_on_the_runs_own_tasks(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    scratch = folder / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    of_run = figures(capsys, "runs/a")
    assert of_run["eval_mean@1"] == 3.0, "by the run's own reward"
    assert figures(capsys) == of_run, "the newest run"
    assert evaluate_run(Path("runs/a")) == of_run
    assert main(["export", "a", "model"]) == 0
    line = capsys.readouterr().out.strip().partition("try offbeat eval ")[2]
    assert figures(capsys, *line.split()) == of_run
    assert evaluate_run(Path("runs/a"), prompts=2, samples=2)["eval_prompts"] == 2
    assert not any(scratch.iterdir()), "neither weights nor an empty log stay behind"


def test_a_reward_that_came_from_python_must_come_from_there_again(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)

    def two(response: str) -> float:
        return 2.0

    from offbeat.config import load

    given = {**SMALL, "run.name": "b"}
    local.train(load(None, [f"--{key}={value}" for key, value in given.items()]), given=Given(two))
    with pytest.raises(UserError, match=r'^runs/b: its reward, two, was given from Python.*"runs/b"\).*\.evaluate\('):
        evaluate_run(Path("runs/b"))
    for words in (["eval", "runs/b"], ["train", "--resume", "runs/b", "--run.steps=3"]):
        assert main(words) == 2
        told = capsys.readouterr().err
        assert "was given from Python" in told
        assert told.count("\n") == 1
    assert evaluate_run(Path("runs/b"), reward=two)["eval_mean@1"] == 2.0
