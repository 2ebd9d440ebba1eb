"""Training on a GPU: every pair of settings at least once, killed in the middle, resumed and exported."""

from __future__ import annotations

import itertools
import subprocess
import sys

import pytest
import torch
from gpu_runs import CHOICES, HAS_VLLM, SETTINGS, GpuRun, Setting, check_finished, is_possible, pairs_of, words_of
from transformers import AutoModelForCausalLM

NUM_STEPS = 7
KILLED_AFTER_STEP = 3
EXPORTED = (0, 1, 8, 9)
"""Settings whose model is exported as well: all weights and adapters, from both engines."""


def test_the_settings_hold_every_pair_that_can_be_chosen_together():
    possible = filter(is_possible, itertools.starmap(Setting, itertools.product(*CHOICES.values())))
    wanted = set().union(*map(pairs_of, possible))
    assert all(map(is_possible, SETTINGS))
    assert wanted - set().union(*map(pairs_of, SETTINGS)) == set()


@pytest.mark.gpu
@pytest.mark.timeout(600)
@pytest.mark.parametrize("setting", SETTINGS, ids="-".join)
def test_a_run_that_loses_a_part_of_itself_goes_on_and_finishes(tmp_path, setting):
    if setting.engine == "vllm" and not HAS_VLLM:
        pytest.skip("no vLLM here; OFFBEAT_VLLM_PYTHON names an interpreter that has it")
    run = GpuRun(tmp_path, *words_of(setting), f"--run.steps={NUM_STEPS}")
    try:
        run.until_step(KILLED_AFTER_STEP)
        run = run.kill_part(setting.killed)
        run.finish()
    finally:
        run.end()
    check_finished(run.run, NUM_STEPS)
    if SETTINGS.index(setting) in EXPORTED:
        exported = tmp_path / "exported"
        command = [sys.executable, "-m", "offbeat", "export", "runs/a", str(exported)]
        subprocess.run(command, cwd=tmp_path, check=True, timeout=300)
        model = AutoModelForCausalLM.from_pretrained(exported, device_map="cuda")
        logits = model(torch.arange(12, device="cuda")[None]).logits
        assert torch.isfinite(logits).all()
