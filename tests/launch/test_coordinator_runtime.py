import re
from types import SimpleNamespace

import pytest

import offbeat
from offbeat.coordinator.coordinator import Activity
from offbeat.launch import coordinator_runtime
from offbeat.launch.coordinator_runtime import in_words
from offbeat.observability.console import PlainConsole
from offbeat.observability.metrics import RANK_SECONDS
from offbeat.observability.trace import Trace
from offbeat.tools.page.timeline import Spans

WORKING = {"num_wanted": 64, "num_eval_answers": 0, "num_eval_wanted": 0, "num_workers": 2, "has_version": True}


@pytest.mark.parametrize(
    "activity, text",
    [
        ({"has_version": False}, "waiting for the trainer's first weights"),
        ({"num_workers": 0}, "waiting for the first worker"),
        ({}, "answers 37/64"),
        ({"is_training": True}, "training, answers 37/64"),
        ({"is_training": True, "num_answers": 0}, "training"),
        ({"num_answers": 0, "num_eval_answers": 3, "num_eval_wanted": 8}, "held-out 3/8"),
        ({"num_eval_answers": 3, "num_eval_wanted": 8}, "answers 37/64, held-out 3/8"),
    ],
)
def test_what_a_run_does_is_said_in_a_few_words(activity, text):
    found = Activity(**{**WORKING, "num_answers": 37, "is_training": False, **activity})
    assert in_words(found, "", had_worker=False) == text


def test_the_engines_rate_is_a_sign_of_life_while_the_first_answers_are_long():
    found = Activity(**{**WORKING, "num_answers": 0, "is_training": False})
    assert in_words(found, "local", had_worker=True, tokens_per_second=41.26) == "answers 0/64, 41.3 tokens/s"


def test_who_is_waited_for_depends_on_who_was_there():
    nobody = Activity(**{**WORKING, "num_workers": 0, "num_answers": 0, "is_training": False})
    assert in_words(nobody, "local", had_worker=False) == "starting the engine"
    assert in_words(nobody, "", had_worker=True) == "waiting for a worker"
    told = in_words(nobody, "", "vllm", had_worker=False)
    assert told == "waiting for the first worker; vllm takes a minute or two to start"


def test_something_moves_within_the_steps_of_a_real_run(tmp_path, monkeypatch):
    told: list[str] = []
    monkeypatch.setattr(coordinator_runtime, "ACTIVITY_EVERY_S", 0.01)
    monkeypatch.setattr(PlainConsole, "doing", lambda console, text: told.append(text))
    config = {
        "run": {"dir": str(tmp_path), "steps": 4, "threads": 1},
        "batch": {"groups_per_step": 4, "group_size": 4},
        "rollout": {"slots": 4},
        "eval": {"every": 2, "prompts": 8},
        "log": {"console": "quiet"},
    }
    offbeat.train(config)
    counts = [[int(n) for n in found] for text in told for found in re.findall(r"answers (\d+)/(\d+)", text)]
    assert {wanted for _, wanted in counts} == {16}
    assert len({num for num, _ in counts}) > 2
    assert all(0 <= num <= 16 for num, _ in counts)
    assert any(re.search(r"held-out [1-7]/8", text) for text in told)
    assert any(re.search(r"answers \d+/16, .* tokens/s$", text) for text in told)


def test_each_rank_of_a_trainer_has_a_lane_of_its_own_and_its_seconds_are_no_metric(tmp_path):
    trace, rows = Trace(tmp_path / "trace.json"), []
    reporter = SimpleNamespace(folder=SimpleNamespace(trace=trace), report=rows.append)
    for step in (1, 2):
        row = {"step": step, "time_wait_s": 0.5, "time_train_s": 2.0, "time_publish_s": 0.25}
        coordinator_runtime._report_and_trace(reporter, row | {RANK_SECONDS: (1.5, 1.75)})
    trace.close()
    assert rows[0] == {"step": 1, "time_wait_s": 0.5, "time_train_s": 2.0, "time_publish_s": 0.25}
    spans = Spans(tmp_path)
    spans.read_all()
    seen = spans.window()
    sums = {(spans.tracks[track], spans.names[name]): seconds for track, name, _, seconds in seen["sums"]}
    assert sums["trainer", "train"] == pytest.approx(4.0, rel=1e-3)
    ranks = [sums[f"trainer rank {rank}", "train"] for rank in (0, 1)]
    assert ranks == [pytest.approx(3.0, rel=1e-3), pytest.approx(3.5, rel=1e-3)]
    assert max(span[5] for span in seen["spans"]) <= 2, "a step counts once, however many ranks trained it"
