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
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from browsers import Opened, figure, started_browser
from ledger_run import STOP, new_groups, score_all, version

from offbeat.ledger.ledger import Ledger
from offbeat.ledger.records import LedgerTerms, Outcome, Submission
from offbeat.observability.metric_files import read_metrics
from offbeat.tools.page.document import write_page
from offbeat.tools.page.run_data import RunData
from offbeat.tools.trajectories import read_trajectories
from offbeat.trajectory import End, Segment

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install playwright")
pytestmark = pytest.mark.full

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
    with started_browser() as found:
        yield found


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
    opened.page.focus("figure[data-metric=reward]")
    for key, row in (("End", rows[-1]), ("ArrowLeft", rows[-2]), ("Home", rows[0])):
        opened.page.keyboard.press(key)
        opened.page.wait_for_timeout(50)
        shown = opened.values("reward")
        assert int(shown["step"]) == row["step"]
        assert shown["reward"] == "–" if "reward" not in row else float(shown["reward"]) == near(row["reward"])
    newest = next(row for row in reversed(rows) if "reward" in row)
    for chart in ("entropy", "grad_norm", "tokens_per_second", "length", "signal_share"):
        assert figure(opened.values(chart)[chart]) == near(newest[chart])


def near(value: float):
    """A figure on the page has four digits."""
    return pytest.approx(value, rel=1e-3, abs=1e-6)


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
        assert figure(opened.text("#view-answers .count")) == len(wanted)
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


def check_views(opened: Opened, run: Path) -> None:
    """Every view shows what the run's ledger and files say."""
    rows = read_metrics(run / "metrics.jsonl")
    newest = next(row for row in reversed(rows) if "reward" in row)
    with Ledger(run / "ledger.sqlite", read_only=True) as ledger:
        report = ledger.report()
    opened.show("learning")
    assert int(opened.text("[data-tile=step]").split()[0]) == newest["step"]
    assert figure(opened.text("[data-tile=reward]")) == near(newest["reward"])
    assert figure(opened.values("entropy")["entropy"]) == near(newest["entropy"])
    opened.show("answers")
    opened.page.wait_for_selector("#view-answers .count")
    assert figure(opened.text("#view-answers .count")) == sum(made.num_trajectories for made in report.producers)
    opened.show("time")
    opened.page.wait_for_selector("#view-time table")
    shown = {(row["who"], row["what"]): figure(row["seconds"]) for row in opened.rows("#view-time")}
    for name in ("wait", "train", "publish"):
        wanted = sum(row.get(f"time_{name}_s", 0.0) for row in rows)
        assert shown["trainer", name] == pytest.approx(wanted, rel=0.01, abs=0.001)
    opened.show("staleness")
    tokens = report.counts.tokens
    opened.page.wait_for_selector("[data-holds=true]")
    shown = {row["tokens"]: figure(row["count"]) for row in opened.rows("#view-staleness section")}
    assert (shown["trained"], shown["evaluated"], shown["waiting"]) == (
        tokens.trained,
        tokens.evaluated,
        tokens.waiting,
    )
    assert figure(opened.values("staleness")["mean"]) == near(newest["staleness"])
    opened.show("swarm")
    shown = {row["worker"]: row for row in opened.rows("#view-swarm")}
    for made in report.producers:
        row = shown[made.worker]
        assert (figure(row["answers"]), figure(row["tokens"])) == (made.num_trajectories, made.num_tokens)
        if made.num_trajectories:
            answers = read_trajectories(run, worker=made.worker, limit=1)
            assert (row["engine"], row["device"]) == ("embedded", "cpu")
            assert figure(row["version"]) == answers[0]["last_version"]
    opened.show("events")
    happened = [json.loads(line)["event"] for line in (run / "events.jsonl").read_text().splitlines()]
    assert [row["event"] for row in opened.rows("#view-events")] == happened[::-1]
    assert not opened.wrong


def test_every_view_of_a_file_shows_what_the_ledger_and_the_metrics_say(opened: Opened, run: Path):
    check_views(opened, run)


def test_what_limits_the_run_is_one_sentence_and_the_time_line_zooms(opened: Opened):
    opened.show("time")
    assert "the run" in opened.text("[data-limit]")
    opened.page.focus("#view-time canvas")
    opened.page.keyboard.press("+")
    opened.page.keyboard.press("0")
    assert not opened.wrong


@contextmanager
def served(*runs: Path) -> Iterator[str]:
    """The link of a page that a process of its own serves."""
    command = [sys.executable, "-m", "offbeat", "page", *map(str, runs)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield re.search(r"http://\S+", process.stdout.readline())[0]
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(30)


def test_a_served_page_follows_a_run_to_its_end_and_then_shows_what_its_files_say(browser, tmp_path: Path):
    words = ["train", "--run.name=live", "--run.steps=12", "--eval.prompts=8"]
    folder = tmp_path / "runs" / "live"
    command = [sys.executable, "-m", "offbeat", *words]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as training:
        told = next(line for line in training.stdout if "in a browser" in line)
        own = Opened(browser, re.search(r"http://\S+", told)[0], offline=False)
        _waited(lambda: int(own.text("[data-tile=step]").split()[0]))
        with served(folder) as link:
            opened = Opened(browser, link, offline=False)
            first = _waited(lambda: int(opened.text("[data-tile=step]").split()[0]))
            assert first < 12
            training.stdout.read()
            training.wait(100)
            _waited(lambda: "finished" in opened.text("#state"))
            assert "connection is lost" in _waited(lambda: own.text("#state strong"))
            opened.show("answers")
            with Ledger(folder / "ledger.sqlite", read_only=True) as ledger:
                num_answers = ledger.last_trajectory()
            _waited(lambda: figure(opened.text("#view-answers .count")) == num_answers)
            time.sleep(4)  # until the ledger's last report is read
            check_views(opened, folder)


def test_a_deep_link_to_a_served_page_opens_the_same_answer_of_the_same_run(browser, run: Path, tmp_path: Path):
    other = tmp_path / "other"
    shutil.copytree(run, other)
    row = read_trajectories(run, step=2, purpose="train")[3]
    with served(other, run) as link:
        opened = Opened(browser, link, offline=False)
        opened.page.goto(f"{opened.address}#answers/{row['task']}?run=demo")
        opened.page.reload()
        opened.page.wait_for_selector("#view-answers .response")
        assert opened.text("#name") == "demo"
        assert opened.text("#view-answers .response") == row["response"]
        opened.page.click("text=its group side by side")
        opened.page.wait_for_selector(".side-by-side")
        assert opened.page.url.endswith("?run=demo"), "links stay with the run"
        assert not opened.wrong


def test_several_runs_are_laid_over_each_other_by_their_names(browser, run: Path, tmp_path: Path):
    other = tmp_path / "other"
    shutil.copytree(run, other)
    rows = read_metrics(run / "metrics.jsonl")
    (other / "metrics.jsonl").write_text("".join(json.dumps(row | {"entropy": 9.5}) + "\n" for row in rows))
    newest = next(row for row in reversed(rows) if "reward" in row)
    with served(run, other) as link:
        opened = Opened(browser, link, offline=False)
        opened.page.wait_for_selector("figure[data-metric=entropy]")
        assert [row["run"] for row in opened.rows("#view-learning")] == ["demo", "other"]
        shown = opened.values("entropy")
        assert (figure(shown["demo"]), figure(shown["other"])) == (near(newest["entropy"]), 9.5)
        opened.show("learning?runs=other")
        _waited(lambda: set(opened.values("entropy")) == {"step", "other"})
        assert not opened.wrong


def test_dragging_over_a_long_run_looks_closer_and_a_double_click_shows_all(browser, run: Path, tmp_path: Path):
    long = tmp_path / "long"
    shutil.copytree(run, long)
    with (long / "metrics.jsonl").open("w") as file:
        for step in range(1, 4001):
            row = {"step": step, "reward": 50.0 if step == 3003 else 1.0, "reward_std": 0.1}
            file.write(json.dumps(row | {"seconds": 1.0}) + "\n")
    with served(long) as link:
        opened = Opened(browser, link, offline=False, viewport={"width": 1280, "height": 800})
        chart = "figure[data-metric=reward]"
        opened.page.wait_for_selector(f"{chart} canvas")
        opened.page.focus(chart)
        for _ in range(3):
            opened.page.keyboard.press("+")
        opened.page.wait_for_selector(f"{chart} .whole")
        opened.page.dispatch_event(f"{chart} .u-over", "dblclick")
        _waited(lambda: opened.page.locator(f"{chart} .whole").count() == 0)
        box = _waited(lambda: opened.page.locator(f"{chart} .u-over").bounding_box())
        at = box["x"] + box["width"] * 3003 / 4000
        opened.page.mouse.move(at - 12, box["y"] + 20)
        opened.page.mouse.down()
        opened.page.mouse.move(at + 12, box["y"] + 20, steps=4)
        opened.page.mouse.up()
        opened.page.wait_for_selector(f"{chart} .whole")
        seen = set()

        def has_spike() -> bool:
            opened.page.focus(chart)
            for key in ("Home", *["ArrowRight"] * 60):
                opened.page.keyboard.press(key)
                shown = opened.values("reward")
                seen.add((shown["step"], next(value for name, value in shown.items() if name.startswith("reward"))))
            return ("3,003", "50") in seen

        opened.page.evaluate("document.querySelector('#smoothing').value = 1")
        opened.page.dispatch_event("#smoothing", "input")
        opened.page.focus(chart)
        _waited(has_spike, 40)
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
    write_page(out, [RunData(hostile_run, hostile_text)])
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
    write_page(out, [RunData(folder, None)])
    file = Opened(browser, out.as_uri())
    assert int(file.text("[data-tile=step]").split()[0]) == rows[-1]["step"]
    assert len(_started(folder)) >= 3
    check_views(file, folder)


def test_a_page_on_a_public_address_needs_its_token(tmp_path: Path):
    words = ["--run.name=public", "--run.steps=400", "--rollout.workers=1"]
    words += ["--serve.host=0.0.0.0", "--serve.certificate=plain"]
    folder, command = tmp_path / "runs" / "public", [sys.executable, "-m", "offbeat", "train", *words]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL) as training:
        try:
            url = _waited(lambda: json.loads((folder / "serve.json").read_text())["url"])
            assert "127.0.0.1" not in url
            for path in ("/page/", "/page/data/answers", "/page/data/changes", "/page/?token=wrong"):
                with pytest.raises(urllib.error.HTTPError, match="401"):
                    urllib.request.urlopen(url + path, timeout=30)
            link = f"{url}/page/?token={(folder / 'page.token').read_text()}"
            opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
            assert b"<script" in opener.open(link, timeout=30).read()
        finally:
            training.terminate()
            training.wait(100)


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
