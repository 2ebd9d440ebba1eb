"""The policy on a GPU: what is saved and loaded again trains on as if nothing had happened, to the bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from learning_models import tiny_model
from learning_samples import make_samples

from offbeat.model.devices import be_deterministic
from offbeat.trainer.checkpoint import Checkpoints
from offbeat.trainer.policy import AdamSettings, Policy
from offbeat.trainer.step import StepSettings, train_step

pytestmark = pytest.mark.gpu
SHAPE = [(5, [3, 9, 1, 4]), (2, [30, 4]), (7, [6, 2, 8]), (3, [5, 5])]


@pytest.fixture
def deterministic():
    be_deterministic(torch.device("cuda"))
    yield
    torch.use_deterministic_algorithms(False)


def policy_of(dtype: torch.dtype, **options) -> Policy:
    return Policy(tiny_model("llama").to("cuda", dtype), AdamSettings(), **options)


def train(policy: Policy, seed: int) -> None:
    train_step(policy, make_samples(np.random.default_rng(seed), SHAPE), StepSettings(), lr=1e-2)


def weights(policy: Policy) -> torch.Tensor:
    return torch.cat([master.detach().reshape(-1) for master in policy.masters])


@pytest.mark.parametrize("options", [{}, {"has_value_head": True}, {"gradient_checkpointing": True}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_policy_restored_from_a_checkpoint_takes_the_very_step_that_was_to_come(
    tmp_path, deterministic, dtype, options
):
    torch.manual_seed(0)
    policy = policy_of(dtype, **options)
    train(policy, seed=1)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, 1, policy.state())
    train(policy, seed=2)

    again = policy_of(dtype, **options)
    again.load_state(checkpoints.load(1)[1])
    train(again, seed=2)
    assert torch.equal(weights(again), weights(policy))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_same_step_twice_gives_the_same_bits(deterministic, dtype):
    first, second = policy_of(dtype), policy_of(dtype)
    for policy in (first, second):
        train(policy, seed=1)
    assert torch.equal(weights(first), weights(second))


def test_a_step_on_the_gpu_agrees_with_the_same_step_on_the_cpu():
    on_gpu, on_cpu = policy_of(torch.float32), Policy(tiny_model("llama"), AdamSettings())
    samples = make_samples(np.random.default_rng(1), SHAPE)
    there, here = (train_step(policy, samples, StepSettings(), lr=1e-4) for policy in (on_gpu, on_cpu))
    assert there.loss == pytest.approx(here.loss, abs=1e-4)
    assert there.grad_norm == pytest.approx(here.grad_norm, rel=1e-3)
