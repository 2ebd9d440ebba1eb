"""A step that meets NaN: real runs stop before the update, keep the batch, and go on as if nothing had been."""

import json
import re
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file

from offbeat.cli.main import main
from offbeat.ledger.ledger import Ledger
from offbeat.ledger.reports import TrajectoryFilter
from offbeat.tools.export import export_run
from offbeat.trainer import not_finite

QUICK = (
    *("--batch.groups-per-step=2", "--batch.group-size=4", "--rollout.slots=16", "--rollout.max-new-tokens=6"),
    *("--eval.every=0", "--run.threads=1", "--log.console=quiet", "--run.exact=true", "--run.steps=4"),
    *("--loss.name=sour.py:loss", "--checkpoint.every=0", "--optimizer.lr=1e-4"),
)
SOUR = """
import os
import torch


def loss(tokens, settings):
    values = -tokens.log_ratio.exp() * tokens.advantages
    with open("runs/a/metrics.jsonl") as rows:
        is_late = len(rows.readlines()) >= 2
    has_moved = float(tokens.log_ratio.detach().abs().max()) > 1e-5
    if is_late and (os.path.exists("sour") or (os.path.exists("sour-after-an-update") and has_moved)):
        first = torch.arange(len(values)) == int(tokens.mask.nonzero()[0])
        values = torch.where(first, torch.nan, values)
    return values
"""


@pytest.fixture(scope="module")
def unspoilt(tmp_path_factory):
    """Weights of the same runs that never met NaN, by updates per step."""
    weights = {}
    for updates in (1, 2):
        folder = tmp_path_factory.mktemp("unspoilt")
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(folder)
            Path("sour.py").write_text(SOUR)
            assert main(["train", *QUICK, "--run.name=a", f"--batch.updates-per-step={updates}"]) == 0
            weights[updates] = final_weights()
    return weights


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("sour.py").write_text(SOUR)


@pytest.fixture
def stopped(capsys):
    """Runs a command that must stop the run; returns its line."""

    def run(*words):
        assert main(words) == 1
        told = capsys.readouterr()
        assert (told.out, told.err.count("\n")) == ("", 1)
        return told.err.strip().removeprefix("offbeat: ")

    return run


def final_weights():
    shutil.rmtree("model", ignore_errors=True)
    export_run(Path("runs/a"), Path("model"))
    return load_file("model/model.safetensors")


def same(one, other):
    return one.keys() == other.keys() and all((one[name] == other[name]).all() for name in one)


def checkpoints():
    return sorted(int(folder.name) for folder in Path("runs/a/checkpoints").iterdir())


def batch_of_step(step):
    """Tasks and answers, as the ledger has them."""
    with Ledger(Path("runs/a/ledger.sqlite"), read_only=True) as ledger:
        assert ledger.verify().violations == ()
        return {
            row.task: ledger.task_detail(row.task).trajectory
            for row in ledger.list_trajectories(100, which=TrajectoryFilter(step=step))
        }


def events(kind):
    rows = [json.loads(line) for line in Path("runs/a/events.jsonl").read_text().splitlines()]
    return [row for row in rows if row["event"] == kind]


@pytest.mark.full
def test_a_run_stops_before_the_update_and_goes_on_with_the_same_batch_as_if_nothing_had_been(
    stopped, unspoilt, capsys
):
    Path("sour").touch()
    line = stopped("train", *QUICK, "--run.name=a")
    file = "runs/a/broken/step-00000003.batch"
    told = r"step 3: the loss is not finite \(task (\d+), token (\d+)\); its batch \(step 3, from version 2\) is kept "
    told += rf"as {file}; to find the cause, run offbeat replay {file}; --resume tries the same batch again: "
    told += r"fix the data or the loss first, or remove runs/a/checkpoints/00000002 and resume with --from-scratch "
    told += r"and a smaller optimizer\.lr"
    task, token = map(int, re.fullmatch(told, line).groups())
    assert checkpoints() == [2]
    (event,) = events("not_finite")
    assert (event["task"], event["token"], event["file"], event["tensor"]) == (task, token, file, "the loss")

    claimed, kept = batch_of_step(3), not_finite.read(Path(file))
    assert {member.task: member.trajectory for member in kept.members} == claimed
    assert kept.members[kept.sample].task == task
    assert kept.members[kept.sample].mask[token]

    before = {path: path.stat().st_mtime_ns for path in Path("runs/a").rglob("*")}
    assert main(["replay", file, "--device=cpu"]) == 1
    out = capsys.readouterr().out
    assert f"now       the loss is not finite (task {task}, token {token})" in out
    assert "forward   every module's output is finite" in out
    assert f"answer of task {task}: " in out
    assert "without the optimizer" not in out
    assert {path: path.stat().st_mtime_ns for path in Path("runs/a").rglob("*")} == before

    Path("sour").unlink()
    assert main(["replay", file]) == 0
    out = capsys.readouterr().out
    assert "now       everything is finite: loss" in out
    assert f"answer of task {task}: " in out, "the sample that was at fault then, not the one with the largest gradient"
    Path("sour").touch()

    shutil.rmtree("runs/a/broken")
    Path("runs/a/broken").write_text("in the way")
    again = stopped("train", "--resume", "runs/a")
    told = rf"step 3: the loss is not finite \(task {task}, token {token}\); its batch .* could not be kept in runs/a/"
    assert re.match(told + "broken: File exists; --resume tries", again)
    assert batch_of_step(3) == claimed

    Path("sour").unlink()
    assert main(["train", "--resume", "runs/a"]) == 0
    assert batch_of_step(3) == claimed
    assert same(final_weights(), unspoilt[1])


@pytest.mark.full
def test_half_a_step_is_never_saved(stopped, unspoilt, capsys):
    Path("sour-after-an-update").touch()
    line = stopped("train", *QUICK, "--run.name=a", "--batch.updates-per-step=2")
    assert line.startswith("step 3: the loss is not finite (task ")
    assert line.endswith("--resume goes back to the start; resume with a smaller optimizer.lr, or check the data")
    assert checkpoints() == []

    file = "runs/a/broken/step-00000003.batch"
    assert main(["replay", file]) == 1
    out = capsys.readouterr().out
    assert "in update 2 of the step" in out
    assert "the optimizer's checkpoint is gone" in out

    Path("sour-after-an-update").unlink()
    assert main(["train", "--resume", "runs/a"]) == 0
    assert same(final_weights(), unspoilt[2])
    assert not Path("runs/a/weights/00000002").exists()
    assert main(["replay", file]) == 0  # its weights stayed
    assert "now       everything is finite: loss" in capsys.readouterr().out


def test_what_cannot_be_replayed_is_told(capsys):
    def refused(*words):
        assert main(["replay", *words]) == 2
        return capsys.readouterr().err.strip().removeprefix("offbeat: ")

    assert refused("x.batch").startswith("x.batch: no such file; give the file that")
    Path("x.batch").write_text("nothing of ours")
    assert refused("x.batch").startswith("x.batch is damaged or not a saved batch")
    Path("runs/a/broken").mkdir(parents=True)
    assert refused("runs/a") == "runs/a is a folder; give a file broken/*.batch of a run; this folder has none"
    Path("runs/a/broken/step-00000003.batch").touch()
    assert refused("runs/a").endswith("such as runs/a/broken/step-00000003.batch")
