"""On a GPU with vLLM, `offbeat train` without a single key of the engine generates with vLLM, and goes on with it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from engine_servers import ENGINE_ARGUMENTS
from gpu_runs import ENGINE_PYTHON, HAS_VLLM

pytestmark = [pytest.mark.gpu, pytest.mark.full]
BESIDE_OTHERS = (
    "--engine.memory-share=0.08",
    f"--engine.arguments={','.join(ENGINE_ARGUMENTS)}",
    *((f"--engine.python={ENGINE_PYTHON}",) if ENGINE_PYTHON else ()),
)
"""Several runs share the GPU here, and one of them alone would take most of it."""


@pytest.mark.timeout(600)
@pytest.mark.skipif(not HAS_VLLM, reason="vLLM is not installed here")
def test_the_demo_trains_with_vllm_and_is_resumed_with_it(tmp_path):
    def train(*words: str) -> str:
        command = [sys.executable, "-m", "offbeat", "train", *words, *BESIDE_OTHERS, "--eval.every=0"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    told = train("--run.name=a", "--run.steps=2")
    assert told.startswith("engine vllm: there is a GPU here, and vLLM is installed\n")
    stored = json.loads((tmp_path / "runs" / "a" / "config.json").read_text())
    assert (stored["rollout"]["engine"], stored["rollout"]["workers"]) == ("vllm", 1)
    assert "3/3" in train("--resume", "runs/a", "--run.steps=3")
