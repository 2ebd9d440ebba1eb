"""Whole runs through real vLLM servers, by the commands of the documentation (`make test-engines`)."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from offbeat.launch.gpu_memory import LOCK

PYTHON = os.environ.get("OFFBEAT_VLLM_PYTHON")
ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "vllm_cpu.toml"
WITHIN_S = 900.0
pytestmark = [
    pytest.mark.skipif(not PYTHON, reason="make test-engines has a vLLM"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu has the runs on a GPU"),
    pytest.mark.timeout(2 * WITHIN_S),
]
TINY = (
    *("--batch.groups-per-step=4", "--batch.group-size=4", "--rollout.slots=8", "--rollout.max-new-tokens=16"),
    *("--schedule.mode=overlap", "--eval.every=0", "--log.console=plain", "--run.name=a", "--run.threads=1"),
)
EAGER = ("--rollout.engine=vllm", f"--engine.python={PYTHON}", '--engine.arguments=["--enforce-eager"]')
SLOW = """
import time

def slow(prompt, response, **facts):
    time.sleep(0.3)  # leaves the cores to a server that starts
    return float(len(response) % 2)
"""
CONFIG = """
[[task]]
source = "arithmetic"
reward = "slow.py:slow"
"""
UP = re.compile(r"engine unix:(\S+): up after")


def start(folder: Path, *words: str) -> subprocess.Popen[str]:
    path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path if entry)
    return subprocess.Popen(
        [sys.executable, "-m", "offbeat", *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def offbeat(folder: Path, *words: str) -> str:
    """Runs a command to its end and returns what it printed."""
    process = start(folder, *words)
    printed, _ = process.communicate(timeout=WITHIN_S)
    assert process.returncode == 0, printed
    return printed


def logged(run: Path) -> str:
    return "\n".join(file.read_text(errors="replace")[-3000:] for file in sorted((run / "logs").glob("*.log")))


def until(seen, process: subprocess.Popen[str], run: Path) -> None:
    deadline_s = time.monotonic() + WITHIN_S
    while not seen():
        assert process.poll() is None, f"{process.communicate()[0]}\n{logged(run)}"
        assert time.monotonic() < deadline_s, logged(run)
        time.sleep(0.5)


def steps_of(run: Path) -> int:
    file = run / "metrics.jsonl"
    return len(file.read_text().splitlines()) if file.exists() else 0


def kill_server(place: str) -> None:
    """The process that listens there, with all that it started, as when a machine has had enough of it."""
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if b"offbeat_vllm_process" in words and place.encode() in words and b"-S" not in words:
            os.killpg(os.getpgid(int(entry.name)), signal.SIGKILL)
            return
    raise AssertionError(f"no server at {place}")


def test_the_example_trains_a_real_model_through_a_real_server_in_signed_pieces(tmp_path):
    offbeat(tmp_path, "model", "smollm2", "smollm2")
    offbeat(tmp_path, "train", str(EXAMPLE), f"--engine.python={PYTHON}", "--run.name=a", "--log.console=plain")
    run = tmp_path / "runs" / "a"
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["finished"], summary["steps"]) == (True, 3)
    assert summary["max_staleness_trained"] <= 4
    assert "everything holds" in offbeat(tmp_path, "ledger", "verify", "runs/a")
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    gaps = [row["logprob_gap"] for row in rows if row.get("logprob_gap") is not None]
    assert gaps
    assert max(gaps) < 2e-2
    assert "vllm 0." in offbeat(tmp_path, "show", "runs/a", "1")
    assert "delta" in {row["weights_kind"] for row in rows}


def test_two_workers_on_two_servers_lose_nothing_when_one_server_is_killed(tmp_path):
    run = tmp_path / "runs" / "a"
    (tmp_path / "slow.py").write_text(SLOW)
    (tmp_path / "run.toml").write_text(CONFIG)
    training = start(tmp_path, "train", "run.toml", *TINY, *EAGER, "--rollout.workers=2", "--run.steps=100000")
    try:
        log = run / "logs" / "worker-1.log"
        until(lambda: log.exists() and UP.search(log.read_text()), training, run)
        found = UP.search(log.read_text())
        assert found is not None
        until(lambda: steps_of(run) >= 2, training, run)
        kill_server(found.group(1))
        until(lambda: "back; loading version" in log.read_text(), training, run)
        num_before = steps_of(run)
        until(lambda: steps_of(run) >= num_before + 3, training, run)
        training.send_signal(signal.SIGTERM)
        printed, _ = training.communicate(timeout=WITHIN_S)
        assert training.returncode == 143, f"{printed}\n{logged(run)}"
    finally:
        training.kill()
    assert re.search(r"engine unix:\S+: dead: ", log.read_text())
    assert "everything holds" in offbeat(tmp_path, "ledger", "verify", "runs/a")


@pytest.mark.smoke
def test_a_run_that_trains_adapters_serves_each_version_as_the_trainer_computes_it(tmp_path):
    pytest.importorskip("peft")
    lora = ("--model.lora-rank=4", "--optimizer.lr=1e-2", "--run.steps=4", "--schedule.max-staleness=1")
    offbeat(tmp_path, "train", *TINY, *EAGER, "--rollout.workers=1", *lora)
    run = tmp_path / "runs" / "a"
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) == 4
    gaps = [row["logprob_gap"] for row in rows if row.get("logprob_gap") is not None]
    assert gaps
    assert max(gaps) < 1e-4
    assert "everything holds" in offbeat(tmp_path, "ledger", "verify", "runs/a")
    published = {file.name for file in (run / "weights").glob("[0-9]*/*")}
    assert published == {"adapter_model.safetensors", "adapter_config.json"}
    assert not (run / "workers" / "worker-1" / "adapters").exists()
    assert (run / LOCK).is_file(), "the trainer took its memory in its turn"


def test_the_rules_go_around_a_bare_engine_and_no_token_passes_the_bound():
    command = [str(PYTHON), str(ROOT / "examples" / "partial_vllm.py"), str(ROOT / "src/offbeat/model/tiny"), "6"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "VLLM_CPU_KVCACHE_SPACE": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=WITHIN_S, check=False)
    assert done.returncode == 0, done.stderr
    steps = re.findall(r"^step (\d): r = ([\d.]+), oldest token (\d), (\d+) go on$", done.stdout, re.M)
    assert [int(step) for step, *_ in steps] == list(range(6))
    assert all(float(factor) == 3 and int(oldest) <= 2 for _, factor, oldest, _ in steps)
