"""The page's index of answers and its curves agree with the ledger and with metrics.jsonl, and leave out no spike."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ledger_run import full_step, version

from offbeat.ledger.ledger import Ledger
from offbeat.ledger.records import LedgerTerms
from offbeat.ledger.reports import TrajectoryFilter, TrajectoryRow
from offbeat.observability.metric_files import survivors
from offbeat.tools.page import answer_index, metric_history
from offbeat.tools.page.answer_index import AnswerIndex, Asked, cache_file
from offbeat.tools.page.metric_history import HELD_OUT, MetricHistory

NUM_STEPS = 6


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with Ledger(tmp_path / "ledger.sqlite", LedgerTerms(min_group=2)) as ledger:
        ledger.publish(version(0, 0))
        for step in range(NUM_STEPS):
            full_step(ledger, step)
    return tmp_path


def ledger_of(folder: Path) -> Ledger:
    return Ledger(folder / "ledger.sqlite", read_only=True)


def index_of(folder: Path) -> AnswerIndex:
    index = AnswerIndex(folder)
    with ledger_of(folder) as ledger:
        while index.read(ledger):
            pass
    return index


@pytest.mark.parametrize(
    "asked, which",
    [
        (Asked(), TrajectoryFilter()),
        (Asked(step=3), TrajectoryFilter(step=3)),
        (Asked(worker="w", purpose="train"), TrajectoryFilter(worker="w", purpose="train")),
        (Asked(worker="nobody"), TrajectoryFilter(worker="nobody")),
        (Asked(min_reward=0.5), TrajectoryFilter(min_reward=0.5)),
        (Asked(max_reward=0.5, step=2), TrajectoryFilter(max_reward=0.5, step=2)),
    ],
)
def test_filters_find_what_the_ledger_finds(folder: Path, asked: Asked, which: TrajectoryFilter):
    with ledger_of(folder) as ledger:
        wanted = [row.task for row in ledger.list_trajectories(10_000, "latest", which)]
    found = index_of(folder).find(asked, "newest", 0, 10_000)
    assert ([row["task"] for row in found.rows], found.num_found) == (wanted, len(wanted))


@pytest.mark.parametrize("order", ["newest", "oldest", "best", "worst", "longest"])
def test_every_page_of_every_order_is_a_part_of_the_whole(order: str, tmp_path: Path):
    draw = random.Random(0)
    rows = [answer(seq, draw.choice([None, 0.0, 0.5, 1.0]), draw.randrange(5)) for seq in range(1, 400)]
    index = AnswerIndex(tmp_path)
    index._append(rows)
    keys = {
        "newest": lambda row: -row.seq,
        "oldest": lambda row: row.seq,
        "best": lambda row: (row.reward is None, -(row.reward or 0), -row.seq),
        "worst": lambda row: (row.reward is None, row.reward, -row.seq),
        "longest": lambda row: (-row.num_tokens, -row.seq),
    }
    wanted = [row.seq for row in sorted(rows, key=keys[order])]
    shown = [row["seq"] for start in range(0, 450, 50) for row in index.find(Asked(), order, start, 50).rows]
    assert shown == wanted


def answer(seq: int, reward: float | None, num_tokens: int, state: str = "trained") -> TrajectoryRow:
    place = (seq, seq, 1, 1, 0, "train", "sums", state, 1)
    return TrajectoryRow(*place, reward, None, num_tokens, 0, 0, "w", "stop", 1.0, False, {})


def test_what_changes_is_read_again_and_what_a_resume_undid_too(folder: Path):
    index = AnswerIndex(folder)
    with Ledger(folder / "ledger.sqlite", LedgerTerms(min_group=2)) as ledger:
        index.read(ledger)
        place = int(np.flatnonzero(index._columns["task"][: index.num_rows] == 1)[0])
        index._put(place, replace(ledger.trajectory_rows([place + 1])[0], state="ready", step=None, reward=None))
        assert index.find(Asked(state="ready"), "newest", 0, 9).num_found == 1
        index.refresh(ledger)
        assert index.find(Asked(state="ready"), "newest", 0, 9).num_found == 0
        index._put(place, replace(ledger.trajectory_rows([place + 1])[0], reward=99.0))  # in a final state
        ledger.execute("UPDATE versions SET abandoned = 1 WHERE number = (SELECT MAX(number) FROM versions)")
        index.read(ledger)
        assert index.find(Asked(min_reward=99), "newest", 0, 9).num_found == 0


def test_a_saved_index_is_taken_for_the_same_ledger_only(folder: Path, monkeypatch: pytest.MonkeyPatch):
    index = index_of(folder)
    index.save()
    assert cache_file(folder).stat().st_size > 0
    monkeypatch.setattr(answer_index, "ROWS_PER_READ", 0)  # nothing more is read
    with ledger_of(folder) as ledger:
        again = AnswerIndex(folder)
        again.load(ledger)
        assert again.find(Asked(), "newest", 0, 99) == index.find(Asked(), "newest", 0, 99)
    with Ledger(folder / "ledger.sqlite") as ledger:
        ledger.execute("UPDATE trajectories SET accepted_at = accepted_at + 1")
        other = AnswerIndex(folder)
        other.load(ledger)
        assert other.num_rows == 0
    cache_file(folder).write_bytes(b"damaged")
    with ledger_of(folder) as ledger:
        damaged = AnswerIndex(folder)
        damaged.load(ledger)
    assert damaged.num_rows == 0


@st.composite
def files(draw: st.DrawFn) -> list[dict]:
    """Rows of a run that was resumed now and then, some of them evaluations."""
    rows, step = [], 0
    for attempt in range(1, draw(st.integers(1, 4))):
        step = draw(st.integers(0, step))
        for _ in range(draw(st.integers(0, 12))):
            step += 1
            if draw(st.booleans()):
                rows.append({"step": step - 1, "eval_mean@1": draw(st.integers(0, 9)), "attempt": attempt})
            rows.append({"step": step, "reward": draw(st.integers(0, 9)), "samples": 4, "attempt": attempt})
    return rows


@settings(deadline=None)
@given(files(), st.integers(1, 5))
def test_curves_are_those_of_the_rows_that_survive(rows: list[dict], size: int):
    history = MetricHistory(Path("none"))
    for start in range(0, len(rows), size):
        history.add(rows[start : start + size])
    kept = survivors(rows)
    found = history.thinned(["reward", "eval_mean@1", HELD_OUT])
    assert found["x"]["step"] == [row["step"] for row in kept]
    assert found["x"]["samples"] == list(np.cumsum([row.get("samples", 0) for row in kept]))
    for name in ("reward", "eval_mean@1"):
        assert found["columns"].get(name, [[None] * len(kept)])[0] == [row.get(name) for row in kept]


def test_a_spike_of_one_step_survives_thinning_and_a_closer_look_finds_its_step(tmp_path: Path):
    num_rows, spike = 10_000, 7_777
    history = MetricHistory(tmp_path / "metrics.jsonl")
    history.add({"step": step, "reward": 0.0, "grad_norm": 50.0 if step == spike else 1.0} for step in range(num_rows))
    found = history.thinned(["grad_norm"])
    mean, low, high = found["columns"]["grad_norm"]
    assert found["size"] == 16
    assert len(mean) <= metric_history.MAX_POINTS
    assert (max(high), min(low), max(mean)) == (50.0, 1.0, pytest.approx(1 + 49 / 16))
    near = history.thinned(["grad_norm"], steps=(spike - 100, spike + 100))
    assert (near["size"], near["x"]["step"][near["columns"]["grad_norm"][0].index(50.0)]) == (1, spike)


def test_only_the_buckets_that_changed_are_sent_again(tmp_path: Path):
    history = MetricHistory(tmp_path / "metrics.jsonl")
    history.add({"step": step, "reward": step % 7} for step in range(1, 5001))
    before, revision = history.thinned(["reward"]), history.revision
    history.add([{"step": 5001, "reward": 3.0}])
    change = history.thinned(["reward"], after=history.first_changed(revision))
    assert len(change["x"]["step"]) == 1
    whole = history.thinned(["reward"])
    at = change["at"]
    for number in range(3):
        joined = before["columns"]["reward"][number][:at] + change["columns"]["reward"][number]
        assert joined == whole["columns"]["reward"][number]


def test_a_long_file_is_sampled_before_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file = tmp_path / "metrics.jsonl"
    file.write_text("".join(json.dumps({"step": step, "reward": step / 5000}) + "\n" for step in range(1, 5001)))
    assert MetricHistory(file).sample() is None, "a short file is read at once"
    monkeypatch.setattr(metric_history, "SAMPLE_BYTES", 1000)
    monkeypatch.setattr(metric_history, "SAMPLE_LINE_BYTES", 100)
    sampled = MetricHistory(file).sample()
    assert sampled is not None
    steps = sampled.thinned(["reward"])["x"]["step"]
    assert (steps[0], steps[-1] > 4900, len(steps) > 500) == (1, True, True)
