"""Rows from Python: what may be given, and what is recorded."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pandas
import pytest
from datasets import Dataset, DatasetDict

from offbeat.data import rows as module
from offbeat.data.rows import record
from offbeat.errors import UserError

ROWS = [{"prompt": f"{i}+1=", "answer": i + 1, "tags": [{"b": 1.5}]} for i in range(5)]


def recorded(rows, tmp_path: Path, **task) -> list[dict]:
    settings = record(rows, tmp_path / "rows.jsonl", task, "task")
    assert settings["source"] == "file"
    return [json.loads(line) for line in Path(settings["path"]).read_text().splitlines()]


@pytest.mark.parametrize(
    "rows",
    [ROWS, tuple(ROWS), (row for row in ROWS), Dataset.from_list(ROWS), pandas.DataFrame(ROWS)],
    ids=["list", "tuple", "generator", "dataset", "frame"],
)
def test_rows_of_every_kind_are_recorded_alike(rows, tmp_path):
    assert recorded(rows, tmp_path) == ROWS


def test_numbers_and_arrays_of_numpy_become_plain(tmp_path):
    row = {"prompt": "a", "answer": np.int64(3), "points": np.array([1.5, 2.5]), "deep": [{"x": np.float32(0.5)}]}
    assert recorded([row], tmp_path) == [
        {"prompt": "a", "answer": 3, "points": [1.5, 2.5], "deep": [{"x": 0.5}]},
    ]


def test_chats_are_recognised_by_their_first_row(tmp_path):
    chat = [{"role": "user", "content": "1+1?"}]
    assert record([{"prompt": chat}], tmp_path / "rows.jsonl", {}, "task")["messages"] == "prompt"
    assert "messages" not in record(ROWS, tmp_path / "rows.jsonl", {}, "task")


@pytest.mark.parametrize(
    "rows, told",
    [
        ([], "^task: has no rows"),
        (
            [{"question": "a"}],
            r"^task: row 1 has no column 'prompt'; it has question; name .* \"prompt\": \"question\"}$",
        ),
        ([*ROWS, {"prompt": 3}], "^task: row 6: prompt is 3, an int; a prompt must be text"),
        ([*ROWS, "a"], "^task: row 6 is 'a', a str; give a dict"),
        (["a"], "^task: row 1 is 'a', a str; give a dict"),
        (DatasetDict(train=Dataset.from_list(ROWS)), "^task: is a dict with the keys train; give one of its splits"),
        (7, "^task: 7 is an int; give a list of dicts"),
    ],
)
def test_what_is_wrong_is_one_line_with_the_row(rows, told, tmp_path):
    with pytest.raises(UserError, match=told):
        record(rows, tmp_path / "rows.jsonl", {}, "task")


def test_a_column_that_was_named_wrongly_is_not_asked_for_once_more(tmp_path):
    with pytest.raises(UserError, match=r"^task: row 1 has no column 'question'; it has prompt, answer, tags$"):
        recorded(ROWS, tmp_path, prompt="question")
    with pytest.raises(UserError, match=r"^task: row 1 has no column 'promt'; did you mean 'prompt'\?$"):
        recorded(ROWS, tmp_path, prompt="promt")


def test_an_endless_generator_is_found_out(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "MAX_ROWS", 100)
    endless = ({"prompt": str(i)} for i in itertools.count())
    with pytest.raises(UserError, match=r"more than 100 rows; for endless prompts give a function"):
        record(endless, tmp_path / "rows.jsonl", {}, "task")
    assert next(endless) == {"prompt": "101"}, "it was read no further than needed"
