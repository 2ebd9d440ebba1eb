"""The pieces of the overlap benchmark that do not need a GPU: its problems, its canned batches and its verdicts."""

import json

import numpy as np
import pytest

from benchmarks.common import word_problems
from benchmarks.overlap.__main__ import Rate, bars_of
from benchmarks.overlap.canned_training import samples_of
from benchmarks.overlap.ceiling import GENERATED, STOP, TRAINED, Counters
from offbeat.config import from_dict


@pytest.mark.parametrize(
    "response, value",
    [
        ("7 and 4 make 11. Answer: 11", 1.0),
        ("Answer: 3, no. Answer: 11 apples", 1.0),
        ("Answer: 111", 0.0),
        ("It is 11.", 0.0),
        ("Answer: eleven", 0.0),
        ("Answer: 11. Answer:", 0.0),
    ],
)
def test_only_the_number_after_the_last_answer_counts(response, value):
    assert word_problems.reward(response, "11") == value


def test_the_same_seed_writes_the_same_problems_whose_configuration_is_one_of_offbeats(tmp_path):
    for name, seed in (("a", 7), ("b", 7), ("c", 8)):
        word_problems.write_rows(tmp_path / name, 50, seed)
    assert (tmp_path / "a").read_text() == (tmp_path / "b").read_text() != (tmp_path / "c").read_text()
    rows = [json.loads(line) for line in (tmp_path / "a").read_text().splitlines()]
    assert len(rows) == 50
    assert all(int(row["answer"]) > 0 and row["question"].endswith(word_problems.REQUEST) for row in rows)
    assert from_dict(word_problems.sections("offbeat-tiny", tmp_path / "a", 3)).run.steps == 3


def test_two_processes_see_the_same_counters(tmp_path):
    ours, theirs = Counters(tmp_path / "counters"), Counters(tmp_path / "counters")
    ours[GENERATED], theirs[TRAINED] = 2**40, 7
    assert [theirs[which] for which in (GENERATED, TRAINED, STOP)] == [2**40, 7, 0] == [ours[i] for i in range(3)]


def test_canned_samples_have_the_lengths_and_groups_of_the_run():
    lengths = [(5, 2), (5, 9), (3, 4), (3, 1)]
    samples = samples_of(lengths, 2, 100, np.random.default_rng(0))
    assert [(len(one.prompt), one.num_tokens, one.group) for one in samples] == [
        (5, 2, 0),
        (5, 9, 0),
        (3, 4, 1),
        (3, 1, 1),
    ]
    assert samples[0].prompt is samples[1].prompt


def rates(*values: float) -> list[Rate]:
    return [Rate(value, {}) for value in values]


def test_the_fastest_way_to_overlap_is_compared_round_by_round_with_the_highest_ceiling():
    found = {
        "alternate": rates(10, 20),
        "overlap": rates(12, 12),
        "overlap, finish": rates(20, 30),
        "ceiling, 256 rows": rates(30, 30),
        "ceiling, 512 rows": rates(40, 40),
    }
    bars = bars_of(found, quick=False)
    assert bars["over alternate"].spread == (1.5, 2.0)
    assert bars["of the ceiling"].spread == (0.5, 0.75)
    assert bars["over TRL"].value is None
