"""Audits and older tokens: what cannot be believed is not learnt from, and what is old weighs by its likelihood."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from models import tiny_model
from test_packing import make_samples
from test_step import SHAPE, weights

from offbeat.learn.corrections import CorrectionSettings
from offbeat.learn.packing import pack, plan
from offbeat.learn.policy import AdamSettings, Policy
from offbeat.learn.step import StepSettings, train_step

AUDIT = StepSettings(max_sample_gap=1.0)


def honest_samples(policy: Policy):
    """Samples whose log-probs are those of the policy itself."""
    samples = make_samples(np.random.default_rng(0), SHAPE)
    found = list(samples)
    for chosen in plan(samples, 10_000):
        batch = pack(samples, chosen, policy.device)
        ends = np.cumsum([samples[i].num_tokens for i in batch.samples])
        parts = np.split(policy.logprobs(batch).cpu().numpy(), ends[:-1])
        for i, logprobs in zip(batch.samples, parts, strict=True):
            found[i] = dataclasses.replace(samples[i], logprobs=logprobs.astype(np.float32))
    return found


def lying(sample, off_by: float = 3.0):
    return dataclasses.replace(sample, logprobs=sample.logprobs - np.float32(off_by))


def masked(sample):
    return dataclasses.replace(sample, mask=np.zeros_like(sample.mask))


def test_honest_samples_pass_the_audit_and_train_as_without_it():
    with_audit, without = (Policy(tiny_model("llama"), AdamSettings()) for _ in range(2))
    samples = honest_samples(with_audit)
    figures = train_step(with_audit, samples, AUDIT, lr=1e-2)
    train_step(without, samples, StepSettings(), lr=1e-2)
    assert figures.audited == ()
    assert figures.logprob_gap < 1e-5
    assert torch.equal(weights(with_audit), weights(without))


@pytest.mark.parametrize("updates", [1, 2])
def test_a_sample_with_log_probs_of_other_weights_is_left_out_and_named(updates):
    policy = Policy(tiny_model("llama"), AdamSettings())
    samples = honest_samples(policy)
    spoilt = [lying(s) if i in (1, 6) else s for i, s in enumerate(samples)]
    settings = dataclasses.replace(AUDIT, updates_per_step=updates)
    figures = train_step(policy, spoilt, settings, lr=1e-2)
    assert figures.audited == (1, 6)
    assert figures.num_trained_tokens == sum(s.num_tokens for i, s in enumerate(samples) if i not in (1, 6))
    assert figures.logprob_gap < 1e-5


def test_nothing_of_a_sample_that_was_left_out_reaches_the_weights():
    first, second = (Policy(tiny_model("llama"), AdamSettings()) for _ in range(2))
    samples = honest_samples(first)
    train_step(first, [lying(s) if i == 2 else s for i, s in enumerate(samples)], AUDIT, lr=1e-2)
    train_step(second, [masked(s) if i == 2 else s for i, s in enumerate(samples)], AUDIT, lr=1e-2)
    torch.testing.assert_close(weights(first), weights(second), rtol=1e-5, atol=1e-7)


def test_old_tokens_are_no_evidence_against_anyone():
    policy = Policy(tiny_model("llama"), AdamSettings())
    samples = [dataclasses.replace(lying(s), staleness=np.ones(s.num_tokens, np.int64)) for s in honest_samples(policy)]
    figures = train_step(policy, samples, AUDIT, lr=1e-2)
    assert figures.audited == ()
    assert math.isnan(figures.logprob_gap)
    assert figures.num_trained_tokens == sum(s.num_tokens for s in samples)


def gradient(samples, settings) -> torch.Tensor:
    """What a plain step of gradient descent would be: the update is the gradient times a constant."""
    policy = Policy(tiny_model("llama"), AdamSettings(beta1=0.0, beta2=0.0, eps=1e6, max_grad_norm=1e9))
    before = weights(policy)
    train_step(policy, samples, settings, lr=1e6)
    return weights(policy) - before


def test_a_token_weighs_as_much_more_as_it_became_likelier_up_to_the_limit():
    samples = honest_samples(Policy(tiny_model("llama"), AdamSettings()))
    plain = gradient(samples, StepSettings())
    likelier = [lying(s, math.log(1.5)) for s in samples]  # half as likely again as when they were drawn
    much_likelier = [lying(s, math.log(50)) for s in samples]
    correct = StepSettings(correction=CorrectionSettings("tis", high=2.0))
    torch.testing.assert_close(gradient(samples, correct), plain, rtol=1e-3, atol=1e-6)
    torch.testing.assert_close(gradient(likelier, correct), 1.5 * plain, rtol=1e-3, atol=1e-6)
    torch.testing.assert_close(gradient(much_likelier, correct), 2.0 * plain, rtol=1e-3, atol=1e-6)


def test_what_is_too_old_adds_nothing_and_makes_the_rest_weigh_no_more():
    samples = honest_samples(Policy(tiny_model("llama"), AdamSettings()))
    half = [dataclasses.replace(s, mask=np.arange(s.num_tokens) % 2 == 0, sampled=s.mask) for s in samples]
    other = [dataclasses.replace(s, mask=np.arange(s.num_tokens) % 2 == 1, sampled=s.mask) for s in samples]
    whole = gradient(samples, StepSettings())
    torch.testing.assert_close(
        gradient(half, StepSettings()) + gradient(other, StepSettings()), whole, rtol=1e-3, atol=1e-6
    )
