"""In a real browser, offline, every view of the page shows what the ledger and metrics.jsonl say, and what a model
wrote does nothing. Needs Chromium and the Python package `playwright`."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from ledger_run import STOP, new_groups, score_all, version

from offbeat.ledger.ledger import Ledger
from offbeat.ledger.records import LedgerTerms, Outcome, Submission
from offbeat.observability.metric_files import read_metrics
from offbeat.tools.page.document import write_page
from offbeat.tools.page.run_data import RunData
from offbeat.tools.trajectories import read_trajectories
from offbeat.trajectory import End, Segment

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install playwright")
pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium on PATH: apt-get install chromium"),
]

FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)
HOSTILE = (
    "<script>window.hit = 1</script>",
    "</script><script>window.hit = 1</script>",
    "<img src=x onerror='window.hit = 1'>",
    "<svg/onload=window.hit=1>",
    "<iframe srcdoc='<script>parent.hit = 1</script>'></iframe>",
    "<a href='javascript:window.hit=1'>click</a>",
    "<style>body { display: none }</style>",
    "<base href='https://example.invalid/'><form action=x><input name=y></form>",
    "<!-- --><meta http-equiv=refresh content='0;url=https://example.invalid'>",
    "${window.hit = 1} {{title}} {{data}}",
    "\\u003cscript\\u003ewindow.hit=1\\u003c/script\\u003e",
    "\x1b[31mred\x1b[0m \x1b]0;title\x07",
    "\u202egnp.exe\u202c \u2066x\u2069",
    "a\u200bb\u200dc\ufeffd\u2028e",
    "\x00\x01\x7f\x9b",
    "\ud800 lone \udfff",
    b"\xff\xfe\xc3(".decode("utf-8", "replace"),
    "'\"><b onmouseover=window.hit=1>x</b>",
    "x" * 1_000_000,
    "__proto__ constructor toString",
)


@pytest.fixture(scope="module")
def browser() -> Iterator:
    with playwright.sync_playwright() as started:
        found = started.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        yield found
        found.close()


class Opened:
    """A page that is open in the browser, and everything that went wrong in it."""

    def __init__(self, browser, address: str, *, offline: bool = True, **options):
        self.address, self.wrong, self.asked = address, [], []
        context = browser.new_context(offline=offline, **options)
        self.page = context.new_page()
        self.page.on("pageerror", lambda error: self.wrong.append(str(error)))
        self.page.on("console", lambda told: self.wrong.append(told.text) if told.type == "error" else None)
        self.page.on("dialog", lambda dialog: self.wrong.append(dialog.message))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.show("learning")

    def show(self, view: str) -> None:
        self.page.goto(f"{self.address}#{view}")
        self.page.wait_for_selector("#state:not(:has-text('loading'))", state="attached")

    def text(self, place: str) -> str:
        return self.page.inner_text(place)

    def rows(self, place: str) -> list[dict[str, str]]:
        """The rows of the first table in `place`, by the names of its columns."""
        return self.page.eval_on_selector(
            f"{place} table:not(.u-legend)",
            """table => [...table.tBodies[0].rows].map(row => Object.fromEntries(
                 [...row.cells].map(cell => [cell.dataset.head, cell.innerText.trim()])))""",
        )


def number(text: str) -> float:
    return float(text.replace(",", "").split()[0])


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo, three steps and two evaluations long."""
    folder = tmp_path_factory.mktemp("demo")
    words = ["train", "--run.name=demo", "--run.steps=3", "--eval.prompts=8", "--log.console=quiet"]
    subprocess.run([sys.executable, "-m", "offbeat", *words], cwd=folder, check=True, timeout=250)
    return folder / "runs" / "demo"


@pytest.fixture(scope="module")
def file(run: Path) -> Path:
    out = run.parent / "demo.html"
    subprocess.run([sys.executable, "-m", "offbeat", "page", str(run), "--out", str(out)], check=True, timeout=200)
    return out


@pytest.fixture(scope="module")
def opened(browser, file: Path) -> Opened:
    return Opened(browser, file.as_uri(), viewport={"width": 1280, "height": 800})


def test_learning_shows_the_metrics_as_they_are(opened: Opened, run: Path):
    opened.show("learning")
    rows = read_metrics(run / "metrics.jsonl")
    last = rows[-1]
    reward = opened.text("[data-tile=reward]").split(" ± ")
    assert [float(part) for part in reward] == pytest.approx([last["reward"], last["reward_std"]], abs=1e-3)
    held = opened.text("[data-tile=held-out]")
    ends = [row["eval_mean@1"] for row in rows if "eval_mean@1" in row]
    assert [float(part) for part in re.findall(r"[0-9.]+", held)] == pytest.approx([ends[0], ends[-1], 8], abs=1e-3)
    chart = opened.page.locator("figure[data-metric=reward]")
    chart.focus()
    for key, row in (("End", rows[-1]), ("ArrowLeft", rows[-2]), ("Home", rows[0])):
        opened.page.keyboard.press(key)
        opened.page.wait_for_timeout(50)
        shown = chart.locator(".u-legend .u-series").filter(has_text="reward").locator(".u-value").first.inner_text()
        at = chart.locator(".u-legend .u-series").first.locator(".u-value").inner_text()
        assert int(at) == row["step"]
        assert shown == "–" if "reward" not in row else float(shown) == pytest.approx(row["reward"], abs=1e-3)


def test_any_metric_is_drawn_by_its_name(opened: Opened):
    opened.show("learning")
    assert opened.page.locator("figure[data-metric=num_row_tokens]").count() == 0
    opened.page.fill("#metric", "num_row_tokens")
    opened.page.keyboard.press("Enter")
    opened.page.wait_for_selector("figure[data-metric=num_row_tokens] canvas")
    opened.page.select_option("#x-axis", "samples")
    assert "samples" in (opened.page.get_attribute("figure[data-metric=reward]", "aria-label") or "")


def test_answers_are_those_of_the_ledger(opened: Opened, run: Path):
    for asked, filters in (
        ("", {}),
        ("?step=2&purpose=train", {"step": 2, "purpose": "train"}),
        ("?purpose=eval&max_reward=0", {"purpose": "eval", "max_reward": 0}),
    ):
        opened.show(f"answers{asked}")
        opened.page.wait_for_selector("#view-answers .count")
        wanted = read_trajectories(run, **filters)
        assert number(opened.text("#view-answers .count")) == len(wanted)
        rows = opened.rows("#view-answers")
        assert [int(row["answer"]) for row in rows] == [row["task"] for row in wanted[:50]]
        assert [(float(row["reward"]), int(row["tokens"])) for row in rows] == [
            (row["reward"], row["num_tokens"]) for row in wanted[:50]
        ]


def test_a_deep_link_opens_the_same_answer(opened: Opened, run: Path):
    row = read_trajectories(run, step=3, purpose="train")[5]
    opened.show(f"answers/{row['task']}")
    opened.page.wait_for_selector("#view-answers .response")
    assert opened.text("#view-answers .response") == row["response"]
    assert opened.text("#view-answers .prompt") == row["prompt"]
    assert float(opened.text("[data-fact=reward]")) == row["reward"]
    opened.page.click("text=its group side by side")
    opened.page.wait_for_selector(".side-by-side")
    assert opened.page.locator(".side-by-side article").count() == 8
    assert not opened.wrong


def test_staleness_and_swarm_show_the_ledgers_sums(opened: Opened, run: Path):
    with Ledger(run / "ledger.sqlite", read_only=True) as ledger:
        report = ledger.report()
    tokens = report.counts.tokens
    opened.show("staleness")
    assert opened.page.get_attribute("[data-holds]", "data-holds") == "true"
    shown = {row["tokens"]: number(row["count"]) for row in opened.rows("#view-staleness section")}
    assert (shown["trained"], shown["evaluated"]) == (tokens.trained, tokens.evaluated)
    opened.show("swarm")
    (worker,) = opened.rows("#view-swarm")
    (made,) = report.producers
    assert (worker["worker"], number(worker["answers"]), number(worker["tokens"])) == (
        made.worker,
        made.num_trajectories,
        made.num_tokens,
    )
    opened.show("events")
    happened = [json.loads(line)["event"] for line in (run / "events.jsonl").read_text().splitlines()]
    assert [row["event"] for row in opened.rows("#view-events")] == happened[::-1]


def test_the_time_lines_sums_are_those_of_the_metrics(opened: Opened, run: Path):
    rows = read_metrics(run / "metrics.jsonl")
    opened.show("time")
    shown = {(row["who"], row["what"]): number(row["seconds"]) for row in opened.rows("#view-time")}
    for name in ("wait", "train", "publish"):
        wanted = sum(row.get(f"time_{name}_s", 0.0) for row in rows)
        assert shown["trainer", name] == pytest.approx(wanted, rel=0.01, abs=0.001)
    assert "the run" in opened.text("[data-limit]")
    opened.page.focus("#view-time canvas")
    opened.page.keyboard.press("+")
    opened.page.keyboard.press("0")
    assert not opened.wrong


def test_keys_lead_to_the_views_and_a_phone_needs_no_scrolling_sideways(browser, file: Path):
    phone = Opened(browser, file.as_uri(), viewport={"width": 390, "height": 844}, color_scheme="dark")
    for key, view in enumerate(("learning", "answers", "time", "staleness", "swarm", "events"), start=1):
        phone.page.keyboard.press(str(key))
        phone.page.wait_for_selector(f"#view-{view}:not([hidden])")
        assert phone.page.evaluate("document.documentElement.scrollWidth") <= 390
    assert not phone.wrong


def test_the_file_asks_nobody_for_anything(opened: Opened):
    assert {url.split("#")[0] for url in opened.asked} == {opened.address}
    assert not opened.wrong


@pytest.fixture(scope="module")
def hostile_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose answers are the texts of `HOSTILE`, made by a worker and for a task with hostile names."""
    folder = tmp_path_factory.mktemp("hostile")
    (folder / "config.json").write_text(json.dumps({"model": {"path": HOSTILE[2], "tokenizer": "offbeat-tiny"}}))
    events = [{"event": text, "time": text, "text": text, "attempt": 1} for text in HOSTILE]
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    row = {"step": 1, "reward": 0.5, HOSTILE[0]: 1.0, f"reward/{HOSTILE[2]}": 0.25, "seconds": 1.0}
    (folder / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    with Ledger(folder / "ledger.sqlite", LedgerTerms(min_group=2)) as ledger:
        ledger.publish(version(0, 0))
        groups = new_groups(ledger, len(HOSTILE) // 2, source=HOSTILE[4])
        ledger.admit([replace(group, problem={**group.problem, "answer": HOSTILE[0]}) for group in groups])
        for number, task in enumerate(ledger.lease(HOSTILE[2], len(HOSTILE), 0)):
            trajectory = task.new_trajectory()
            tokens = np.array([1000 + number, STOP], np.int32)
            segment = Segment(0, tokens, logprobs=-np.ones(2), version=0, kv_version=0, worker=HOSTILE[2])
            trajectory.append(replace(segment, engine=HOSTILE[3]), End.STOP)
            assert ledger.submit([Submission(trajectory, HOSTILE[2], task.fence)]) == [Outcome.STORED]
        score_all(ledger)
    return folder


def hostile_text(tokens: np.ndarray) -> str:
    """Stands for a tokenizer; a prompt is a hostile text, too."""
    return "".join("" if token == STOP else HOSTILE[token % 1000] for token in tokens.tolist())


def test_what_a_model_writes_is_shown_as_what_it_is(browser, hostile_run: Path):
    out = hostile_run / "page.html"
    write_page(hostile_run, out, RunData(hostile_run, hostile_text))
    opened = Opened(browser, out.as_uri(), offline=False)
    for view in ("learning", "staleness", "swarm", "events", "answers"):
        opened.show(view)
        opened.page.wait_for_selector(f"#view-{view}:not([hidden]) :is(table, figure)")
    opened.show("answers")
    tasks = {int(row["answer"]) for row in opened.rows("#view-answers")}
    assert len(tasks) == len(HOSTILE)
    for task, text in zip(sorted(tasks), HOSTILE, strict=True):
        opened.show(f"answers/{task}")
        opened.page.wait_for_selector(f"h3:text-is('answer {task}')")
        shown = opened.page.text_content("#view-answers .response") or ""
        plain = re.sub(r"\\u\{([0-9A-F]+)\}", lambda found: chr(int(found[1], 16)), shown)
        assert plain == text.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")
        escaped = {ord(character) for character in shown}
        assert not escaped & {0, 1, 7, 0x1B, 0x7F, 0x9B, 0x200B, 0x202E, 0x2066, 0x2028, 0xFEFF}
    assert opened.page.evaluate("window.hit") is None
    selector = "main :is(script, img, svg, iframe, style, base, form[action], meta, a[href^=javascript])"
    assert opened.page.locator(selector).count() == 0
    assert {url.split("#")[0] for url in opened.asked} == {opened.address}
    assert not opened.wrong


def test_a_swarms_coordinator_serves_the_page_while_a_worker_is_killed(browser, tmp_path: Path):
    words = ["--run.name=swarm", "--run.steps=400", "--rollout.workers=2", "--eval.every=0", "--rollout.lease_s=5"]
    command = [sys.executable, "-m", "offbeat", "train", *words]
    log, folder = tmp_path / "log", tmp_path / "runs" / "swarm"
    with log.open("w") as told, subprocess.Popen(command, cwd=tmp_path, stdout=told, stderr=told) as training:
        try:
            link = _waited(lambda: re.search(r"http://127\.0\.0\.1:\d+/page/\?token=\S+", log.read_text()))[0]
            opened = Opened(browser, link, offline=False)
            tile = opened.page.locator("[data-tile=step]")
            first = _waited(lambda: int(tile.inner_text().split()[0]))
            _waited(lambda: int(tile.inner_text().split()[0]) > first)
            workers = _waited(lambda: [row for row in _started(folder) if row["process"].startswith("worker")])
            os.kill(workers[0]["pid"], signal.SIGKILL)
            _waited(lambda: [row for row in _started(folder) if row["process"].startswith("worker")][2:])
            step = int(tile.inner_text().split()[0])
            _waited(lambda: int(tile.inner_text().split()[0]) > step)
            opened.show("swarm")
            _waited(lambda: len(opened.rows("#view-swarm")) >= 3)
            training.send_signal(signal.SIGTERM)
            training.wait(100)
            assert "connection is lost" in _waited(lambda: opened.text("#state strong"))
        finally:
            training.kill()
    rows = read_metrics(folder / "metrics.jsonl")
    out = tmp_path / "swarm.html"
    write_page(folder, out, RunData(folder, None))
    file = Opened(browser, out.as_uri())
    assert int(file.text("[data-tile=step]").split()[0]) == rows[-1]["step"]
    with Ledger(folder / "ledger.sqlite", read_only=True) as ledger:
        made = {producer.worker: producer.num_trajectories for producer in ledger.report().producers}
    file.show("swarm")
    shown = {row["worker"]: number(row["answers"]) for row in file.rows("#view-swarm")}
    assert {worker: shown[worker] for worker in made} == made


def _started(folder: Path) -> list[dict]:
    lines = (folder / "logs" / "supervisor.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if row["event"] == "started"]


def _waited(get, seconds: float = 100):
    """Returns the result of `get` once it is true; an error counts as not yet."""
    end_s, error = time.monotonic() + seconds, None
    while time.monotonic() < end_s:
        try:
            if found := get():
                return found
        except (OSError, ValueError, playwright.Error) as latest:
            error = latest
        time.sleep(0.2)
    raise AssertionError(f"it never came true within {seconds} s") from error
