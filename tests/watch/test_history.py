import json

from hypothesis import given
from hypothesis import strategies as st

from offbeat.watch.history import read_metrics, survivors


def trained(attempt: int, *steps: int) -> list[dict]:
    return [{"step": step, "attempt": attempt, "reward": float(attempt)} for step in steps]


def test_a_resumed_run_has_each_step_once_by_its_latest_attempt():
    rows = survivors([*trained(1, 1, 2, 3, 4, 5), *trained(2, 3, 4)])
    assert [(row["step"], row["attempt"]) for row in rows] == [(1, 1), (2, 1), (3, 2), (4, 2)]


def test_an_evaluation_told_late_joins_its_step_and_undoes_nothing():
    evaluation = {"step": 2, "attempt": 2, "eval_mean@1": 0.5}
    rows = survivors([*trained(1, 1, 2, 3), evaluation, *trained(2, 4)])
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert (rows[1]["reward"], rows[1]["eval_mean@1"]) == (1.0, 0.5)


def test_an_evaluation_of_an_undone_step_goes_with_it():
    rows = survivors([*trained(1, 1, 2), {"step": 2, "attempt": 1, "eval_mean@1": 0.5}, *trained(2, 2)])
    assert "eval_mean@1" not in rows[1]


@given(st.lists(st.tuples(st.integers(0, 8), st.integers(1, 8)), min_size=1, max_size=5))
def test_survivors_are_the_steps_of_an_uninterrupted_run(attempts):
    rows, at = [], 0
    for number, (back, forward) in enumerate(attempts, start=1):
        first = max(0, at - back) + 1
        at = first + forward - 1
        rows += trained(number, *range(first, at + 1))
    assert [row["step"] for row in survivors(rows)] == list(range(1, at + 1))


def test_half_a_line_at_the_end_is_not_read(tmp_path):
    file = tmp_path / "metrics.jsonl"
    file.write_text(json.dumps({"step": 1, "reward": 0.5}) + '\n{"step": 2, "rew')
    assert read_metrics(file) == [{"step": 1, "reward": 0.5}]
    assert read_metrics(tmp_path / "none.jsonl") == []
