"""The page about engines is true: servers are started as those of the contract tests, and a worker that is to attach to
one joins as told and waits for it. What needs a real server is in tests/contracts."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
from doc_reader import ROOT, blocks, commands
from terminals import SMALL, Terminals

from benchmarks.common.vllm_http import http_command, http_environment
from offbeat.config import load
from offbeat.config.schema import Config
from offbeat.engines.process.commands import EngineMachine, command
from offbeat.engines.sglang.api import LAUNCHER
from offbeat.engines.vllm.lora import RANKS

PAGE = ROOT / "docs" / "engines.md"
RESULTS = ROOT / "benchmarks" / "results" / "engines-h200.md"
(JOIN,) = [line for block in blocks(PAGE, "sh") for line in block.splitlines() if "--join" in line]
VLLM, SGLANG = (shlex.split(line) for line in commands(PAGE) if "--host" in line)
(SERVE, _) = blocks(ROOT / "docs" / "swarm.md", "sh")[-1].splitlines()
PORT = ("--host", "127.0.0.1", "--port", "8000")
OWN_CHOICE = {"--port", "--model-path"}
"""Options whose values are the reader's own."""


def options(words: list[str]) -> set[tuple[str, ...]]:
    """Switches, and options with their values."""
    pairs = zip(words, [*words[1:], "--"], strict=True)
    return {(word,) if value.startswith("--") else (word, value) for word, value in pairs if word.startswith("--")}


def contract_command(engine: str) -> list[str]:
    """The command of the contract tests' server."""
    config = load(None, [f"--rollout.engine={engine}", "--rollout.workers=1"])
    machine = EngineMachine("python", 1, 0.85)
    return http_command(config, machine, PORT) if engine == "vllm" else command(config, machine, PORT)


@pytest.mark.parametrize("engine, words", [("vllm", VLLM), ("sglang", SGLANG)])
def test_a_server_to_attach_to_is_started_with_what_was_tested(engine: str, words: list[str]):
    own = contract_command(engine)
    shown = {option for option in options(words) if option[0] not in OWN_CHOICE}
    if engine == "vllm":
        assert "--tokens-only" in own  # which brings the same calls, and takes away those for text
        shown.remove(("--enable-scale-out",))
    else:
        assert words[:3] == ["python", "-m", "sglang.launch_server"]
        assert LAUNCHER in own  # the same, with a key
    assert shown <= options(own)
    assert len(shown) >= 4


def test_the_environment_of_vllm_is_the_one_that_was_tested():
    name, value = VLLM[0].split("=")
    config = load(None, ["--rollout.engine=vllm", "--rollout.workers=1"])
    assert http_environment(config)[name] == value
    told = re.findall(r"`(VLLM_\w+)=(\w+)`", PAGE.read_text())
    own = http_environment(config) | http_environment(with_adapters())
    assert {(name, own.get(name)) for name, _ in told} == set(told)


def with_adapters() -> Config:
    return load(None, ["--rollout.engine=vllm", "--rollout.workers=1", "--model.lora-rank=12"])


def test_a_server_for_adapters_is_started_with_what_a_worker_starts_its_own_with():
    (shown,) = re.findall(r"`(--enable-lora [^`]*)`", PAGE.read_text())
    assert options(shown.split()) <= options(command(with_adapters(), EngineMachine("python", 1, 0.85), PORT))
    (ranks,) = re.findall(r"can be started for are ([\d, and]+);", " ".join(PAGE.read_text().split()))
    assert tuple(map(int, re.findall(r"\d+", ranks))) == RANKS


@pytest.mark.full
def test_a_worker_that_is_told_of_a_server_joins_and_waits_for_it(terminals: Terminals):
    terminals.start(SERVE, SMALL, "--run.steps=4 --serve.port", terminals.port)
    serving: Path = terminals.folder / "runs" / "swarm" / "serve.json"
    terminals.until("the coordinator listens", serving.is_file)
    terminals.start(JOIN.replace(":8000", ":9"))
    waits = "engine http://127.0.0.1:9: waiting for the server to answer"
    terminals.until("the worker waits for its engine", lambda: waits in terminals.screen())


def test_the_figures_on_the_page_are_those_that_were_measured():
    (raw,) = [json.loads(text) for text in blocks(RESULTS, "json")]
    lost = {way: [change["lost_s"] for change in changes] for way, changes in raw["changes"].items()}
    ratios = [raw["adapter_over_in_process"]["batch"], raw["naive_over_in_process"]["batch"]]
    rows = [*((values, 2) for values in ratios), (lost["path"], 1), (lost["ipc"], 1)]
    expected = [f"{sum(v) / 2:.{n}f} | {min(v):.{n}f} to {max(v):.{n}f} |" for v, n in rows]
    shown = re.findall(r"^\| [^|]*\| ([\d.]+ \| [\d.]+ to [\d.]+ \|)$", PAGE.read_text(), re.MULTILINE)
    assert shown == expected
    before = sum(raw["tokens_per_s"]["batch"]["in process"][:2]) / 2
    alone = [rate / before for rate in raw["tokens_per_s"]["batch"]["adapter"]]
    assert f"{min(alone):.2f} to {max(alone):.2f}" in PAGE.read_text()
