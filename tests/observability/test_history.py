import io
import json
import tempfile
from contextlib import redirect_stderr
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.observability.metric_files import read_events, read_metrics, seconds_before, survivors


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


def test_the_time_of_earlier_attempts_has_their_starts_and_undone_steps_and_of_a_killed_one_what_is_known(tmp_path):
    metrics, events = tmp_path / "metrics.jsonl", tmp_path / "events.jsonl"
    rows = [{**row, "seconds": 2.0} for row in (*trained(1, 1, 2, 3), *trained(2, 3, 4), *trained(3, 5))]
    metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    known = [("end", 1, 9.5), ("reopen", 2, 0.1), ("resume", 2, 1.5), ("reopen", 3, 60.0)]
    told = [{"event": event, "attempt": attempt, "seconds": seconds} for event, attempt, seconds in known]
    events.write_text("".join(json.dumps(row) + "\n" for row in told))
    assert seconds_before(3, metrics, events) == 9.5 + 2 * 2.0
    assert seconds_before(1, metrics, events) == 0.0


def test_half_a_line_at_the_end_is_not_read(tmp_path):
    file = tmp_path / "metrics.jsonl"
    file.write_text(json.dumps({"step": 1, "reward": 0.5}) + '\n{"step": 2, "rew')
    assert read_metrics(file) == [{"step": 1, "reward": 0.5}]
    assert read_metrics(tmp_path / "none.jsonl") == []


GARBAGE = {
    "torn": b'{"step": 2, "rew',
    "binary": bytes(range(128, 140)) + b"\x00\x00",
    "empty": b"",
    "of another type": b"[1, 2]",
    "only a number": b"17",
    "without its step": b'{"reward": 0.5}',
    "with a step of another type": b'{"step": "two", "reward": 0.5}',
    "with an attempt of another type": b'{"step": 2, "attempt": null}',
    "with a figure of another type": b'{"step": 2, "reward": "high"}',
    "nested beyond measure": b"[" * 100_000,
    "a number beyond measure": b'{"step": ' + b"9" * 10_000 + b"}",
}


@pytest.mark.parametrize("kind", GARBAGE)
def test_a_line_that_is_no_row_is_skipped_and_told_once(tmp_path, capsys, kind):
    file = tmp_path / "metrics.jsonl"
    good = [json.dumps(row).encode() for row in trained(1, 1, 2)]
    file.write_bytes(b"\n".join([good[0], GARBAGE[kind], good[1], b""]))
    for _ in range(2):
        assert [row["step"] for row in read_metrics(file)] == [1, 2]
    told = capsys.readouterr().err
    assert told.startswith(f"warning: {file}: line 2 is skipped: ")
    assert told.count("\n") == 1


@given(st.lists(st.binary(max_size=30)))
def test_whatever_bytes_a_file_of_rows_holds_it_can_be_read(lines):
    with tempfile.TemporaryDirectory() as folder, redirect_stderr(io.StringIO()):
        file = Path(folder) / "rows.jsonl"
        file.write_bytes(b"\n".join(lines))
        assert all(isinstance(row, dict) for row in [*read_metrics(file), *read_events(file)])
