"""`offbeat calibrate --engine` times a running server; what it cannot time is left out, and mistakes are one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from openai_server import PacedServer, serving

from offbeat.cli.main import main
from offbeat.planner.cost.calibrate import read
from offbeat.tools import measure_server


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(measure_server, "ROUNDS", 1)
    monkeypatch.setattr(measure_server, "STEPS", (16, 48))


def calibrate(url: str, *words: str) -> int:
    fixed = ["--model", "qwen2.5-1.5b", "--accelerator", "h200", "--out", "swept.jsonl"]
    return main(["calibrate", "--engine", url, *fixed, *words])


def step_s(rows: int, context: float) -> float:
    return 0.01 + 5e-4 * rows  # contexts make no difference that would show on a busy machine


@pytest.mark.full
@pytest.mark.parametrize("tokens_per_event", [1, 4])
def test_a_sweep_of_a_server_finds_the_seconds_of_its_steps(capsys, tokens_per_event):
    server = PacedServer(step_s, prefill_s=1e-5, tokens_per_event=tokens_per_event)
    with serving(server) as url:
        assert calibrate(url, "--rows", "1,4,16,24", "--contexts", "64,128,256") == 0
    measured = read(Path("swept.jsonl"))
    steps = [one for one in measured.measurements if one.kind == "decode"]
    assert sorted(one.rows for one in steps) == [rows for rows in (1, 4, 16, 24) for _ in range(3)]
    for one in steps:
        took_s = [seconds for rows, seconds in server.steps if rows == one.rows]
        assert min(took_s) / 2 < one.seconds < max(took_s) * 2  # a busy machine may add to either
    prompts = [body["prompt"] for body in server.asked]
    assert len({tuple(prompt[:32]) for prompt in prompts}) == len(prompts), "no prompt may be found in a cache"
    assert measured.machines["h200"].bandwidth_tb_s == 4.8
    assert "fit them with" in capsys.readouterr().out


def test_cells_that_the_server_cannot_hold_are_left_out(capsys):
    with serving(PacedServer(lambda rows, context: 0.002, num_slots=4, max_context_tokens=300)) as url:
        assert calibrate(url, "--rows", "1,2,4,16", "--contexts", "64,128,1024") == 0
    lines = [json.loads(line) for line in Path("swept.jsonl").read_text().splitlines()]
    assert {(line["rows"], line["context"] < 200) for line in lines if line["kind"] == "decode"} == {
        (1, True), (2, True), (4, True)
    }  # fmt: skip
    assert "16 answers at 64 tokens: left out, the server did not run all of them at once" in capsys.readouterr().out


def test_a_key_is_asked_for_and_taken_from_the_environment(capsys, monkeypatch):
    with serving(PacedServer(lambda rows, context: 0.001, key="open")) as url:
        assert calibrate(url) == 2
        assert "set the server's key in OFFBEAT_ENGINE_KEY" in capsys.readouterr().err
        monkeypatch.setenv("OFFBEAT_ENGINE_KEY", "open")
        assert calibrate(url, "--rows", "1,2,4", "--contexts", "64") == 0


@pytest.mark.parametrize(
    "words, told",
    [
        (["--engine", "http://127.0.0.1:9", "--accelerator", "h200"], "check that --engine is the address"),
        (["--engine", "http://127.0.0.1:9", "--accelerator", "h200", "--rows", "1,x"], "--rows is '1,x'"),
        (["--engine", "http://127.0.0.1:9"], "--engine needs --accelerator"),
        (["--engine", "http://127.0.0.1:9", "--accelerator", "h2000"], "not in the catalogue"),
        (["--engine", "ftp://here", "--accelerator", "h200"], "not the URL of an engine"),
        (["--engine", "http://127.0.0.1:9", "--measure"], "give either --measure or --engine"),
        (["swept.jsonl", "--rows", "1"], "--rows goes only with --engine"),
    ],
)
def test_mistakes_are_one_line(capsys, words, told):
    assert main(["calibrate", *words, "--model", "qwen2.5-1.5b", "--out", "out.json"]) == 2
    said = capsys.readouterr().err
    assert told in said
    assert said.count("\n") == 1
