"""The page holds what the ledger and metrics.jsonl say, and nothing of the machine that it was made on."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from ledger_run import full_step, version

from offbeat.cli.main import main
from offbeat.ledger.ledger import Ledger
from offbeat.ledger.records import LedgerTerms
from offbeat.observability.metric_files import read_metrics
from offbeat.tools.page.run_data import token_texts, without_paths
from offbeat.tools.trajectories import decoder, read_trajectories

METRICS = [
    {"step": 0, "eval_mean@1": 0.25, "eval_prompts": 4, "eval_samples": 4, "attempt": 1},
    {"step": 1, "reward": 0.5, "reward_std": 0.1, "seconds": 2.0, "samples": 4, "tokens": 8, "attempt": 1},
    {"step": 2, "reward": 0.6, "reward_std": 0.1, "seconds": 2.0, "samples": 4, "tokens": 8, "attempt": 1},
    {"step": 2, "reward": 0.7, "reward_std": 0.1, "seconds": 2.0, "samples": 4, "tokens": 8, "attempt": 2},
]
EVENTS = [
    {"event": "start", "time": "2026-11-15T13:09:15+0000", "attempt": 1, "pid": 4242, "folder": "/home/me/secret"},
    {"event": "serve", "time": "2026-11-15T13:09:15+0000", "attempt": 1, "url": "https://10.0.0.1:8000"},
    {
        "event": "advice",
        "time": "2026-11-15T13:09:16+0000",
        "attempt": 1,
        "about": "trial sums",
        "text": "the right answer '4' earned 0; see /home/me/secret/runs/a/logs, or s3://KEY:PASSWORD@bucket/run",
    },
]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "runs" / "a"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"model": {"path": "offbeat-tiny", "tokenizer": None}}))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in METRICS))
    (folder / "events.jsonl").write_text("".join(json.dumps(row) + "\n" for row in EVENTS))
    with Ledger(folder / "ledger.sqlite", LedgerTerms(min_group=2)) as ledger:
        ledger.publish(version(0, 0))
        full_step(ledger, 0)
        full_step(ledger, 1)
    return folder


class Scripts(HTMLParser):
    """Finds the text of all scripts and styles of a page, and of its policy."""

    def __init__(self, text: str):
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None], str]] = []
        self.policy = ""
        self.addresses: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = dict(attributes)
        self.addresses += [value or "" for name, value in attributes if name in ("src", "href")]
        if given.get("http-equiv") == "Content-Security-Policy":
            self.policy = given["content"] or ""
        if tag in ("script", "style"):
            self.found.append((tag, given, ""))

    def handle_data(self, text: str) -> None:
        if self.lasttag in ("script", "style") and self.found and text.strip():
            tag, given, before = self.found[-1]
            self.found[-1] = (tag, given, before + text)

    @property
    def data(self) -> dict:
        (packed,) = (text for _, given, text in self.found if given.get("id") == "run-data")
        return json.loads(gzip.decompress(base64.b64decode(packed)))


def page_of(run: Path, *options: str) -> tuple[str, Scripts]:
    out = run.parent / "page.html"
    assert main(["page", str(run), "--out", str(out), *options]) == 0
    text = out.read_text()
    return text, Scripts(text)


def test_a_file_holds_what_the_ledger_and_the_metrics_say(run: Path):
    _, page = page_of(run)
    data = page.data
    assert data["metrics"] == read_metrics(run / "metrics.jsonl")
    answers = [dict(zip(data["answers"]["columns"], row, strict=True)) for row in data["answers"]["rows"]]
    known = {row["task"]: row for row in read_trajectories(run)}
    assert {row["task"] for row in answers} == set(known)
    for row in answers:
        wanted, text = known[row["task"]], data["texts"][str(row["task"])]
        assert {name: row[name] for name in ("step", "reward", "num_tokens", "worker")} == {
            name: wanted[name] for name in ("step", "reward", "num_tokens", "worker")
        }
        assert "".join(piece for part in text["segments"] for piece in part["pieces"]) == wanted["response"]
        assert (text["prompt"], text["right"]) == (wanted["prompt"], wanted["answer"])
    with Ledger(run / "ledger.sqlite", read_only=True) as ledger:
        assert data["ledger"]["report"]["counts"]["tokens"]["trained"] == ledger.report().counts.tokens.trained > 0


def test_the_policy_allows_the_pages_own_scripts_alone(run: Path):
    _, page = page_of(run)
    assert page.policy.startswith("default-src 'none'; ")
    assert "unsafe" not in page.policy
    assert "connect-src 'none'" in page.policy
    assert page.addresses == [], "nothing is loaded from elsewhere"
    for tag, given, text in page.found:
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert (f"'sha256-{digest}'" in page.policy) == (given.get("id") != "run-data"), tag


def test_no_path_process_or_login_is_in_a_file(run: Path):
    text, page = page_of(run)
    held = text + json.dumps(page.data)
    for private in ("/home/me", "4242", "PASSWORD", "10.0.0.1", str(run.parent)):
        assert private not in held
    assert "…/logs" in page.data["events"][2]["text"]


def test_without_text_no_prompt_or_answer_is_in_a_file(run: Path):
    _, page = page_of(run, "--without-text")
    assert page.data["file"]["with_text"] is False
    known = read_trajectories(run)
    assert all("pieces" not in part for text in page.data["texts"].values() for part in text["segments"])
    assert not {"prompt", "right", "history"} & {name for text in page.data["texts"].values() for name in text}
    assert "text" not in page.data["events"][2], "advice may quote an answer"
    assert len(page.data["answers"]["rows"]) == len(known), "figures are kept"


def test_mistakes_are_one_line(run: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["page", str(run), "--out", str(run)]) == 2
    assert main(["page", str(run), "--out", str(run / "no" / "such" / "page.html")]) == 2
    assert main(["page", str(run.parent / "b"), "--out", str(run / "page.html")]) == 2
    told = capsys.readouterr().err.splitlines()
    assert [len(told), "is a folder" in told[0], "does not exist; create it" in told[1]] == [3, True, True]


def test_tokens_of_half_characters_belong_to_the_last_of_them(run: Path):
    """The tokenizer of bytes below stands for one that splits characters; the real one gives the run's own texts."""

    def decode(tokens: np.ndarray) -> str:
        return bytes(tokens.tolist()).decode("utf-8", "replace")

    said = "a👍é\ufffdb"
    tokens = np.frombuffer(said.encode() + b"\xff\xfe\xffz", np.uint8)
    pieces = token_texts(tokens, decode)
    assert len(pieces) == len(tokens)
    assert "".join(pieces) == decode(tokens)
    assert pieces[:5] == ["a", "", "", "", "👍"]
    real = decoder(run)
    assert "".join(token_texts(np.arange(3, 13), real)) == real(np.arange(3, 13))


@pytest.mark.parametrize(
    "text, wanted",
    [
        ("see /home/me/runs/a/logs", "see …/logs"),
        ("'/root/.cache/x.py', line 3", "'…/x.py', line 3"),
        ("file:///home/me/x", "…/x"),
        ("http://host/some/path is up", "http://host/some/path is up"),
        ("1/2 and 3 / 4, and/or", "1/2 and 3 / 4, and/or"),
        ("~/models/m", "…/m"),
        (r"C:\Users\me\m", "…/m"),
    ],
)
def test_paths_are_cut_to_their_last_part(text: str, wanted: str):
    assert without_paths(text) == wanted


def test_the_chart_librarys_licence_is_beside_it():
    assets = Path(__file__).parents[2] / "src" / "offbeat" / "tools" / "page" / "assets"
    assert "MIT License" in (assets / "uPlot.LICENSE").read_text()
    assert re.match(r"/\*! https://github.com/leeoniya/uPlot \(v1\.", (assets / "uPlot.iife.min.js").read_text())
