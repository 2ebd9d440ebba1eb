"""Every example runs as it is; those that need no download are trained, small."""

from __future__ import annotations

from pathlib import Path

import pytest
from doc_reader import ROOT, SMALL, SMALL_WORDS, Reader

from offbeat.config import load
from offbeat.config.keys import TASK_MODELS

EXAMPLES = sorted((ROOT / "examples").glob("*.toml"))
NEED_A_DOWNLOAD = {"smollm2"}
NEED_WORKERS = {"swarm"}
"""Trained by test_swarm, which brings some."""


def name(example: Path) -> str:
    return example.stem


@pytest.mark.parametrize("example", EXAMPLES, ids=name)
def test_an_example_passes_a_dry_run(example: Path, reader: Reader):
    stand_in = ["--model.path=offbeat-tiny"] if example.stem in NEED_A_DOWNLOAD else []
    told = reader.succeed("train", f"examples/{example.name}", "--dry-run", *stand_in)
    assert told.startswith("would start a run in runs/")


@pytest.mark.parametrize("example", [e for e in EXAMPLES if e.stem not in NEED_A_DOWNLOAD | NEED_WORKERS], ids=name)
def test_an_example_trains(example: Path, reader: Reader):
    told = reader.succeed("train", f"examples/{example.name}", *SMALL_WORDS, f"--run.name={example.stem}")
    assert f"{SMALL['run.steps']} steps in" in told
    assert reader.succeed("ledger", "verify", f"runs/{example.stem}").endswith("everything holds\n")


@pytest.mark.parametrize("example", EXAMPLES, ids=name)
def test_an_example_says_how_it_is_started(example: Path):
    comments = [line for line in example.read_text().splitlines() if line.startswith("#")]
    assert any(f"{line} ".startswith(f"#   offbeat train examples/{example.name} ") for line in comments)


def test_the_examples_show_every_source_that_needs_no_hub():
    shown = {task.source for example in EXAMPLES for task in load(example).task}
    assert shown == set(TASK_MODELS) - {"dataset"}


def test_every_python_file_beside_the_examples_is_used_by_one():
    texts = [example.read_text() for example in EXAMPLES]
    for file in (ROOT / "examples").glob("*.py"):
        assert any(f"examples/{file.name}:" in text for text in texts), file.name
