"""The benchmark of the trainer's speed: both sides compute the same gradient, and a quick run decides nothing."""

from __future__ import annotations

import pytest
import torch

from benchmarks.common.shapes import SHAPES
from benchmarks.train_speed.__main__ import PEAK_BAR, SPEED_BAR, Measured, Way, bars_of, seconds_of
from benchmarks.train_speed.plain import PlainTrainer
from benchmarks.train_speed.workload import QUICK, batch, new_model, step_flops
from offbeat.trainer.policy import AdamSettings, Policy
from offbeat.trainer.step import StepSettings, train_step

CPU = torch.device("cpu")
OURS, PLAIN = Way("ours", 512), Way("plain")


@pytest.mark.parametrize("by_length", [False, True])
def test_the_plain_step_has_the_gradient_of_offbeats(by_length):
    samples = batch(QUICK)
    policy = Policy(new_model(SHAPES["tiny"], CPU, torch.float32), AdamSettings())
    figures = train_step(policy, samples, StepSettings(tokens_per_microbatch=512, aggregate="token_mean"), 1e-6)
    plain = PlainTrainer(new_model(SHAPES["tiny"], CPU, torch.float32), 4, 1e-6, by_length=by_length)
    assert plain.step(samples) == pytest.approx(figures.grad_norm, rel=1e-4)
    assert figures.num_trained_tokens == sum(sample.num_tokens for sample in samples)


def test_flops_grow_with_the_answers_and_with_their_length():
    samples = batch(QUICK)
    once, twice = step_flops(SHAPES["tiny"], samples), step_flops(SHAPES["tiny"], [*samples, *samples])
    assert twice == pytest.approx(2 * once)
    num_tokens = sum(len(sample.prompt) + sample.num_tokens for sample in samples)
    assert once < 6 * SHAPES["tiny"].num_parameters * num_tokens * 1.5


def test_the_fastest_way_of_each_side_counts_and_one_without_memory_does_not():
    slow, fast = [Measured(4.0, 1.0)] * 2, [Measured(2.0, 1.0)] * 2
    found = {OURS: slow, Way("ours too", 1024): [Measured(1.0, 1.0), None], PLAIN: fast, Way("plain too"): slow}
    assert (seconds_of(found, ours=True), seconds_of(found, ours=False)) == ([4.0, 4.0], [2.0, 2.0])
    bars = bars_of(found, flops=4.0, peak_flops=2.0, decides=True)
    assert (bars[SPEED_BAR].value, bars[SPEED_BAR].holds) == (0.5, False)
    assert (bars[PEAK_BAR].value, bars[PEAK_BAR].holds) == (0.5, True)


def test_a_quick_run_decides_nothing():
    found = {OURS: [Measured(1.0, None)], PLAIN: [Measured(9.0, None)]}
    bars = bars_of(found, flops=1.0, peak_flops=None, decides=False)
    assert [bar.holds for bar in bars.values()] == [None, None]
    assert bars[SPEED_BAR].value == 9.0
    assert bars_of({OURS: [None], PLAIN: [None]}, 1.0, 1.0, decides=True)[SPEED_BAR].value is None
