"""The page about the run's folder names what a real run has written, and shows it as it is."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from doc_reader import ROOT, Reader, blocks

from offbeat.observability.console import columns

PAGE = ROOT / "docs" / "run-folder.md"
SUMMARY = "finished"
"""A key that only the summary has."""


def rows(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def shown(*, with_key: str) -> list[dict]:
    """The rows on the page that have a key."""
    text = "".join(block for block in blocks(PAGE, "json") if not block.startswith("{\n"))
    return [row for line in text.splitlines() if with_key in (row := json.loads(line))]


def documented_metrics() -> list[str]:
    names = re.findall(r"^\| (`.*?`) \| ", PAGE.read_text(), re.MULTILINE)
    return [name.strip("`") for cell in names for name in cell.split(", ")]


@pytest.fixture(scope="module")
def run(reader: Reader) -> Path:
    """The demo's run after a resume, so that its folder has all that one can have."""
    reader.run  # noqa: B018 - it is made when asked for
    reader.succeed("train", "--resume", "runs/NAME", "--run.steps=5", "--eval.every=4", "--log.sinks=tensorboard")
    return reader.run


def test_every_file_of_a_run_is_on_the_page_and_the_other_way_round(run: Path):
    table = re.findall(r"^\| `([\w.]+)/?` \| ", PAGE.read_text().partition("## metrics.jsonl")[0], re.MULTILINE)
    while_read = {"ledger.sqlite-shm", "ledger.sqlite-wal"}  # SQLite's, while or after another command reads the ledger
    assert {file.name for file in run.iterdir()} - while_read == set(table) - while_read
    assert {file.name for file in (run / "logs").iterdir()} == {"rewards.log", "offbeat.log"}
    assert all(
        re.fullmatch(r"\d{8}/model.safetensors", str(f.relative_to(run / "weights"))) for f in run.glob("weights/*/*")
    )


def test_every_metric_of_a_run_is_on_the_page(run: Path):
    known = {re.sub(r"SOURCE|@K", "", name) for name in documented_metrics()}
    for row in rows(run / "metrics.jsonl"):
        bare = {re.sub(r"@\d+$", "", name) for name in row}
        assert {re.sub(r"staleness_[\d+-]+$", "staleness_AGE", name) for name in bare} - {"step"} <= known


def test_the_rows_on_the_page_have_the_keys_of_real_ones(run: Path):
    metrics = rows(run / "metrics.jsonl")
    step, evaluation = (next(row for row in metrics if key in row) for key in ("reward", "eval_prompts"))
    (shown_step,), (shown_evaluation,) = shown(with_key="reward"), shown(with_key="eval_prompts")
    assert list(shown_step) == list(step)
    assert list(shown_evaluation) == list(evaluation)


def test_the_events_on_the_page_have_the_fields_of_real_ones(run: Path):
    on_page = {row["event"]: list(row) for row in shown(with_key="event")}
    real = {row["event"]: list(row) for row in rows(run / "events.jsonl")}
    assert on_page == real


def test_the_summary_on_the_page_has_the_keys_of_a_real_one(run: Path):
    (on_page,) = [json.loads(block) for block in blocks(PAGE, "json") if block.startswith("{\n")]
    real = json.loads((run / "summary.json").read_text())
    assert list(on_page) == list(real)
    assert list(on_page["trajectories"]) == list(real["trajectories"])


def test_the_ledgers_report_on_the_page_is_like_a_real_one(run: Path, reader: Reader):
    told = reader.succeed("ledger", "verify", "runs/NAME")
    (on_page,) = [block for block in blocks(PAGE, "") if block.endswith("everything holds\n")]
    assert [line.split()[0] for line in on_page.splitlines()] == [line.split()[0] for line in told.splitlines()]


def test_the_spans_on_the_page_are_those_of_a_real_trace(run: Path):
    events = json.loads((run / "trace.json").read_text())
    tracks = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    spans = {(tracks[event["tid"]].split()[0], event["name"]) for event in events if event["ph"] == "X"}
    section = PAGE.read_text().partition("## trace.json")[2].partition("\n## ")[0]
    shown = {
        (track.split()[0], name)
        for tracks_cell, spans_cell in re.findall(r"^\| (`.*?) \| (.*) \|$", section, re.MULTILINE)
        for track in re.findall(r"`(.*?)`", tracks_cell)
        for name in re.findall(r"`(\w+)`", spans_cell)
    }
    assert spans == {(track, name) for track, name in shown if track != "judge"}


def test_the_columns_on_the_page_are_those_of_the_console():
    section = PAGE.read_text().partition("| column | metric |")[2].partition("\n\n")[0]
    shown = [
        name for cell in re.findall(r"^\| (`.*?) \|", section, re.MULTILINE) for name in re.findall(r"`(.*?)`", cell)
    ]
    assert set(shown) == {column.name for column in columns(10, width=200, has_workers=True)}
