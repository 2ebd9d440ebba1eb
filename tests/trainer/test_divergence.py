"""Values, signs and gradients of the KL estimates."""

import math

import pytest
import torch
from fixture_tokens import doubles
from hypothesis import given
from hypothesis import strategies as st

from offbeat.trainer.losses import DIVERGENCES, k1, k2, k3


def value_and_slope(divergence, logprob: float, reference: float) -> tuple[float, float]:
    leaf = doubles([logprob]).requires_grad_()
    value = divergence(leaf, doubles([reference]))
    (slope,) = torch.autograd.grad(value.sum(), leaf)
    return value.item(), slope.item()


@pytest.mark.parametrize("logprob, reference", [(-1.0, -1.5), (-2.0, -0.3), (-1.0, -1.0)])
def test_values_and_gradients_are_their_closed_forms(logprob, reference):
    x = reference - logprob
    assert value_and_slope(k1, logprob, reference) == pytest.approx((-x, -x))
    assert value_and_slope(k2, logprob, reference) == pytest.approx((x * x / 2, -x))
    assert value_and_slope(k3, logprob, reference) == pytest.approx((math.exp(x) - x - 1, 1 - math.exp(x)), abs=1e-12)


@given(st.floats(-50, 0), st.floats(-50, 0))
def test_k3_is_never_negative_and_every_estimate_pulls_towards_the_reference(logprob, reference):
    value, _ = value_and_slope(k3, logprob, reference)
    assert value >= -1e-12
    for name, divergence in DIVERGENCES.items():
        _, slope = value_and_slope(divergence, logprob, reference)
        assert slope * (logprob - reference) >= 0, name


@pytest.mark.parametrize("name", DIVERGENCES)
def test_what_the_reference_holds_impossible_is_pulled_back_however_far_it_went(name):
    """A policy runs away towards tokens that its start would never have said."""
    _, slope = value_and_slope(DIVERGENCES[name], -0.1, -60.0)
    assert slope > 0.99


@pytest.mark.parametrize("name", DIVERGENCES)
def test_what_the_policy_holds_impossible_costs_a_finite_number(name):
    value, slope = value_and_slope(DIVERGENCES[name], -2000.0, -0.1)
    assert math.isfinite(value)
    assert math.isfinite(slope)


def test_over_samples_the_values_and_gradients_are_those_of_the_true_divergence():
    logits = doubles([0.3, -0.2, 1.1, 0.0]).requires_grad_()
    reference = torch.log_softmax(doubles([0.1, 0.4, 0.2, -0.9]), 0)
    logprobs = torch.log_softmax(logits, 0)
    chances = logprobs.exp().detach()
    truth = (logprobs.exp() * (logprobs - reference)).sum()
    (wanted,) = torch.autograd.grad(truth, logits, retain_graph=True)
    for divergence in (k1, k3):  # exact expectations: every token by its chance
        assert (chances * divergence(logprobs, reference)).sum().item() == pytest.approx(truth.item())
    for divergence in (k1, k2):
        cost = (chances * divergence(logprobs, reference)).sum()
        (gradient,) = torch.autograd.grad(cost, logits, retain_graph=True)
        assert gradient.tolist() == pytest.approx(wanted.tolist())
