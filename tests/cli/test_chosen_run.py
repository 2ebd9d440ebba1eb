"""Commands about a run work in every folder, whatever the folder that the run was started in."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from real_command import QUICK, command_in

from offbeat.cli.chosen_run import where_it_started
from offbeat.cli.main import main
from offbeat.config import load
from offbeat.launch.run_folder import RunFolder
from offbeat.ledger.ledger import Ledger
from offbeat.model.loading import TINY_FOLDER

REWARD = "def right(response, answer):\n    return float(answer in response)\n"


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run `project/runs/a` of the model `project/model`; the current folder is another one."""
    project, elsewhere = tmp_path / "project", tmp_path / "elsewhere"
    project.mkdir()
    elsewhere.mkdir()
    shutil.copytree(TINY_FOLDER, project / "model")
    monkeypatch.chdir(project)
    with RunFolder.create(load(None, ["--run.name=a", "--model.path=model"])) as folder:
        Ledger(folder.ledger).close()
    monkeypatch.chdir(elsewhere)
    return project / "runs" / "a"


def test_work_on_a_run_is_done_in_the_folder_that_it_was_started_in(elsewhere):
    here = Path.cwd()
    with where_it_started(Path("../project/runs/a")) as run:
        assert Path.cwd() == elsewhere.parent.parent
        assert run.samefile(elsewhere)
    assert Path.cwd() == here


def test_a_run_is_shown_from_another_folder_than_its_model_is_named_from(elsewhere, capsys):
    assert main(["show", str(elsewhere)]) == 0
    assert capsys.readouterr().out == "no training answers yet\n"


def test_a_name_that_no_run_has_is_answered_with_those_that_there_are(elsewhere, monkeypatch, capsys):
    monkeypatch.chdir(elsewhere.parent.parent)
    for words in (["show", "nobody"], ["export", "nobody", "out"], ["train", "--resume", "nobody"]):
        assert main(words) == 2
        assert capsys.readouterr().err == "offbeat: runs/nobody: there is no such run; runs has a\n"


def test_an_export_without_a_folder_does_not_take_the_runs_name_for_one(elsewhere, monkeypatch, capsys):
    monkeypatch.chdir(elsewhere.parent.parent)
    for word in ("a", "runs/a"):
        assert main(["export", word]) == 2
        told = f"offbeat: DIR = '{word}' is a run; name a folder to write to as well: offbeat export {word} MODEL_DIR\n"
        assert capsys.readouterr().err == told


@pytest.mark.full
def test_a_run_of_a_file_and_a_reward_goes_on_from_another_folder(tmp_path):
    project, elsewhere = tmp_path / "project", tmp_path / "elsewhere"
    rows = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(40)]
    task = ("--task.source=file", "--task.path=rows.jsonl", "--task.reward=reward.py:right", "--task.held_out=0.2")
    for folder in (project, elsewhere):
        folder.mkdir()
    (project / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (project / "reward.py").write_text(REWARD)
    shutil.copytree(TINY_FOLDER, project / "model")
    with command_in(project) as offbeat:
        offbeat.succeeds("train", *QUICK, *task, "--model.path=model", "--run.steps=1")
    with command_in(elsewhere) as offbeat:
        offbeat.succeeds("train", "--resume", "../project/runs/a", "--run.steps=2")
        told = offbeat.succeeds("eval", "../project/runs/a")
        assert told.split()[:2] == ["task", "rows"]
        assert "eval_mean@1" in told
        offbeat.succeeds("export", "../project/runs/a", "trained")
        assert (elsewhere / "trained" / "model.safetensors").is_file()
        assert "eval_mean@1" in offbeat.succeeds("eval", "trained", "../project/runs/a")
