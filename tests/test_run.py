"""`offbeat.train` and the `Run` that it returns: whole runs of the shipped model, small enough to be quick."""

from __future__ import annotations

import json
import shutil
import signal
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import offbeat
from offbeat.config import from_dict
from offbeat.errors import OffbeatError, UserError
from offbeat.launch.run_folder import RunFolder
from offbeat.observability.metric_files import read_events

ROWS = [{"prompt": f"{a}+{b}=", "answer": a + b, "level": a % 2} for a in range(1, 13) for b in range(1, 13)]
SMALL = {
    "batch": {"groups_per_step": 2, "group_size": 2},
    "rollout": {"max_new_tokens": 6, "slots": 8},
    "eval": {"every": 2, "prompts": 4},
    "log": {"console": "quiet"},
}


def train(folder: Path, name: str, **given: Any) -> offbeat.Run:
    given = {"task": ROWS, "reward": right, "steps": 2, **SMALL, **given}
    return offbeat.train(name=name, run={"dir": str(folder), "threads": 1}, **given)


def right(completions, answer, **columns):
    """A reward written for TRL; the answers are numbers, as in the rows."""
    return [float(text.split()[-1:] == [str(sum_)]) for text, sum_ in zip(completions, answer, strict=True)]


def says(response):
    return "good"


async def brief(response):
    return -len(response) / 100


def until(condition, within_s: float = 60.0) -> None:
    deadline_s = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline_s, "waited too long"
        time.sleep(0.02)


@pytest.fixture(scope="module")
def seen() -> list[dict[str, Any]]:
    """The rows that the callback of `run` got."""
    return []


@pytest.fixture(scope="module")
def run(tmp_path_factory, seen) -> offbeat.Run:
    rewards = {"right": (right, 2.0), "brief": brief}
    return train(tmp_path_factory.mktemp("runs"), "first", reward=rewards, callbacks=[seen.append])


def test_a_run_has_its_figures(run):
    assert run.summary["steps"] == 2
    assert [row["step"] for row in run.metrics] == [0, 1, 2]
    frame = run.frame()
    assert list(frame.index) == [0, 1, 2]
    assert frame.loc[2, "reward"] == run.metrics[2]["reward"]
    assert list(frame[["step", "reward"]].dropna().step) == [1, 2]
    assert repr(run) == f"<offbeat.Run {run.path}: finished, step 2 of 2>"
    assert "held-out" in run._repr_html_()


def test_its_parts_are_those_of_its_rewards(run):
    row = run.metrics[-1]
    assert row["reward"] == pytest.approx(2 * row["part/right"] + row["part/brief"])
    assert run.config.reward.weights == {"right": 2.0}


def test_its_configuration_names_the_rows_in_its_folder(run):
    (task,) = run.config.task
    assert Path(task.path) == run.path / "tasks" / "rows.jsonl"
    assert [json.loads(line) for line in Path(task.path).read_text().splitlines()] == ROWS


def test_callbacks_get_every_row_of_steps_and_of_evaluations(run, seen):
    assert [row["step"] for row in seen if "reward" in row] == [1, 2]
    assert sorted(row["step"] for row in seen if "eval_mean@1" in row) == [0, 2]


def test_a_run_is_opened_again_by_its_path(run):
    again = offbeat.Run(run.path)
    assert (again.summary, again.metrics, again.config) == (run.summary, run.metrics, run.config)
    assert (again.is_running, again.wait(), again.stop()) == (False, again, again)
    with pytest.raises(UserError, match="there is no such run"):
        offbeat.Run(run.path / "nowhere")


def test_it_draws_looks_evaluates_and_exports(run, tmp_path, capsys):
    from matplotlib.figure import Figure

    figure = run.plot()
    assert isinstance(figure, Figure)
    assert figure._repr_png_().startswith(b"\x89PNG")
    answers = run.trajectories(purpose="train")
    assert len(answers) == 8
    assert {row["step"] for row in answers} == {1, 2}
    assert all(row["reward"] == pytest.approx(2 * row["parts"]["right"] + row["parts"]["brief"]) for row in answers)
    assert len(run.trajectories(step=2, purpose="train", limit=3)) == 3
    figures = run.evaluate(prompts=3, samples=2)
    assert figures["eval_prompts"] == 3
    assert "eval_mean@2" in figures
    assert capsys.readouterr().err == ""
    assert run.evaluate(prompts=500)["eval_prompts"] == 6
    assert capsys.readouterr().err.startswith("warning: eval.prompts = 500: the tasks hold out only 6 prompts, ")
    assert (run.export(tmp_path / "model") / "model.safetensors").is_file()


def test_a_moved_run_is_resumed_with_its_own_rows_and_rewards_given_again(run, tmp_path):
    shutil.copytree(run.path, tmp_path / "first")
    moved = offbeat.Run(tmp_path / "first")
    shutil.move(run.path / "tasks", run.path / "hidden")
    try:
        with pytest.raises(UserError, match=r'its reward, right\+brief, .* Python .*/first"\)\.resume\(reward='):
            moved.resume(steps=3)
        new: list[dict[str, Any]] = []
        rewards = {"right": (right, 2.0), "brief": brief}
        assert moved.resume(steps=3, reward=rewards, callbacks=[new.append]) is moved
        assert {row["step"] for row in new} == {3}, "the evaluation of step 2 is not reported again"
    finally:
        shutil.move(run.path / "hidden", run.path / "tasks")
    assert (moved.summary["steps"], len(moved.metrics)) == (3, 4)
    assert run.summary["steps"] == 2, "the original is as it was"


@pytest.fixture(scope="module")
def stopped(tmp_path_factory) -> offbeat.Run:
    """A run that trained in the background and was stopped."""
    run = train(tmp_path_factory.mktemp("runs"), "behind", steps=5000, eval={"every": 0}, wait=False)
    assert run.is_running
    assert "training, step" in repr(run)
    with pytest.raises(TimeoutError, match=r"is still training after 0\.01 s"):
        run.wait(0.01)
    with pytest.raises(UserError, match="is training already"):
        run.resume()
    until(lambda: len(run.metrics) >= 2)
    return run.stop()


def test_a_run_in_the_background_stops_with_a_checkpoint(stopped):
    assert (stopped.is_running, stopped.summary["finished"], stopped.summary["stopped_by"]) == (False, False, "stop()")
    steps = stopped.summary["steps"]
    assert (stopped.path / "checkpoints" / f"{steps:08d}").is_dir()
    assert "stopped by stop()" in repr(stopped)


def test_it_goes_on_with_its_rewards_and_says_what_to_call_next(stopped, capsys):
    steps = stopped.summary["steps"]
    assert stopped.resume(steps=steps + 1, log={"console": "plain"}) is stopped
    assert (stopped.summary["steps"], stopped.summary["finished"]) == (steps + 1, True)
    told = capsys.readouterr().out
    assert f"run.resume(steps={2 * (steps + 1)})" in told
    assert "offbeat train" not in told


def test_what_a_resume_refuses_changes_nothing(stopped):
    state, config = repr(stopped), (stopped.path / "config.json").read_text()
    trained = stopped.metrics[-1]["step"]
    for given, told in (
        ({"steps": "8"}, "run.steps"),
        ({"steps": trained - 1}, f"run.steps = {trained - 1}: .* has trained {trained} steps already; set it above"),
        ({"steps": trained + 1, "reward": always_fails}, "its trial failed"),
    ):
        with pytest.raises(UserError, match=told):
            stopped.resume(**given)
        assert not stopped.is_running
        assert (stopped.path / "config.json").read_text() == config
        stopped.stop()  # returns at once
    assert repr(offbeat.Run(stopped.path)) == state


def always_fails(response):
    raise ValueError("no")


def test_a_callback_ends_the_run(tmp_path):
    run = train(tmp_path, "a", steps=50, callbacks=[lambda row: offbeat.STOP if row["step"] == 2 else None])
    assert (run.summary["steps"], run.summary["stopped_by"]) == (2, "callback <lambda>")


class Logger:
    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.is_closed = False

    def log(self, row: dict[str, Any]) -> None:
        self.rows.append(row)

    def close(self) -> None:
        self.is_closed = True


def test_a_callback_that_raises_gets_no_more_rows_and_the_run_goes_on(tmp_path, capsys):
    num_calls, logger = [], Logger()

    def broken(row):
        num_calls.append(1)
        raise LookupError("no such chart")

    run = train(tmp_path, "a", callbacks=broken, loggers=logger, eval={"every": 0})  # each may be a single one
    assert (run.summary["finished"], len(num_calls)) == (True, 1)
    assert [row["step"] for row in logger.rows] == [1, 2]
    assert logger.is_closed
    (line,) = (line for line in capsys.readouterr().err.splitlines() if "broken" in line)
    assert line.startswith("warning: callback broken failed and gets no more metrics: LookupError: no such chart")
    assert "Traceback" in (run.path / "logs" / "offbeat.log").read_text()


@pytest.mark.parametrize(
    "given, told",
    [
        ({"callbacks": [3]}, "^callbacks: 3 is an int; give a function that takes a row"),
        ({"loggers": [print]}, r"^loggers: .* give an object with a method log\(row\)"),
        ({"callbacks": [brief]}, "^callback brief: is async"),
        ({"task": [{"question": "a"}]}, "^task: row 1 has no column 'prompt'"),
        ({"reward": 3}, "^reward: 3 is an int"),
        ({"callbacks": 3}, "^callbacks: 3 is an int; give a function that takes a row"),
        ({"callbacks": "note"}, "^callbacks: 'note' is a str; give a function that takes a row"),
        ({"reward": {"brief": (brief, "x")}}, "^reward: 'brief': the weight 'x' is a str; give .* a number"),
        ({"step": 3}, r"^step = 3: unknown key; did you mean steps\?$"),
    ],
)
@pytest.mark.parametrize("wait", [True, False])
def test_a_wrong_argument_is_refused_at_once_and_leaves_nothing(given, told, wait, tmp_path):
    with pytest.raises(UserError, match=told):
        train(tmp_path, "a", wait=wait, **given)
    assert list(tmp_path.iterdir()) == []


def test_the_trial_of_a_reward_that_returns_a_wrong_value_leaves_no_log_behind(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(UserError, match=r"^reward says: its trial failed: the reward returned 'good', a str; [^;]*$"):
        train(tmp_path, "a", reward=says)
    assert list(tmp_path.iterdir()) == []


def test_a_row_whose_prompt_is_too_long_is_named_by_its_place_in_the_argument(tmp_path):
    rows = [{"prompt": "1+1=", "answer": 2}, {"prompt": "1+" * 99, "answer": 2}]
    with pytest.raises(UserError, match=r"^row 2 of task=: its prompt has 198 tokens"):
        train(tmp_path, "a", task=rows, reward="exact")
    with pytest.raises(UserError, match=r"^row 2 of task=\[\.\.\.\] \(rows-2\): its prompt has 198 tokens"):
        train(tmp_path, "a", task=[{"rows": rows[:1]}, {"rows": rows}], reward="exact")


def test_a_name_in_use_and_a_run_that_is_not_there_are_told_in_words_of_python(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    RunFolder.create(from_dict({"run": {"name": "sums"}})).close()
    (tmp_path / "runs" / "sums" / "metrics.jsonl").write_text("{}\n")
    with pytest.raises(
        UserError, match=r'^runs/sums: this run exists; .* resume="runs/sums", or choose another name=$'
    ):
        offbeat.train(name="sums")
    for name in ("sum", "runs/sum"):
        with pytest.raises(UserError, match=r"^runs/sum: there is no such run; runs has sums$"):
            offbeat.train(resume=name)


def test_an_error_in_the_background_is_told_and_raised_by_wait(tmp_path, capsys):
    (tmp_path / "sour.py").write_text("def loss(tokens, settings):\n    return tokens.logprobs * float('nan')\n")
    run = train(tmp_path, "a", loss={"name": f"{tmp_path}/sour.py:loss"}, wait=False)
    with pytest.raises(OffbeatError, match="not finite"):
        run.wait(60)
    assert "failed, step" in repr(run)
    assert "offbeat: training has failed: " in capsys.readouterr().err


def test_ctrl_c_while_waiting_stops_the_run(tmp_path):
    run = train(tmp_path, "a", steps=5000, eval={"every": 0}, wait=False)
    main = threading.main_thread().ident

    def interrupt():
        until(lambda: len(run.metrics) >= 2)
        signal.pthread_kill(main, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    run.wait(60)
    thread.join()
    assert (run.summary["finished"], run.summary["stopped_by"]) == (False, "SIGINT")


@pytest.mark.full
def test_worker_processes_get_functions_and_rows_callbacks_and_a_stop(tmp_path):
    steps: list[int] = []
    functions = {"right": right, "brief": brief}

    def note(row):
        steps.append(row["step"])
        return offbeat.STOP if row["step"] >= 2 else None

    rollout = {**SMALL["rollout"], "workers": 1}
    run = train(
        tmp_path, "a", steps=5000, reward=functions, rollout=rollout, eval={"every": 0}, callbacks=[note], wait=False
    )
    run.wait(240)
    assert steps[:2] == [1, 2]
    assert (run.summary["stopped_by"], run.summary["steps"]) == ("callback note", steps[-1])
    assert {"part/right", "part/brief"} <= run.metrics[-1].keys()
    assert (run.path / "tasks" / "rows.jsonl").is_file()
    assert {event["event"] for event in read_events(run.path / "events.jsonl")} >= {"serve", "checkpoint", "end"}
    with pytest.raises(OffbeatError, match="could not start"):
        train(tmp_path, "b", reward=lambda solution: 1.0, rollout=rollout)
    assert not (tmp_path / "b").exists()


def test_the_package_shows_its_public_names_and_its_version():
    from importlib.metadata import version

    assert dir(offbeat) == sorted(offbeat.__all__)
    assert all(getattr(offbeat, name) for name in dir(offbeat))
    assert offbeat.__version__ == version("offbeat")
