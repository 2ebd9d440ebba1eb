"""Every example trains, small: one that is added is trained here without being named."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from doc_reader import DOCS, ROOT, SMALL, SMALL_WORDS, Reader, commands

from offbeat.config import load
from offbeat.config.keys import TASK_MODELS

EXAMPLES = sorted((ROOT / "examples").glob("*.toml"))
OTHER_MODEL = ["--model.path=offbeat-tiny", "--task.system=none"]
"""The model that ships with Offbeat has no chat template."""
GSM8K = [*OTHER_MODEL, "--task.source=file", "--task.path=problems.jsonl", "--optimizer.warmup-steps=0"]
STAND_INS = {
    "gsm8k": [*GSM8K, "--rollout.engine=embedded", "--rollout.workers=none", "--rollout.max-new-tokens=64"],
    "gsm8k_lora": [*GSM8K, "--rollout.engine=embedded", "--rollout.workers=none", "--rollout.max-new-tokens=64"],
    "smollm2": [*OTHER_MODEL, "--optimizer.warmup-steps=0"],
    "vllm_cpu": [*OTHER_MODEL, "--rollout.engine=embedded", "--rollout.workers=none"],
    "swarm": ["--rollout.workers=none"],
}
"""Replacements for what is not here: a download, a vLLM (tests/contracts trains with one), workers in other terminals
(test_swarm opens some)."""
DRY_RUN_KEYS = ("--model.path", "--task.", "--rollout.max-new-tokens")
"""Beginnings of those replacements that a dry run needs, too."""
FAST = ("partial", "mixture", "own_task")
"""Examples that the fast tier trains; the README's commands train some more."""


def name(example: Path) -> str:
    return example.stem


def needs(example: Path) -> list[str]:
    """Packages beyond those that every installation has."""
    config = load(example)
    gym = ["reasoning_gym"] if any(task.source == "reasoning-gym" for task in config.task) else []
    return [*gym, *(["peft"] if config.model.lora_rank else [])]


@pytest.mark.parametrize("example", EXAMPLES, ids=name)
def test_an_example_passes_a_dry_run(example: Path, reader: Reader):
    stand_in = [word for word in STAND_INS.get(example.stem, []) if word.startswith(DRY_RUN_KEYS)]
    if load(example).rollout.engine == "vllm":
        stand_in.append("--engine.url=http://127.0.0.1:8000")  # no vLLM is installed here
    told = reader.succeed("train", f"examples/{example.name}", "--dry-run", *stand_in)
    assert told.startswith("would start a run in runs/")


@pytest.mark.parametrize(
    "example", [pytest.param(path, marks=[] if path.stem in FAST else pytest.mark.full) for path in EXAMPLES], ids=name
)
def test_an_example_trains(example: Path, reader: Reader):
    for package in needs(example):
        pytest.importorskip(package)
    updates = load(example).batch.updates_per_step
    words = [*SMALL_WORDS, f"--run.name={example.stem}", *STAND_INS.get(example.stem, [])]
    words += [f"--batch.groups-per-step={updates}"] if updates > 1 else []
    reader.succeed("train", f"examples/{example.name}", *words)
    rows = [json.loads(line) for line in (reader.folder / "runs" / example.stem / "metrics.jsonl").open()]
    steps = [row for row in rows if "reward" in row]
    assert [row["step"] for row in steps] == list(range(1, SMALL["run.steps"] + 1))
    assert all(math.isfinite(row["loss"]) and row["num_trained_tokens"] > 0 for row in steps)
    assert reader.succeed("ledger", "verify", f"runs/{example.stem}").endswith("everything holds\n")


def test_stand_ins_are_for_examples_that_exist():
    assert set(STAND_INS) <= {example.stem for example in EXAMPLES}


@pytest.mark.parametrize("example", EXAMPLES, ids=name)
def test_an_example_says_how_it_is_started(example: Path):
    comments = [line for line in example.read_text().splitlines() if line.startswith("#")]
    assert any(f"{line} ".startswith(f"#   offbeat train examples/{example.name} ") for line in comments)


def test_the_examples_show_every_source():
    assert {task.source for example in EXAMPLES for task in load(example).task} == set(TASK_MODELS)


def test_every_python_file_beside_the_examples_is_used_by_one_or_run_by_a_page_or_has_its_own_test():
    texts = [example.read_text() for example in EXAMPLES]
    typed = [word for page in DOCS for command in commands(page) for word in command.split()]
    for file in (ROOT / "examples").glob("*.py"):
        name = f"examples/{file.name}"
        has_test = (ROOT / "tests" / "examples" / f"test_{file.stem}.py").is_file()
        assert has_test or name in typed or any(f"{name}:" in text for text in texts), name
