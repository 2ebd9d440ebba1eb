"""Closed-form values: two sequences of ratios r = [1, 1.5, 0.7] with A = +1 and [1.25, 0.6] with A = -1."""

import numpy as np
import pytest
import torch

from offbeat.learn.losses import clipped_policy_loss, k3, sequence_mean_weights

RATIOS = torch.tensor([1.0, 1.5, 0.7, 1.25, 0.6])
ADVANTAGES = torch.tensor([1.0, 1.0, 1.0, -1.0, -1.0])
WEIGHTS = torch.as_tensor(np.concatenate(sequence_mean_weights([np.ones(3, bool), np.ones(2, bool)])))


def test_grpo_gives_the_known_value_and_gradient():
    logprobs = RATIOS.log().requires_grad_()
    token = clipped_policy_loss(logprobs, torch.zeros(5), ADVANTAGES, 0.2, 0.2)
    loss = (token.loss * WEIGHTS).sum()
    loss.backward()
    assert loss.item() == pytest.approx(0.0291667, abs=1e-6)
    torch.testing.assert_close(logprobs.grad, torch.tensor([-1 / 6, 0, -0.1166667, 0.3125, 0]), rtol=1e-5, atol=1e-6)
    assert token.clipped.tolist() == [False, True, False, False, True]


def test_the_gradient_equals_finite_differences():
    torch.manual_seed(0)
    logprobs = (-torch.rand(6, dtype=torch.float64)).requires_grad_()
    proximal, reference = -torch.rand(6, dtype=torch.float64), -torch.rand(6, dtype=torch.float64)
    advantages = torch.randn(6, dtype=torch.float64)
    assert torch.autograd.gradcheck(
        lambda x: clipped_policy_loss(x, proximal, advantages, 0.2, 0.28, reference, 0.1).loss.sum(), (logprobs,)
    )


def test_k3_is_the_known_estimate_and_never_negative():
    policy, reference = torch.tensor([-1.0, -2.0, -0.5]), torch.tensor([-1.5, -1.0, -0.5])
    x = (reference - policy).tolist()
    assert k3(policy, reference).tolist() == pytest.approx([np.exp(v) - v - 1 for v in x])
    assert (k3(torch.randn(100), torch.randn(100)) >= 0).all()


def test_an_infinite_ratio_leaves_the_gradient_finite():
    logprobs = torch.tensor([-0.1, -0.2], requires_grad=True)
    clipped_policy_loss(logprobs, torch.tensor([-1e4, -0.2]), torch.tensor([-1.0, 1.0]), 0.2, 0.2).loss.sum().backward()
    assert torch.isfinite(logprobs.grad).all()


def test_sequence_mean_weights_count_a_fully_masked_sequence_and_give_it_nothing():
    weights = sequence_mean_weights([np.array([True, True]), np.array([False, False, False])])
    assert weights[0].tolist() == [0.25, 0.25]
    assert weights[1].tolist() == [0, 0, 0]
