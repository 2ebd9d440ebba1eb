"""`offbeat calibrate` measures this machine and fits constants that `offbeat plan` takes; mistakes are one line."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from offbeat.cli.main import main
from offbeat.errors import UserError
from offbeat.model.loading import TINY_FOLDER
from offbeat.planner import plan as record
from offbeat.planner.cost.calibrate import Measurement, read
from offbeat.planner.cost.constants import Efficiencies, load
from offbeat.planner.cost.rollout_time import decode_step_s
from offbeat.planner.inputs.hardware import accelerator
from offbeat.planner.inputs.model_shapes import known_model, kv_bytes_per_token
from offbeat.tools import measure
from offbeat.tools.measure import figures_of

MODEL = "Qwen2.5-7B"
WORKLOAD = f"""
[model]
config = "{TINY_FOLDER}/config.json"
bytes_per_weight = 4
bytes_per_kv = 4

[batch]
groups_per_step = 4
group_size = 8

[prompt]
tokens = 20

[answer]
median = 40
sigma = 0.5
longest = 200
"""


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def one_thread():
    """Whose own time is measured, whatever else the machine does."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def told(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(words) == 0
    said = capsys.readouterr()
    assert said.err == ""
    return said.out


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(words) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    return said.err.removeprefix("offbeat: ").rstrip()


def decodes(name: str = "h200", rows: tuple[int, ...] = (1, 8, 64)) -> list[Measurement]:
    card, shape = accelerator("h200"), known_model(MODEL)
    return [
        Measurement(
            "decode", name, decode_step_s(shape, card, Efficiencies(), 1, each, context), rows=each, context=context
        )
        for each in rows
        for context in (512, 2048, 8192)
    ]


def write(measurements: list[Measurement], more: str = "") -> str:
    Path("m.jsonl").write_text("".join(json.dumps(asdict(one)) + "\n" for one in measurements) + more)
    return "m.jsonl"


def test_this_machine_is_measured_fitted_and_planned_with(capsys, one_thread):
    words = ("--memory-gb", "16", "--bandwidth-tb-s", "0.02")
    said = told(capsys, "calibrate", "--measure", "--quick", "--model", "offbeat-tiny", "--out", "m.jsonl", *words)
    measured = read(Path("m.jsonl"))
    machine = measured.machines["cpu"]
    assert f"cpu: tflops = {machine.tflops:g}" in said
    assert (machine.memory_gb, machine.bandwidth_tb_s, machine.engine) == (16, 0.02, "embedded")
    assert machine.versions["torch"] == torch.__version__
    assert len(machine.date) == len("2026-01-01")
    assert {one.kind for one in measured.measurements} == {"decode", "prefill", "train"}

    said = told(capsys, "calibrate", "m.jsonl", "--model", "offbeat-tiny", "--out", "constants.json")
    assert all(f"  held out  {kind}: off by " in said for kind in ("decode", "prefill", "train"))
    assert said.splitlines()[1].startswith("  fitted    gemm_share ")
    assert "link_share" in said[said.index("  default") :]
    assert load(Path("constants.json")).source("cpu", "kv_read_share") == "fitted"

    Path("workload.toml").write_text(WORKLOAD)
    figures = f"tflops = {machine.tflops:g}\nmemory_gb = 16\nbandwidth_tb_s = 0.02\n"
    place = "nodes = 4\nper_node = 1\nowned = true\n[links]\nbetween_nodes = 1.0\n"
    Path("cluster.toml").write_text(f"[classes.cpu]\n{figures}{place}")
    files = ("cluster.toml", "workload.toml", "--constants", "constants.json", "--json")
    plan = record.from_json(told(capsys, "plan", *files))
    assert plan.certificate.held_out_error is not None
    assert any("cpu: 7 of 14 constants" in line for line in plan.assumptions)


def full(*_, **__):
    raise torch.OutOfMemoryError("full")


def test_a_model_that_does_not_fit_into_memory_is_one_line(capsys, monkeypatch):
    monkeypatch.setattr(measure, "Stepper", full)
    said = refused(capsys, "calibrate", "--measure", "--model", "offbeat-tiny", "--out", "m.jsonl")
    assert said == "model.path = 'offbeat-tiny': does not fit into the memory of cpu; take a smaller model"


def test_training_that_does_not_fit_into_memory_leaves_the_rest_measured(capsys, monkeypatch, one_thread):
    monkeypatch.setattr(measure, "QUICK", measure.Sizes((1, 2, 4), 64, (1,), (1, 2), num_rounds=1))
    monkeypatch.setattr(measure, "Policy", full)
    words = ("--tflops", "1", "--memory-gb", "16", "--bandwidth-tb-s", "0.02")
    said = told(capsys, "calibrate", "--measure", "--quick", "--model", "offbeat-tiny", "--out", "m.jsonl", *words)
    assert "m.jsonl: measurements of offbeat-tiny: 9 decode, 3 prefill\ntraining did not fit into memory" in said
    assert {one.kind for one in read(Path("m.jsonl")).measurements} == {"decode", "prefill"}


def test_rows_are_as_many_as_fit_into_a_gpus_memory(monkeypatch):
    shape, gpu = known_model(MODEL), torch.device("cuda")
    row_bytes = 1040 * kv_bytes_per_token(shape)
    monkeypatch.setattr(measure, "memory_bytes", lambda device: (2 * 20 * row_bytes, 0))
    assert measure._fitting_rows((1, 4, 16, 32), 1024, shape, gpu) == 16
    with pytest.raises(UserError, match="only 20 answers of 1024 tokens fit in memory; use a smaller model"):
        measure._fitting_rows((1, 16, 32), 1024, shape, gpu)


def test_fitted_constants_are_those_that_made_the_measurements_and_the_rest_is_told_as_default(capsys):
    said = told(capsys, "calibrate", write(decodes("h200-sxm")), "--model", MODEL, "--out", "c.json")
    assert said.splitlines()[0] == "h200"
    assert "training_share 0.4" in said[said.index("  default") :]
    assert "kv_read_share" not in said[said.index("  default") :]
    found = load(Path("c.json"))
    assert found.of("h200").kv_read_share == pytest.approx(Efficiencies().kv_read_share, rel=0.05)
    assert f"{found.errors['h200.decode'].worst:.1%} at worst, of 18 predictions" in said


MISTAKES = {
    "no file": (["none.jsonl"], "none.jsonl cannot be read: No such file or directory; give a file of measurements"),
    "neither": ([], "offbeat calibrate needs a file of measurements, --measure to measure this machine, or --engine"),
    "both": (["m.jsonl", "--measure"], "give either the file m.jsonl or --measure, not both"),
    "quick without measuring": (["m.jsonl", "--quick"], "--quick goes only with --measure"),
    "no flops": (["--measure", "--tflops", "-1"], "--tflops is -1; it must be"),
    "no such model": (["m.jsonl", "--model", "Qwen2.5-7C"], "--model 'Qwen2.5-7C': unknown model; did you mean"),
    "no such config": (["m.jsonl", "--model", "no.json"], "no.json cannot be read"),
    "no folder": (["m.jsonl", "--out", "no/c.json"], "--out no/c.json: the folder no does not exist"),
    "a folder": (["m.jsonl", "--out", "."], "--out . is a folder; give a file"),
    "no model here": (["--measure", "--model", "nowhere"], "model.path = 'nowhere': no such folder"),
    "no model": (["m.jsonl", "--modle", "x"], "--model"),
}


@pytest.mark.parametrize("words, line", MISTAKES.values(), ids=MISTAKES)
def test_wrong_words_are_one_line(capsys, words, line):
    write(decodes())
    given = [] if any(word.startswith("--mod") for word in words) else ["--model", MODEL]
    out = [] if "--out" in words else ["--out", "c.json"]
    assert line in refused(capsys, "calibrate", *words, *given, *out)
    assert not Path("c.json").exists()


def test_a_mistake_in_the_measurements_is_one_line(capsys):
    def said(*given: Any) -> str:
        return refused(capsys, "calibrate", write(*given), "--model", MODEL, "--out", "c.json")

    unknown = json.dumps({"kind": "decoding", "accelerator": "h200", "seconds": 1})
    assert said(decodes(), unknown) == "m.jsonl:10: unknown kind 'decoding'; did you mean 'decode'?"
    assert said(decodes(rows=(1, 8))).startswith("decode on h200: measure 3 or more different values of rows, not 2")
    assert said(decodes("h2000")) == "accelerator 'h2000' is not in the catalogue; did you mean 'h200'?"
    assert said([]).startswith("m.jsonl has no measurements")


def test_a_gpu_is_what_the_catalogue_or_the_user_says(monkeypatch):
    gpu = torch.device("cuda")
    monkeypatch.setattr(measure, "device_name", lambda device: "NVIDIA H200")
    name, figures = figures_of(gpu, None, {"memory_gb": 100.0})
    assert (name, figures["memory_gb"], figures["tflops"]) == ("h200", 100, accelerator("h200").flops / 1e12)
    monkeypatch.setattr(measure, "device_name", lambda device: "NVIDIA Mystery 9")
    own = {"tflops": 5.0, "memory_gb": 8.0, "bandwidth_tb_s": 0.3}
    assert figures_of(gpu, None, own) == ("mystery-9", own)
    assert figures_of(gpu, "a100", {})[0] == "a100-80gb"
    with pytest.raises(UserError, match=r"'mystery-9':? is not in the catalogue; .*; give --accelerator, or --tflops"):
        figures_of(gpu, None, {})
    with pytest.raises(UserError, match="there is no GPU here"):
        figures_of(torch.device("cpu"), "h200", {})


def test_fitting_needs_no_torch():
    words = ["calibrate", write(decodes()), "--model", MODEL, "--out", "c.json"]
    code = f"import sys; from offbeat.cli.main import main; main({words!r}); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == "False"
