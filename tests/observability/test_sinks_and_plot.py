import importlib.util
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from offbeat.errors import UserError
from offbeat.observability.plot import draw_rewards, plot_rewards, smooth
from offbeat.observability.sinks import check_sinks, numbers, open_sinks


def test_a_missing_package_is_told_with_the_line_that_installs_it(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r'pip install "offbeat\[wandb\]"'):
        check_sinks(["wandb"])


def test_only_numbers_are_drawn():
    row = {"step": 3, "attempt": 1, "reward": 0.5, "samples": 4, "finished": True, "gap": None, "name": "x"}
    assert numbers(row) == {"reward": 0.5, "samples": 4.0}


def test_tensorboard_gets_every_number_at_its_step(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    (sink,) = open_sinks(["tensorboard", "tensorboard"], tmp_path, "offbeat", {})
    sink.log({"step": 3, "reward": 0.5, "length": 6.0})
    sink.close()
    (file,) = (tmp_path / "tensorboard").iterdir()
    found = {(value.tag, event.step) for event in EventFileLoader(str(file)).Load() for value in event.summary.value}
    assert found == {("reward", 3), ("length", 3)}


def test_a_picture_is_drawn_of_what_there_is(tmp_path):
    pytest.importorskip("matplotlib")
    rows = [{"step": 0, "eval_mean@1": 0.1}, *({"step": s, "reward": s / 50} for s in range(1, 51))]
    assert plot_rewards(rows, tmp_path / "reward.png", "a run")
    assert (tmp_path / "reward.png").read_bytes().startswith(b"\x89PNG")
    assert not plot_rewards([{"step": 0, "eval_mean@1": 0.1}], tmp_path / "none.png")
    assert not (tmp_path / "none.png").exists()


def test_a_short_runs_picture_has_whole_steps_and_no_running_mean():
    pytest.importorskip("matplotlib")
    figure = draw_rewards([{"step": n, "reward": n / 10} for n in (1, 2, 3)], "a run")
    (axes,) = figure.axes
    assert axes.get_title(loc="left") == "a run"
    assert all(step == int(step) for step in axes.get_xticks())
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["training reward"]


def test_a_running_mean_is_labelled_with_its_window():
    pytest.importorskip("matplotlib")
    figure = draw_rewards([{"step": n, "reward": n / 100} for n in range(1, 76)])
    labels = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    assert labels == ["training reward", "mean of 3 steps"]
    assert smooth([0.0, 3.0, 0.0, *[0.0] * 72])[:4] == [1.5, 1.0, 1.0, 0.0]


@pytest.mark.parametrize("value, low, high", [(0.0, -0.02, 1.02), (1.0, -0.02, 1.02), (-3.0, -3.5, -2.5)])
def test_a_constant_reward_is_drawn_as_one(value, low, high):
    pytest.importorskip("matplotlib")
    rows = [{"step": 0, "eval_mean@1": value}, *({"step": n, "reward": value} for n in (1, 2, 3))]
    assert draw_rewards(rows).axes[0].get_ylim() == (low, high)


def test_smoothing_keeps_a_line_straight_and_a_constant_the_same():
    assert smooth([2.0] * 60) == [2.0] * 60
    middle = smooth([float(i) for i in range(60)])[2:-2]
    assert middle == [float(i) for i in range(2, 58)]


def test_wandb_gets_a_run_by_the_folders_name_that_a_resume_goes_on_with(tmp_path, monkeypatch):
    calls: list[Any] = []
    run = SimpleNamespace(define_metric=lambda *_, **__: None, log=calls.append, finish=lambda: calls.append("end"))
    wandb = SimpleNamespace(init=lambda **options: calls.append(options) or run, __spec__=True)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    (tmp_path / "mine").mkdir()
    (sink,) = open_sinks(["wandb"], tmp_path / "mine", "a project", {})
    begun = calls.pop()
    assert (begun["project"], begun["name"], begun["id"], begun["resume"]) == ("a project", "mine", "mine", "allow")
    sink.log({"step": 1, "reward": 0.5})
    sink.close()
    assert calls == [{"step": 1, "reward": 0.5}, "end"]


def test_trackio_gets_a_run_by_the_folders_name_and_its_end(tmp_path, monkeypatch, capsys):
    calls: list[Any] = []
    run = SimpleNamespace(log=lambda row, step: calls.append((step, row)), finish=lambda: calls.append("end"))

    def init(**options):
        print("a greeting")
        calls.append(options)
        return run

    monkeypatch.setitem(sys.modules, "trackio", SimpleNamespace(init=init, __spec__=True))
    (tmp_path / "mine").mkdir()
    (sink,) = open_sinks(["trackio"], tmp_path / "mine", "a project", {})
    begun = calls.pop()
    assert (begun["project"], begun["name"], begun["resume"]) == ("a project", "mine", "allow")
    assert capsys.readouterr().out == ""  # the console's lines are not mixed with it
    sink.log({"step": 1, "reward": 0.5, "finished": True})
    sink.close()
    assert calls == [(1, {"reward": 0.5}), "end"]
