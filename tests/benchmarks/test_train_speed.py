"""The benchmark of the trainer's speed: all sides compute the same gradient, and a quick run decides nothing."""

from __future__ import annotations

import pytest
import torch
from varlen_reference import attend_run_by_run

from benchmarks.common.shapes import SHAPES
from benchmarks.train_speed.__main__ import MEMORY_TARGET_GIB, Measured, Way, bars_of, seconds_of
from benchmarks.train_speed.plain import PlainTrainer, VarlenTrainer
from benchmarks.train_speed.workload import QUICK, batch, new_model, step_flops
from offbeat.trainer import attention
from offbeat.trainer.policy import AdamSettings, Policy
from offbeat.trainer.step import StepSettings, train_step

CPU = torch.device("cpu")
OURS, LARGE, VARLEN = Way("ours", "ours", 512), Way("ours, large", "ours", 1024), Way("varlen", "varlen")


def offbeats_norm() -> float:
    policy = Policy(new_model(SHAPES["tiny"], CPU, torch.float32), AdamSettings())
    settings = StepSettings(tokens_per_microbatch=512, aggregate="token_mean")
    return train_step(policy, batch(QUICK), settings, 1e-6).grad_norm


@pytest.mark.parametrize("by_length", [False, True])
def test_the_padded_step_has_the_gradient_of_offbeats(by_length):
    plain = PlainTrainer(new_model(SHAPES["tiny"], CPU, torch.float32), 4, 1e-6, by_length=by_length)
    assert plain.step(batch(QUICK)) == pytest.approx(offbeats_norm(), rel=1e-4)


def test_the_varlen_step_has_the_gradient_of_offbeats(monkeypatch):
    monkeypatch.setattr(attention, "varlen_kernel", lambda: attend_run_by_run)
    plain = VarlenTrainer(new_model(SHAPES["tiny"], CPU, torch.float32), 256, 1e-6, compiles=False)
    assert plain.step(batch(QUICK)) == pytest.approx(offbeats_norm(), rel=1e-4)


def test_flops_are_those_of_the_rows_and_of_causal_attention():
    samples, shape = batch(QUICK), SHAPES["tiny"]
    fewer, more = step_flops(shape, samples, 1000), step_flops(shape, samples, 2000)
    body = shape.num_parameters - shape.num_tokens * shape.hidden
    assert more - fewer == pytest.approx(6 * body * 1000)


def test_the_fastest_way_counts_and_one_without_memory_does_not():
    slow, fast = [Measured(4.0, 1.0)] * 2, [Measured(2.0, MEMORY_TARGET_GIB + 1)] * 2
    found = {OURS: slow, LARGE: fast, Way("ours too", "ours", 2048): [Measured(1.0, 1.0), None], VARLEN: fast}
    assert seconds_of(found, "ours") == [2.0, 2.0]
    assert seconds_of(found, "ours", MEMORY_TARGET_GIB) == [4.0, 4.0]
    bars = bars_of(found, {"TRL": Measured(8.0, 1.0), "TRL too": None}, num_tokens=400_000, flops=4.0, peak_flops=2.0)
    assert (bars["answer tokens/s within 60 GiB"].value, bars["answer tokens/s within 60 GiB"].holds) == (1e5, True)
    assert (bars["over the best varlen"].value, bars["over the best varlen"].holds) == (0.5, False)
    assert (bars["over TRL"].value, bars["over TRL"].holds) == (4.0, True)
    assert bars["share of peak"].value == 1.0
    assert bars["peak GiB of 32k with checkpointing"].value is None
