"""The benchmark of one card: a larger card plays a smaller one, and its figures are read from the right places."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.one_gpu import memory_in_use, small_card
from benchmarks.one_gpu.__main__ import bars_of, rows_of
from benchmarks.one_gpu.case import (
    OUT_OF_MEMORY,
    SHARE,
    TEMPLATE,
    Outcome,
    halvings,
    reaches,
    trained,
    write_hook,
    write_model,
)
from benchmarks.one_gpu.memory_in_use import MIB, MemoryInUse, bytes_of

GB = 10**9
FAKES = {
    "torch/__init__.py": "",
    "torch/cuda/__init__.py": (
        "from types import SimpleNamespace\n"
        "from torch.cuda.memory import mem_get_info, set_per_process_memory_fraction\n"
        f"def get_device_properties(device): return SimpleNamespace(total_memory={140 * GB})"
    ),
    "torch/cuda/memory.py": (
        f"def mem_get_info(device=None): return {130 * GB}, {140 * GB}\n"
        "shares = []\ndef set_per_process_memory_fraction(share, device=None): shares.append(share)"
    ),
    "torch/accelerator/__init__.py": "from torch.accelerator.memory import get_memory_info",
    "torch/accelerator/memory.py": f"def get_memory_info(device=None, /): return {100 * GB}, {140 * GB}",
    "vllm/__init__.py": "",
    "vllm/third_party/__init__.py": "",
    "vllm/third_party/pynvml.py": (
        "from types import SimpleNamespace\n"
        f"def nvmlDeviceGetMemoryInfo(card): return SimpleNamespace(total={140 * GB}, free={130 * GB}, used={10 * GB})"
    ),
}
ASK = """\
import sys
assert "torch" not in sys.modules
import json, torch.accelerator, torch.cuda
from vllm.third_party import pynvml
nvml = pynvml.nvmlDeviceGetMemoryInfo(0)
pairs = torch.cuda.mem_get_info(0), torch.accelerator.get_memory_info(0)
torch.cuda.set_per_process_memory_fraction(0.5, 0)
print(json.dumps([*pairs, [nvml.free, nvml.total, nvml.used], torch.cuda.memory.shares]))
"""
OUTCOME = Outcome(
    **{"peak_gb": 23.0, "next_step_s": 61.0, "caught_up_s": 70.0, "first_train_s": 12.0, "is_mid_step": True},
    **{"num_steps": 10, "findings": [], "microbatch_tokens": 2048, "num_halvings": 0, "memory_warnings": []},
    **{"engine_share": 0.45, "undone_steps": [5]},
)


@pytest.fixture
def hook(tmp_path: Path) -> Path:
    write_hook(tmp_path / "hook", sys.executable)
    return tmp_path / "hook"


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    for name, text in FAKES.items():
        file = tmp_path / "packages" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return tmp_path / "packages"


def said(command: list[str], environment: dict[str, str]) -> list[list[int]]:
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", small_card.BYTES)}
    done = subprocess.run(command, env=kept | environment, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def test_every_way_to_ask_for_the_memory_names_the_smaller_card(hook, packages):
    environment = {"PYTHONPATH": f"{hook}{os.pathsep}{packages}", small_card.BYTES: str(24 * GB)}
    pair, accelerator, nvml, shares = said([sys.executable, "-c", ASK], environment)
    assert pair == [14 * GB, 24 * GB]
    assert accelerator == [0, 24 * GB], "more is in use than the smaller card has"
    assert nvml == [14 * GB, 24 * GB, 10 * GB]
    assert shares == [0.5 * 24 / 140]


def test_without_the_variable_nothing_is_changed(hook, packages):
    environment = {"PYTHONPATH": f"{hook}{os.pathsep}{packages}"}
    assert said([sys.executable, "-c", ASK], environment)[0] == [130 * GB, 140 * GB]


@pytest.mark.parametrize("is_cleared", [False, True])
def test_the_engines_interpreter_adds_the_hook_to_the_path(hook, packages, is_cleared):
    ask = ASK if not is_cleared else f"import sys; sys.path.insert(0, {str(packages)!r})\n{ASK}"
    path = {} if is_cleared else {"PYTHONPATH": str(packages)}
    assert said([str(hook / "python"), "-c", ask], path | {small_card.BYTES: str(80 * GB)})[0] == [70 * GB, 80 * GB]


def test_lines_that_are_no_samples_are_told_apart():
    assert bytes_of("4321\n") == 4321 * MIB
    assert bytes_of("4321.5\n") == 4321.5 * MIB
    assert [bytes_of(line) for line in ("[N/A]\n", "", "No devices were found\n")] == [None] * 3


def test_the_peak_is_what_came_on_top_and_a_command_without_samples_is_replaced(monkeypatch):
    prints = "import time\nfor n in (500, 100, 900, 300): print(n, flush=True)\ntime.sleep(60)"
    found = [[sys.executable, "-c", "print('No devices were found')"], [sys.executable, "-c", prints]]
    monkeypatch.setattr(memory_in_use, "commands", lambda: found)
    with MemoryInUse() as memory:
        memory_in_use.until(lambda: len(memory.samples) == 4, "the samples", 20.0)
    assert memory.peak_bytes == 800 * MIB
    assert memory.said == ["No devices were found"]
    assert memory.process.returncode is not None


def test_a_sampler_that_ends_early_is_an_error(monkeypatch):
    monkeypatch.setattr(memory_in_use, "commands", lambda: [[sys.executable, "-c", "print(1)"]])
    with pytest.raises(OSError, match="ended with status 0"), MemoryInUse() as memory:
        memory.process.wait()


def test_rows_of_evaluations_are_no_steps():
    rows = [{"step": 4, "reward": 0.5}, {"step": 5, "eval_reward": 0.5}]
    assert trained(rows) == rows[:1]
    assert not reaches(trained(rows), 5)
    assert reaches(trained([*rows, {"step": 6, "reward": None}]), 5)


def test_halvings_are_told_from_a_first_measurement():
    events = [{"event": "microbatch", "tokens": 1024}, {"event": "resume"}, {"event": "microbatch", "tokens": 512}]
    assert halvings(events, "auto") == 1
    assert halvings(events, 2048) == 2
    assert halvings([], "auto") == halvings([], 2048) == 0


def test_logs_are_read_for_what_ran_out_and_what_vllm_took():
    assert OUT_OF_MEMORY.search("out of GPU memory: micro-batches have 1024 tokens from now on")
    assert OUT_OF_MEMORY.search("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB")
    assert not OUT_OF_MEMORY.search("AdamW's moments stay in host memory")
    assert SHARE.findall("non-default args: {'max_model_len': 896, 'gpu_memory_utilization': 0.297}") == ["0.297"]


def test_the_model_has_a_template_for_system_messages(tmp_path):
    from transformers import AutoTokenizer

    from benchmarks.common.shapes import SHAPES

    tokenizer = AutoTokenizer.from_pretrained(write_model(SHAPES["tiny"], tmp_path / "model"))
    assert tokenizer.chat_template == TEMPLATE
    said = [{"role": "system", "content": "Add."}, {"role": "user", "content": "1 + 1"}]
    assert tokenizer.apply_chat_template(said, tokenize=False) == "system: Add.\nuser: 1 + 1\nassistant: "


def test_bars_hold_for_the_card_that_was_played_and_the_other_is_left_open():
    bars = bars_of({"lora": OUTCOME}, quick=False)
    assert (bars["peak GB, lora"].value, bars["peak GB, lora"].holds) == (23.0, True)
    assert bars["next step s, lora"].holds is False
    assert bars["first step after restart s, lora"].holds is True
    assert bars["peak GB, full"].value is None
    assert bars["ledger findings"].holds is True
    assert all(bar.holds is None for bar in bars_of({"lora": OUTCOME}, quick=True).values())
    assert bars_of({}, quick=False)["ledger findings"].value is None
    assert ("vLLM's share of the card", "0.45") in rows_of({"lora": OUTCOME})
