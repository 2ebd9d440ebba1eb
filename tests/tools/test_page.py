"""The page holds what the ledger and metrics.jsonl say, and nothing of the machine that it was made on."""

from __future__ import annotations

import asyncio
import base64
import gzip
import hashlib
import json
import re
import shutil
import socket
import urllib.error
import urllib.request
from html.parser import HTMLParser
from pathlib import Path

import nbformat
import numpy as np
import pytest
from browsers import Opened, figure, started_browser
from ledger_run import full_step, version
from nbclient import NotebookClient

from offbeat.cli.main import main
from offbeat.ledger.ledger import Ledger
from offbeat.ledger.records import LedgerTerms
from offbeat.observability.metric_files import read_metrics
from offbeat.observability.trace import Trace
from offbeat.tools.page.run_data import token_texts, without_paths
from offbeat.tools.page.server import PageApp
from offbeat.tools.page.timeline import Spans
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
    def runs(self) -> list[dict]:
        (packed,) = (text for _, given, text in self.found if given.get("id") == "run-data")
        return json.loads(gzip.decompress(base64.b64decode(packed)))["runs"]

    @property
    def data(self) -> dict:
        (only,) = self.runs
        return only


def page_of(run: Path, *options: str) -> tuple[str, Scripts]:
    out = run.parent / "page.html"
    assert main(["page", str(run), "--out", str(out), *options]) == 0
    text = out.read_text()
    return text, Scripts(text)


def test_a_file_holds_what_the_ledger_and_the_metrics_say(run: Path):
    _, page = page_of(run)
    data, rows = page.data, read_metrics(run / "metrics.jsonl")
    curves = data["metrics"]
    assert (curves["size"], curves["x"]["step"]) == (1, [row["step"] for row in rows])
    for name in ("reward", "seconds", "eval_mean@1"):
        assert curves["columns"][name] == [[row.get(name) for row in rows]]
    assert (curves["row"], curves["first_eval"]) == (rows[-1], rows[0])
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
    assert main(["page", str(run), "--without-text"]) == 2
    assert main(["page", str(run), "--out", str(run / "page.html"), "--port", "1"]) == 2
    assert main(["page", str(run), str(run), "--out", str(run / "page.html")]) == 2
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert main(["page", str(run), "--port", str(taken.getsockname()[1])]) == 2
    told = capsys.readouterr().err.splitlines()
    words = (
        *("is a folder", "does not exist; create it", "there is no such run", "goes only with --out"),
        *(
            "do not go together",
            "is named twice; name each run once",
            "cannot listen there: Address already in use; leave it out for any free port",
        ),
    )
    assert len(told) == len(words)
    for line, wanted in zip(told, words, strict=True):
        assert wanted in line


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


def test_a_browser_draws_a_file_without_an_error(run: Path):
    page_of(run)
    with started_browser() as browser:
        opened = Opened(browser, (run.parent / "page.html").as_uri())
        assert figure(opened.values("reward")["reward"]) == 0.7
        opened.show("answers?step=2")
        opened.page.wait_for_selector("#view-answers .count")
        assert figure(opened.text("#view-answers .count")) == len(read_trajectories(run, step=2)) > 0
        assert not opened.wrong


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


def called(app: PageApp, path: str, query: str = "", cookie: str = "") -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body with which the page answers a call, up to the first part of a stream."""
    scope = {
        "type": "http",
        "method": "GET",
        "scheme": "http",
        "path": path,
        "root_path": "",
        "query_string": query.encode(),
        "headers": [(b"host", b"127.0.0.1"), *([(b"cookie", cookie.encode())] if cookie else [])],
    }
    sent: list[dict] = []

    async def call() -> None:
        has_body = asyncio.Event()

        async def receive() -> dict:
            await has_body.wait()
            return {"type": "http.disconnect"}

        async def send(message: dict) -> None:
            sent.append(message)
            if message.get("body"):
                has_body.set()

        await asyncio.wait_for(app(scope, receive, send), 30)

    asyncio.run(call())
    headers = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
    return sent[0]["status"], headers, b"".join(message.get("body", b"") for message in sent[1:])


@pytest.mark.parametrize(
    "path", ["/", "/data/answers", "/data/texts", "/data/metrics", "/data/timeline", "/data/changes"]
)
def test_a_served_page_needs_its_token(run: Path, path: str):
    app = PageApp([run], "right")
    for query, cookie in (("", ""), ("token=wrong", ""), ("", "offbeat_0=right"), ("token=", "")):
        status, _, body = called(app, path, query, cookie)
        assert (status, b"needs the whole link" in body) == (401, True)
    status, headers, _ = called(app, path, "token=right")
    assert (status, headers["location"]) == (303, "/")
    assert "HttpOnly" in headers["set-cookie"]
    assert "samesite=strict" in headers["set-cookie"].lower()


@pytest.mark.parametrize("path", ["/", "/wrong/", "/wrong/data/changes", "/data/changes"])
def test_a_page_for_a_notebook_has_its_token_in_the_path(run: Path, path: str):
    app = PageApp([run], "right", is_framed=True)
    assert called(app, path)[0] == 401
    assert called(app, path, "token=right")[0] == 401
    status, headers, body = called(app, "/right/")
    assert (status, b"<script" in body) == (200, True)
    assert "frame-ancestors http://localhost:*" in headers["content-security-policy"]
    assert (
        "frame-ancestors 'none'"
        in called(PageApp([run], "t"), "/", cookie=cookie_of("t"))[1]["content-security-policy"]
    )


def cookie_of(token: str) -> str:
    return f"offbeat_{hashlib.sha256(token.encode()).hexdigest()[:12]}={token}"


def append(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


class Stream:
    """Changes as a page gets them."""

    def __init__(self, app: PageApp, last_id: str = ""):
        self._parts = app._stream(app._cursors(last_id))
        self.id = last_id

    async def until(self, wanted: str) -> dict:
        """The next change of the first run that has `wanted`."""
        async for part in self._parts:
            lines = dict(line.split(": ", 1) for line in part.decode().strip().splitlines())
            self.id, (change, *_) = lines["id"], json.loads(lines["data"])["runs"]
            if wanted in change:
                return change
        raise AssertionError("the stream ended")


def test_a_served_page_sends_what_is_new_and_goes_on_from_a_cursor(run: Path):
    async def follow() -> None:
        app = PageApp([run], "right")
        first = Stream(app)
        change = await first.until("metrics")
        assert (change["is_whole"], change["metrics"]["x"]["step"], len(change["events"])) == (True, [0, 1, 2], 3)
        assert change["metrics"]["columns"]["reward"] == [[None, 0.5, 0.7]]
        change = await first.until("ledger")
        assert change["ledger"]["report"]["counts"]["trajectories"]["trained"] == 8
        append(run / "metrics.jsonl", json.dumps({"step": 3, "reward": 0.8, "attempt": 2}) + "\n" + '{"step": 4, "rew')
        for stream in (first, Stream(app, first.id)):
            change = await stream.until("metrics")
            assert "is_whole" not in change
            assert (change["metrics"]["at"], change["metrics"]["x"]["step"]) == (3, [3]), "not what was sent before"
        other_life = await Stream(PageApp([run], "right"), first.id).until("metrics")
        assert (other_life["is_whole"], len(other_life["metrics"]["x"]["step"])) == (True, 4)

    asyncio.run(asyncio.wait_for(follow(), 60))


def test_several_runs_share_a_file_and_a_stream_by_their_names(run: Path):
    other = run.parent.parent / "b"
    shutil.copytree(run, other)
    shutil.copytree(run, other / "a")
    append(other / "metrics.jsonl", json.dumps({"step": 3, "reward": 0.9, "attempt": 2}) + "\n")
    _, page = page_of(run, str(other), str(other / "a"))
    assert [data["about"]["name"] for data in page.runs] == ["a", "b", "a (2)"]
    assert [len(data["metrics"]["x"]["step"]) for data in page.runs] == [3, 4, 3]
    app = PageApp([run, other], "right")

    async def first_event() -> list[str]:
        async for part in app._stream(app._cursors("")):
            told = json.loads(part.decode().split("data: ")[1])
            return [change["run"] for change in told["runs"]]
        raise AssertionError("the stream ended")

    assert asyncio.run(asyncio.wait_for(first_event(), 60)) == ["a", "b"]
    assert called(app, "/data/metrics", "run=c", cookie_of("right"))[0] == 404


def test_a_trace_is_read_on_while_it_grows(tmp_path: Path):
    trace, spans = Trace(tmp_path / "trace.json"), Spans(tmp_path)
    for number in range(3):
        trace.record("worker a", "generate", 10.0 * number, 10.0 * number + 5, answers=7)
        trace.flush()
        spans.read_all()
        assert spans.num_spans == number + 1
    trace.close()
    spans.read_all()
    again = Trace(tmp_path / "trace.json")
    with again.span("train"):
        pass
    again.close()
    spans.read_all()
    seen = spans.window()
    named = [(spans.tracks[track], spans.names[name], answers) for track, name, _, _, answers, _, _ in seen["spans"]]
    assert named == [*[("worker a", "generate", 7)] * 3, ("trainer", "train", None)]
    assert [seconds for _, _, _, seconds, *_ in seen["spans"][:3]] == pytest.approx([5.0] * 3)


def test_a_window_of_the_time_line_keeps_long_spans_and_sums_up_short_ones(tmp_path: Path):
    trace = Trace(tmp_path / "trace.json")
    for number in range(2000):
        trace.record(
            "trainer", "train" if number % 100 == 0 else "wait", number, number + (0.9 if number % 100 == 0 else 0.001)
        )
    trace.close()
    spans = Spans(tmp_path)
    spans.read_all()
    seen = spans.window(limit=100)
    train = spans.names.index("train")
    assert sum(span[6] for span in seen["spans"]) == 2000
    assert sum(span[3] for span in seen["spans"] if span[1] == train) == pytest.approx(20 * 0.9, rel=1e-3)
    assert {span[5] for span in seen["spans"] if span[1] == train} == set(range(20)), "steps trained before"
    assert sorted(row[2:] for row in seen["sums"]) == [[20, pytest.approx(18.0)], [1980, pytest.approx(1.98)]]
    begin = seen["begin"] + 100.5
    close = spans.window(begin, begin + 20, limit=100)
    assert all(span[6] == 1 for span in close["spans"])
    assert len(close["spans"]) == 21


@pytest.mark.full
def test_a_notebook_shows_the_page_in_a_frame_until_its_kernel_ends(run: Path):
    client = NotebookClient(nbformat.v4.new_notebook(), timeout=120)
    cells = [f"import offbeat\nrun = offbeat.Run({str(run)!r})", "run.page()", "run.page().close()\nrun.page()"]
    client.nb.cells = [nbformat.v4.new_code_cell(text) for text in cells]
    with client.setup_kernel():
        for number in range(3):
            client.execute_cell(client.nb.cells[number], number)
        shown = [cell.outputs[0].data["text/html"] for cell in client.nb.cells[1:]]
        closed, link = (re.search(r'<iframe src="([^"]+)"', text)[1] for text in shown)
        with urllib.request.urlopen(link, timeout=60) as answer:
            assert (answer.status, answer.headers["X-Frame-Options"]) == (200, None)
        curves = json.load(urllib.request.urlopen(f"{link}data/metrics?name=reward&run=a", timeout=60))
        assert set(curves["columns"]) <= {"reward"}
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(link.replace(link.split("/")[3], "wrong"), timeout=60)
        with pytest.raises(urllib.error.URLError, match="refused"):
            urllib.request.urlopen(closed, timeout=60)
    with pytest.raises(urllib.error.URLError, match="refused"):
        urllib.request.urlopen(link, timeout=60)
