"""What the pages below docs show is true: their commands, their TOML and their Python work."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
from doc_reader import (
    ATTACHING,
    DOCS,
    ROOT,
    RUN_BY_ENGINE_TESTS,
    SWARM,
    Reader,
    blocks,
    commands,
    last_command_of_make,
    train_small,
)

import offbeat
from offbeat.config import load
from offbeat.data.mixture import build_mixture
from offbeat.launch.joining import new_token
from offbeat.rewards.wire import ARGUMENTS

WITH_A_TEST_OF_ITS_OWN = ("gpu-quickstart", "install")
SINK_IS_MISSING = "its package is not installed"


def on_pages(find) -> list:
    pages = [page for page in DOCS if page.stem not in WITH_A_TEST_OF_ITS_OWN]
    return [pytest.param(page, found, id=f"{page.stem}-{i}") for page in pages for i, found in enumerate(find(page))]


@pytest.mark.parametrize("page, command", on_pages(commands))
def test_a_command_on_a_page_works(page: Path, command: str, reader: Reader):
    if command in SWARM:
        return  # test_swarm follows that page from its first line to its last
    if command in ATTACHING:
        return  # test_engines_page knows what they must be
    match shlex.split(command):
        case ["make", "bench"]:
            assert last_command_of_make("bench") == [".venv/bin/python", "-m", "benchmarks"]
        case ["make", "test-engines"]:
            assert last_command_of_make("test-engines")[-1:] == ["tests/contracts"]
        case ["offbeat", "model", "smollm2", "smollm2"]:
            assert 'offbeat(tmp_path, "model", "smollm2", "smollm2")' in RUN_BY_ENGINE_TESTS
        case ["offbeat", "train", "examples/vllm_cpu.toml"]:
            assert '/ "vllm_cpu.toml"' in RUN_BY_ENGINE_TESTS
            stand_in = ("--model.path=offbeat-tiny", "--task.system=none")
            url = "--engine.url=http://127.0.0.1:8000"  # no vLLM is installed here
            assert reader.succeed("train", "examples/vllm_cpu.toml", "--dry-run", *stand_in, url)
        case ["PYTHONPATH=src", ".venv-vllm/bin/python", "examples/partial_vllm.py", *words]:
            assert 'str(ROOT / "examples" / "partial_vllm.py")' in RUN_BY_ENGINE_TESTS
            assert words == ["src/offbeat/model/tiny", "6"]
        case ["offbeat", "doctor", "--engine-url", url]:
            said = reader.offbeat("doctor", "--engine-url", url.replace(":8000", ":9"))
            assert (said.status, f"server: {url.replace(':8000', ':9')}: no server answers;" in said.out) == (1, True)
        case ["python", "-m", "benchmarks", name, "--full"]:
            assert "--full" in (ROOT / "benchmarks" / "__main__.py").read_text()
            assert (ROOT / "benchmarks" / name / "__main__.py").is_file()
        case ["python", "-m", module, *words]:
            texts = [file.read_text() for file in (ROOT / module.replace(".", "/")).glob("*.py")]
            assert all(any(f'"{word}"' in text for text in texts) for word in words)
        case ["offbeat", "train", *words]:
            said = reader.run.is_dir() and reader.offbeat("train", *words, "--dry-run")
            assert said.status == 0 or SINK_IS_MISSING in said.err, said.err
        case ["cp", "-r", "runs/NAME", "runs/again", "&&", "offbeat", *words]:
            shutil.copytree(reader.run, reader.folder / "runs" / "again")
            assert "would resume runs/again" in reader.succeed(*words, "--dry-run")
            shutil.rmtree(reader.folder / "runs" / "again")
        case ["offbeat", "eval", *words]:
            assert reader.model.is_dir()
            assert "mean@" in reader.succeed("eval", *words, "--prompts=4")
        case ["offbeat", "ledger", "verify" | "show" as action, "runs/NAME"]:
            assert reader.run.is_dir()
            assert "trajectories" in reader.succeed("ledger", action, "runs/NAME")
        case ["offbeat", "page", "runs/NAME", "--out", file]:
            assert reader.run.is_dir()
            assert f"{file}: " in reader.succeed("page", "runs/NAME", "--out", file)
        case ["offbeat", "show", "runs/NAME", *words]:
            assert reader.run.is_dir()
            if "--parquet" in words:
                pytest.importorskip("pyarrow")
            assert reader.succeed("show", "runs/NAME", *words)
        case [token, "worker", "token", "runs/NAME", "--role", "reward)", "offbeat", "worker", *words]:
            assert reader.run.is_dir()
            assert token == "OFFBEAT_TOKEN=$(offbeat"
            (reader.folder / "token").write_text(new_token(reader.run, "reward"))  # the run here is one process
            nowhere = [word.replace(":8700", ":9") for word in words]  # tests/faults has judges that find somebody
            said = reader.offbeat("worker", *nowhere, "--token-file=token", "--dir=judge", "--patience=0.1")
            assert (said.status, "POST /v1/join: not answered" in said.err) == (1, True), said
        case ["offbeat", "replay", "runs/NAME/broken/step-00000013.batch"]:
            said = reader.offbeat("replay", reader.broken)
            assert (said.status, "now       the loss is not finite" in said.out) == (1, True), said
        case ["offbeat", "check-loss", function]:
            assert reader.succeed("check-loss", function).endswith("everything holds\n")
        case ["offbeat", "calibrate" | "plan", *words] if {"constants.json", "--measure", "--engine"} & set(words):
            pass  # test_planning_page runs them one after the other
        case ["offbeat", "simulate", "--replay", "runs/NAME", *words]:
            assert reader.run.is_dir()
            assert "samples trained" in reader.succeed("simulate", "--replay", "runs/NAME", *words)
        case ["offbeat", "simulate", file, "--plan", "plan.json"]:
            files = [
                f"examples/planning/{name}_hex_{size}.toml" for name, size in (("cluster", 56), ("workload", "7b"))
            ]
            (reader.folder / "plan.json").write_text(reader.succeed("plan", *files, "--json"))
            assert "samples trained" in reader.succeed("simulate", file, "--plan", "plan.json")
        case ["offbeat", "simulate", "examples/planning/simulate.toml"]:
            assert reader.succeed("simulate", "examples/planning/simulate.toml") == blocks(page, "")[0]
        case ["offbeat", "plan", *words, ">", "plan.json"]:
            assert reader.succeed("plan", *words).startswith("{")
        case ["offbeat", "plan", *files, "--verify", "plan.json"]:
            (reader.folder / "plan.json").write_text(reader.succeed("plan", *files, "--json"))
            assert reader.succeed("plan", *files, "--verify", "plan.json").startswith("everything holds")
        case ["offbeat", "plan", *words]:
            assert reader.succeed("plan", *words).startswith("Rent ")
        case ["offbeat", "export", "runs/NAME", "my-model"]:
            assert (reader.model / "model.safetensors").is_file()
        case _:
            pytest.fail(f"no test runs {command!r} of {page.name}")


@pytest.mark.parametrize("page, text", on_pages(lambda page: blocks(page, "toml")))
def test_toml_on_a_page_loads_and_its_tasks_open(page: Path, text: str, reader: Reader, tmp_path: Path):
    (tmp_path / "run.toml").write_text(text)
    config = load(tmp_path / "run.toml")
    if any(task.source == "reasoning-gym" for task in config.task):
        pytest.importorskip("reasoning_gym")
    with contextlib.chdir(reader.folder):
        mixture = build_mixture(config.task, seed=0)
        assert all(member.problem(0).prompt for member in mixture.members.values())
        assert len(mixture.held_out(4)) == 4


@pytest.mark.parametrize("page, code", on_pages(lambda page: blocks(page, "python")))
def test_python_on_a_page_runs(page: Path, code: str, reader: Reader, monkeypatch: pytest.MonkeyPatch):
    assert reader.run.is_dir()
    monkeypatch.setattr(offbeat, "train", train_small)
    with contextlib.chdir(reader.folder), contextlib.redirect_stdout(io.StringIO()) as out:
        names = {"__name__": "__main__"}
        exec(compile(code, page.name, "exec"), names)
        assert "print(" not in code or out.getvalue()
    if "def problem(" in code:
        assert names["problem"](ordinal=0, seed=0, held_out=True)["prompt"]
    if "def reward(" in code:
        assert names["reward"](response="85 91", answer="91") == {"right": 1.0, "brief": 0.1}


def test_the_loop_on_the_page_of_partial_rollouts_is_the_example():
    (shown,) = blocks(ROOT / "docs" / "partial-rollouts.md", "py")
    example = (ROOT / "examples" / "partial_vllm.py").read_text()
    assert shown.strip() in example
    assert example.index(shown.strip()) + len(shown.strip()) > 0.95 * len(example), "it is shown to its end"


def test_a_reward_gets_what_the_page_says_in_evaluation_as_in_training(reader: Reader):
    page = (ROOT / "docs" / "tasks-and-rewards.md").read_text()
    arguments = re.findall(r"^\| `(\w+)` \| the (?:answer's|problem's|response's)", page, re.MULTILINE)
    assert tuple(arguments) == ARGUMENTS
    code = "def reward(**given):\n    return float(all(name in given for name in {0}) and len(given['tokens']) > 0)\n"
    (reader.folder / "all_arguments.py").write_text(code.format(arguments))
    told = reader.succeed("eval", "offbeat-tiny", "--prompts=4", "--task.reward=all_arguments.py:reward", "--json")
    assert json.loads(told)["eval_mean@1"] == 1.0
