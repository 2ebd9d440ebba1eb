import datetime
import json
import time

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from datasets import Dataset, DatasetDict
from hypothesis import given
from hypothesis import strategies as st

from offbeat.data.files import DatasetRows, FileSource, open_file, permutation
from offbeat.errors import UserError

ROWS = [{"prompt": f"question {i}", "answer": i, "level": i % 3} for i in range(200)]


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(params=["jsonl", "parquet", "dataset", "dataset_dict"])
def rows(request, tmp_path):
    if request.param == "jsonl":
        return open_file(str(write_jsonl(tmp_path / "data.jsonl", ROWS)))
    if request.param == "parquet":
        pyarrow.parquet.write_table(pa.Table.from_pylist(ROWS), tmp_path / "data.parquet", row_group_size=64)
        return open_file(str(tmp_path / "data.parquet"))
    dataset = Dataset.from_list(ROWS)
    (dataset if request.param == "dataset" else DatasetDict(train=dataset)).save_to_disk(tmp_path / "data")
    return DatasetRows(str(tmp_path / "data"), "train")


def source(rows, **options):
    return FileSource(rows, name="data", **options)


def jsonl_source(tmp_path, *rows, **options):
    return source(open_file(str(write_jsonl(tmp_path / "data.jsonl", rows))), **options)


def refusal(make, *arguments, **options):
    with pytest.raises(UserError) as caught:
        make(*arguments, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_every_format_gives_prompt_answer_and_the_other_columns(rows):
    made = source(rows, shuffle=False, held_out=0)
    assert made.problem(7).prompt == "question 7"
    assert made.problem(7).answer == "7"
    assert made.problem(7).info == {"level": 1, "answer": 7}, "the reward may want its number"
    assert made.problem(207) == made.problem(7)
    assert made.held_out(10) == []


def test_every_format_splits_and_shuffles_alike(rows, tmp_path):
    same = jsonl_source(tmp_path, *ROWS, seed=5)
    made = source(rows, seed=5)
    assert [made.problem(i) for i in range(300)] == [same.problem(i) for i in range(300)]
    assert made.held_out(5) == same.held_out(5)


def test_an_epoch_holds_every_training_row_once_and_no_held_out_one(tmp_path):
    made = jsonl_source(tmp_path, *ROWS, held_out=0.2, seed=2)
    held_out = [problem.prompt for problem in made.held_out(1000)]
    size = len(ROWS) - len(held_out)
    epochs = [[made.problem(e * size + i).prompt for i in range(size)] for e in range(3)]
    assert 20 <= len(held_out) <= 60
    for epoch in epochs:
        assert sorted([*epoch, *held_out]) == sorted(row["prompt"] for row in ROWS)
    assert epochs[0] != epochs[1] != epochs[2]


def test_order_depends_on_the_seed_and_the_split_does_not(tmp_path):
    one, other = jsonl_source(tmp_path, *ROWS, seed=1), jsonl_source(tmp_path, *ROWS, seed=2)
    assert one.held_out(9) == other.held_out(9)
    assert [one.problem(i) for i in range(20)] != [other.problem(i) for i in range(20)]


def test_rows_added_later_leave_the_split_as_it_was(tmp_path):
    fewer = jsonl_source(tmp_path, *ROWS[:100], held_out=0.2).held_out(1000)
    more = jsonl_source(tmp_path, *ROWS, held_out=0.2).held_out(1000)
    assert {p.prompt for p in fewer} == {p.prompt for p in more} & {row["prompt"] for row in ROWS[:100]}


def test_equal_prompts_fall_on_one_side(tmp_path):
    made = jsonl_source(tmp_path, *ROWS, *[{**row, "answer": -1} for row in ROWS], held_out=0.3)
    held_out = [problem.prompt for problem in made.held_out(1000)]
    drawn = {made.problem(i).prompt for i in range(400)}
    assert len(held_out) == len(set(held_out))
    assert not drawn & set(held_out)


def test_a_small_file_holds_one_prompt_out(tmp_path):
    made = jsonl_source(tmp_path, {"prompt": "a"}, {"prompt": "b"}, held_out=0.001)
    assert len(made.held_out(10)) == 1
    assert jsonl_source(tmp_path, {"prompt": "a"}).held_out(10) == []


@given(st.integers(1, 300), st.text())
def test_a_permutation_has_every_number_once(size, key):
    assert np.array_equal(np.sort(permutation(size, key)), np.arange(size))


def test_permutations_stay_what_they_were():
    """A change here would change the data order of every run that is resumed."""
    assert permutation(8, "0:0").tolist() == [6, 0, 2, 1, 3, 4, 5, 7]


def test_blank_lines_and_a_byte_order_mark_are_skipped_and_lines_still_counted(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\n\n  \n{"prompt": "b"}\n\n{"prompt": "c"}')
    made = source(open_file(str(path)), held_out=0, shuffle=False)
    assert [made.problem(i).prompt for i in range(3)] == ["a", "b", "c"]
    assert made.rows.where(2) == f"{path}:6"


@pytest.mark.parametrize(
    "text, complaint",
    [
        ('{"prompt": "a"}\n{"prompt": \n', ":2: this line is not JSON: "),
        ('{"prompt": "a"}\n\n[1]\n', ":3: this line is a JSON list; it must be an object"),
        ('{"prompt": "a"}\n{"promt": "b"}\n', ":2: the row has no column 'prompt'; did you mean 'promt'?"),
        ('{"prompt": 5}\n', ":1: prompt is 5, an int; a prompt must be text"),
        ('{"prompt": null}\n', ":1: prompt is None, a NoneType"),
        ('{"prompt": ""}\n', ":1: prompt is empty"),
        ('{"prompt": [{"role": "user"}]}\n', ":1: prompt is a list; for chat messages set task.messages = 'prompt'"),
        ("\n\n", "it has no row"),
        ("", "it has no row"),
        ('{"prompt": "\xff"}\n', ":1: this line is not JSON"),
    ],
)
def test_what_is_wrong_in_a_file_is_one_line_with_its_place(tmp_path, text, complaint):
    path = tmp_path / "data.jsonl"
    path.write_bytes(text.encode("latin-1"))
    assert complaint in refusal(lambda: source(open_file(str(path))))


def test_an_answer_column_that_was_asked_for_must_exist(tmp_path):
    assert "did you mean 'solution'?" in refusal(
        jsonl_source, tmp_path, {"prompt": "a", "solution": 1}, answer="solutoin"
    )
    assert jsonl_source(tmp_path, {"prompt": "a"}).problem(0).answer is None


def test_missing_and_strange_files_are_named(tmp_path):
    write_jsonl(tmp_path / "train.jsonl", ROWS)
    (tmp_path / "bad.parquet").write_text("no")
    assert "did you mean 'train.jsonl'?" in refusal(open_file, str(tmp_path / "trian.jsonl"))
    assert "there is no such file" in refusal(open_file, str(tmp_path / "nowhere" / "x.jsonl"))
    assert "must be a .jsonl, .ndjson or .parquet file; convert it" in refusal(open_file, str(tmp_path / "train.csv"))
    assert refusal(open_file, str(tmp_path / "arr.json")).endswith(
        "convert it, as with pandas.read_json(PATH).to_json('rows.jsonl', orient='records', lines=True)"
    )
    assert "not a Parquet file" in refusal(open_file, str(tmp_path / "bad.parquet"))


def test_a_missing_split_or_dataset_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    DatasetDict(train=Dataset.from_list(ROWS)).save_to_disk(tmp_path / "data")
    assert "did you mean 'train'?" in refusal(DatasetRows, str(tmp_path / "data"), "trian")
    assert "cannot be loaded" in refusal(DatasetRows, str(tmp_path / "empty"), "train")


def test_a_configuration_of_a_dataset_follows_a_colon(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    write_jsonl(tmp_path / "easy.jsonl", ROWS[:3])
    write_jsonl(tmp_path / "hard.jsonl", ROWS[3:])
    files = "".join(
        f"- config_name: {name}\n  data_files:\n  - {{split: train, path: {name}.jsonl}}\n" for name in ("easy", "hard")
    )
    (tmp_path / "README.md").write_text(f"---\nconfigs:\n{files}---\n")
    made = source(DatasetRows(f"{tmp_path}:hard", "train"), shuffle=False, held_out=0)
    assert made.problem(0).prompt == "question 3"
    said = refusal(DatasetRows, str(tmp_path), "train")
    assert "['easy', 'hard']" in said
    assert said.endswith(f"such as task.path = '{tmp_path}:NAME'")
    assert "Available: ['easy', 'hard']" in refusal(DatasetRows, f"{tmp_path}:soft", "train")


def test_a_column_of_messages_is_a_chat_prompt(tmp_path):
    chat = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    made = jsonl_source(tmp_path, {"chat": chat, "answer": "x"}, messages="chat")
    assert made.problem(0).prompt == chat
    assert "needs role and content" in refusal(
        jsonl_source, tmp_path, {"chat": [{"role": "user"}], "answer": "x"}, messages="chat"
    )
    assert "give a list of chat messages" in refusal(jsonl_source, tmp_path, {"chat": "hi"}, messages="chat")


def test_columns_become_plain_facts(tmp_path):
    row = {"prompt": "a", "answer": [1, 2], "day": datetime.date(2026, 1, 2), "image": b"\x00", "tags": {"k": [1.5]}}
    pyarrow.parquet.write_table(pa.Table.from_pylist([row]), tmp_path / "data.parquet")
    problem = source(open_file(str(tmp_path / "data.parquet"))).problem(0)
    assert problem.answer == "[1, 2]"
    assert problem.info == {"day": "2026-01-02", "image": None, "tags": {"k": [1.5]}, "answer": [1, 2]}
    json.dumps(problem.info)


def test_a_share_that_leaves_nothing_to_train_on_is_refused(tmp_path):
    same = [{"prompt": "question 1"}] * 4
    assert "holds out all" in refusal(jsonl_source, tmp_path, *same, held_out=0.9999)


def test_a_data_set_on_a_hub_that_cannot_be_reached_is_refused_at_once_with_a_way_out(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", False)  # put back afterwards
    start_s = time.monotonic()
    told = refusal(DatasetRows, "nobody/nothing:main", "train")
    assert "hub cannot be reached" in told
    assert "hf download --repo-type dataset nobody/nothing --local-dir FOLDER" in told
    assert time.monotonic() - start_s < 15
