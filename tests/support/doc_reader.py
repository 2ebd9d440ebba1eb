"""Someone who follows the documentation: finds what its pages tell to run, and runs it for real, but small.

Commands run in this process, because that is quick. Small means fewer steps, groups and held-out prompts, which leaves
a command's meaning as it was.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import offbeat
from offbeat.cli.main import main

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
DOCS = sorted((ROOT / "docs").glob("*.md"))
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
SMALL: dict[str, Any] = {"run.steps": 2, "run.threads": 1, "batch.groups_per_step": 2, "eval.prompts": 4}
SMALL_WORDS = [f"--{key}={value}" for key, value in SMALL.items()]
TRAIN = offbeat.train
RUN_TOML = '[[task]]\nsource = "arithmetic"\nlevel = 1\n\n[optimizer]\nlr = 1e-4\n'
"""The configuration that the pages call run.toml."""


def blocks(page: Path, language: str) -> list[str]:
    """The texts of a page's blocks in a language; "" finds those that name none."""
    return [text for found, text in BLOCK.findall(page.read_text()) if found == language]


def commands(page: Path) -> list[str]:
    """Every line of every sh block, without its comment."""
    lines = [line for block in blocks(page, "sh") for line in block.splitlines()]
    return [shlex.join(words) for line in lines if (words := shlex.split(line, comments=True))]


SWARM = [
    command
    for page in ("swarm", "two-machines", "weights", "cluster")
    for command in commands(ROOT / "docs" / f"{page}.md")
]
"""What `test_swarm`, `test_two_machines`, `test_weights_page` and `test_cluster_page` type into several terminals."""
ATTACHING = [line for line in commands(ROOT / "docs" / "engines.md") if "127.0.0.1:8700" in line or "--host" in line]
"""What `test_engines_page` types, or compares with what a worker would start."""
RUN_BY_ENGINE_TESTS = (ROOT / "tests" / "contracts" / "test_vllm_runs.py").read_text()
"""Commands that need a vLLM are typed there, in `make test-engines`."""


def train_small(*arguments: Any, **overrides: Any) -> offbeat.Run:
    """Stands for `offbeat.train` in Python on the pages: few steps, no download, and one step more for a resume."""
    small = dict(SMALL)
    if "/" in overrides.get("model", ""):
        small["model"] = "offbeat-tiny"
    if run := overrides.get("resume"):
        small["run.steps"] = num_trained(Path(run)) + 1
    return TRAIN(*arguments, **{**overrides, **small})


def num_trained(run: Path) -> int:
    """Steps of a run, which an earlier page may have resumed."""
    return max(json.loads(row)["step"] for row in (run / "metrics.jsonl").read_text().splitlines())


def last_command_of_make(target: str) -> list[str]:
    """What a target of the Makefile would run once everything is set up."""
    command = ["make", "-n", "--no-print-directory", target]
    own = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS", "ARGS"))}
    done = subprocess.run(command, cwd=ROOT, env=own, capture_output=True, text=True, timeout=60, check=True)
    return done.stdout.strip().splitlines()[-1].split()


class Said(NamedTuple):
    status: int
    out: str
    err: str


class Reader:
    """Works in a folder of its own, from which the repository's examples can be reached."""

    def __init__(self, folder: Path):
        self.folder = folder
        (folder / "examples").symlink_to(ROOT / "examples")
        (folder / "run.toml").write_text(RUN_TOML)
        script = ROOT / "examples" / "word_problems.py"
        subprocess.run([sys.executable, str(script), str(folder / "problems.jsonl"), "--rows=40"], check=True)

    def offbeat(self, *words: str) -> Said:
        out, err = io.StringIO(), io.StringIO()
        with contextlib.chdir(self.folder), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            status = main(words)
        return Said(status, out.getvalue(), err.getvalue())

    def succeed(self, *words: str) -> str:
        """What a command prints; it must end well."""
        said = self.offbeat(*words)
        assert said.status == 0, f"offbeat {shlex.join(words)}: {said.err}"
        return said.out

    @cached_property
    def run(self) -> Path:
        """What the pages call runs/NAME: a run that `make demo` has started."""
        _, *words = last_command_of_make("demo")
        self.succeed(*words, *SMALL_WORDS, "--name=NAME", "--checkpoint.every=1")
        return self.folder / "runs" / "NAME"

    @cached_property
    def model(self) -> Path:
        """What the pages call my-model."""
        assert self.run.is_dir()
        self.succeed("export", "runs/NAME", "my-model")
        return self.folder / "my-model"

    @cached_property
    def broken(self) -> str:
        """A batch that a step broke on."""
        code = "import torch\n\ndef loss(tokens, settings):\n    return tokens.logprobs * torch.nan\n"
        (self.folder / "sour.py").write_text(code)
        said = self.offbeat("train", *SMALL_WORDS, "--name=sour", "--loss.name=sour.py:loss", "--eval.every=0")
        file = "runs/sour/broken/step-00000001.batch"
        assert (said.status, f"kept as {file}" in said.err) == (1, True), said
        return file

    def without(self, name: str) -> None:
        """Makes room for a command that wants a new folder."""
        shutil.rmtree(self.folder / name, ignore_errors=True)
