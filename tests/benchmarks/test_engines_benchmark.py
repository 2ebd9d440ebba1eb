"""The benchmark of ways to vLLM: what it computes, what it refuses to compare, and what it says without vLLM."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from living import is_alive
from transformers import AutoModelForCausalLM

from benchmarks.common.shapes import SHAPES
from benchmarks.engines import processes
from benchmarks.engines.changes import Window, losses
from benchmarks.engines.findings import (
    BATCH,
    EMBEDDED,
    IN_PROCESS,
    NAIVE,
    TARGETS,
    WORKER,
    Findings,
    Kind,
    bar_name,
    bars_of,
)
from benchmarks.engines.models import Models
from benchmarks.engines.work import Batches, Done, checked
from offbeat.errors import OffbeatError
from offbeat.tools.export import read

ROOT = Path(__file__).parents[2]


@pytest.mark.full
@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="this environment has vLLM")
@pytest.mark.timeout(120)
def test_the_quick_form_without_vllm_says_what_it_needs_and_leaves_its_bar_open():
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.engines", "--quick"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    line = json.loads(done.stdout.splitlines()[-1])
    assert line["bars"] == {
        bar_name(way, 8): {"value": None, "target": target, "holds": None, "spread": None}
        for way, target in TARGETS.items()
    }
    (said,) = done.stderr.splitlines()
    assert "has no vLLM" in said
    assert "--python" in said


def test_a_change_costs_the_time_that_its_missing_tokens_would_have_lasted():
    quiet = Window("", seconds=10.0, num_tokens=1000)
    windows = [
        quiet,
        Window("path", seconds=12.0, num_tokens=1000, num_loads=2, seconds_loading=1.0, seconds_still=0.5),
        quiet,
        Window("ipc", seconds=10.0, num_tokens=1500, num_loads=1),
        Window("", seconds=10.0, num_tokens=3000),
    ]
    (path,), (ipc,) = losses(windows)["path"], losses(windows)["ipc"]
    assert (path.lost_s, path.still_s, path.load_s) == (1.0, 0.25, 0.5)
    assert ipc.lost_s == 2.5, "the rate is that of both neighbours: 200 tokens/s"


@pytest.mark.parametrize("num_windows", range(6))
def test_windows_that_broke_off_tell_only_of_changes_between_two_quiet_ones(num_windows: int):
    windows = [Window("" if i % 2 == 0 else "path", 1.0, 10, num_loads=i % 2) for i in range(num_windows)]
    found = losses(windows).get("path", [])
    assert len(found) == max(num_windows - 1, 0) // 2


def test_ratios_are_to_the_median_in_process_and_decide_only_where_they_may():
    findings, batch = Findings(), Kind(BATCH, 256)
    for seconds in (1.0, 2.0, 4.0):
        findings.add(batch, IN_PROCESS, Done(seconds, 1000, 1000))
    findings.add(batch, WORKER, Done(2.2, 1000, 1000))
    findings.add(batch, EMBEDDED, Done(5.0, 1000, 1000))
    assert findings.ratios(batch, WORKER) == pytest.approx([1 / 1.1])
    decided = bars_of(findings, [256, 1024], decides=True)
    assert {name: bar.holds for name, bar in decided.items()} == {
        bar_name(WORKER, 256): True,
        bar_name(EMBEDDED, 256): False,
        bar_name(WORKER, 1024): None,
    }
    assert bars_of(findings, [256], decides=False)[bar_name(WORKER, 256)].holds is None
    assert findings.ratios(batch, NAIVE) == []


def test_an_answer_that_lacks_tokens_or_log_probs_is_not_compared():
    batch = Batches(num_prompt_tokens=4, vocabulary=100).make(num_requests=3, num_tokens=5, num_at_once=2)
    assert checked("worker", batch, Done(1.0, 15, 15)).tokens_per_s == 15
    for done in (Done(1.0, 14, 14), Done(1.0, 15, 0)):
        with pytest.raises(OffbeatError, match=r"worker: .* of 15"):
            checked("worker", batch, done)


def test_no_two_batches_share_a_prompt():
    batches = Batches(num_prompt_tokens=16, vocabulary=500)
    prompts = [tuple(prompt) for _ in range(2) for prompt in batches.make(64, 8, 64).prompts]
    assert len(set(prompts)) == len(prompts)
    assert {len(prompt) for prompt in prompts} == {16}


def test_versions_take_turns_are_whole_and_can_be_loaded_as_a_model(tmp_path: Path):
    models = Models(SHAPES["tiny"], tmp_path)
    first, second, third = models.next(), models.next(), models.next()
    assert (first.number, second.number, third.number) == (1, 2, 3)
    assert first.digest == third.digest != second.digest
    tensors = read(first)
    assert any(not torch.equal(tensor, read(second)[name]) for name, tensor in tensors.items())
    model, told = AutoModelForCausalLM.from_pretrained(second.path, dtype=torch.bfloat16, output_loading_info=True)
    assert not told["missing_keys"]
    assert not told["unexpected_keys"]
    counted = sum(tensor.numel() for name, tensor in tensors.items() if tensor.dim() == 2)
    assert counted == models.shape.num_parameters
    assert model(torch.tensor([[1, 2, 3]])).logits.isfinite().all()


def test_the_shape_of_a_1_5b_model_is_that_of_qwen2_5():
    assert SHAPES["1.5b"].num_parameters == pytest.approx(1.5437e9, rel=1e-3)


@pytest.mark.parametrize("habit", ["", "trap '' TERM; "])
def test_nothing_of_an_engine_outlives_its_context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, habit: str):
    monkeypatch.setattr(processes, "END_WITHIN_S", 0.5 if habit else 60.0)
    command = ["bash", "-c", f"{habit}sleep 300 & echo $!; wait"]
    with processes._process(command, os.environ, tmp_path / "log") as started:
        assert started.stdout is not None
        child = int(started.stdout.readline())
    assert started.returncode is not None
    assert not outlives(child)


def outlives(pid: int, seconds: float = 10.0) -> bool:
    deadline_s = time.monotonic() + seconds
    while is_alive(pid):
        if time.monotonic() > deadline_s:
            return True
        time.sleep(0.01)
    return False
