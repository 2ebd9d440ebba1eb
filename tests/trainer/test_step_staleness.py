"""Audits and older tokens: what cannot be believed is not learnt from, and what is old weighs by its likelihood."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from learning_models import tiny_model
from learning_samples import make_samples
from safetensors.torch import save_file
from test_step import SHAPE, weights

from offbeat.model.lora import Lora, attach, published_tensors
from offbeat.trainer.losses import CorrectionSettings
from offbeat.trainer.packing import pack, plan
from offbeat.trainer.policy import AdamSettings, Policy
from offbeat.trainer.step import StepSettings, train_step

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
    metrics = train_step(with_audit, samples, AUDIT, lr=1e-2)
    train_step(without, samples, StepSettings(), lr=1e-2)
    assert metrics.left_out == ()
    assert metrics.logprob_gap < 1e-5
    assert torch.equal(weights(with_audit), weights(without))


@pytest.mark.parametrize("updates", [1, 2])
def test_a_sample_with_log_probs_of_other_weights_is_left_out_and_named(updates):
    policy = Policy(tiny_model("llama"), AdamSettings())
    samples = honest_samples(policy)
    spoilt = [lying(s) if i in (1, 6) else s for i, s in enumerate(samples)]
    settings = dataclasses.replace(AUDIT, updates_per_step=updates)
    metrics = train_step(policy, spoilt, settings, lr=1e-2)
    assert metrics.left_out == (1, 6)
    assert metrics.num_trained_tokens == sum(s.num_tokens for i, s in enumerate(samples) if i not in (1, 6))
    assert metrics.logprob_gap < 1e-5


def test_nothing_of_a_sample_that_was_left_out_reaches_the_weights():
    first, second = (Policy(tiny_model("llama"), AdamSettings()) for _ in range(2))
    samples = honest_samples(first)
    train_step(first, [lying(s) if i == 2 else s for i, s in enumerate(samples)], AUDIT, lr=1e-2)
    train_step(second, [masked(s) if i == 2 else s for i, s in enumerate(samples)], AUDIT, lr=1e-2)
    torch.testing.assert_close(weights(first), weights(second), rtol=1e-5, atol=1e-7)


def test_old_tokens_are_no_evidence_against_anyone():
    policy = Policy(tiny_model("llama"), AdamSettings())
    samples = [dataclasses.replace(lying(s), staleness=np.ones(s.num_tokens, np.int64)) for s in honest_samples(policy)]
    metrics = train_step(policy, samples, AUDIT, lr=1e-2)
    assert metrics.left_out == ()
    assert math.isnan(metrics.logprob_gap)
    assert metrics.num_trained_tokens == sum(s.num_tokens for s in samples)


def test_keys_and_values_of_older_weights_are_no_evidence_and_no_gap():
    policy = Policy(tiny_model("llama"), AdamSettings())
    samples = [dataclasses.replace(lying(s), old_kv=np.ones(s.num_tokens, bool)) for s in honest_samples(policy)]
    metrics = train_step(policy, samples, AUDIT, lr=1e-2)
    assert (metrics.left_out, metrics.compared) == ((), ())
    assert math.isnan(metrics.logprob_gap)


def test_log_ratios_beyond_the_clamp_are_told():
    policy = Policy(tiny_model("llama"), AdamSettings())
    samples = honest_samples(policy)
    far = [lying(s, 25.0) if i == 0 else s for i, s in enumerate(samples)]
    share = samples[0].num_tokens / sum(s.num_tokens for s in samples)
    assert train_step(policy, far, StepSettings(), lr=0.0).clamped_share == pytest.approx(share)
    assert train_step(policy, samples, StepSettings(), lr=0.0).clamped_share == 0


def adapted(seed: int, dtype: torch.dtype):
    model = tiny_model("llama", seed).to(dtype)
    attach(model, Lora(4, 8.0))
    return model


KINDS = {
    "float32": lambda: tiny_model("llama"),
    "bfloat16": lambda: tiny_model("llama").to(torch.bfloat16),
    "an untied model": lambda: tiny_model("qwen2"),
    "adapters": lambda: adapted(0, torch.float32),
    "adapters in bfloat16": lambda: adapted(0, torch.bfloat16),
}


@pytest.mark.parametrize("kind", KINDS)
def test_older_tokens_are_compared_with_the_weights_of_their_own_version(kind, tmp_path):
    """An honest worker's are right, a forger's are not, and the step's own weights are as they were, to the bit."""
    policy, alone = (Policy(KINDS[kind](), AdamSettings()) for _ in range(2))
    save_file(published_tensors(policy.model), tmp_path / "7.safetensors")
    samples = honest_samples(policy)
    for trained in (policy, alone):
        train_step(trained, samples, StepSettings(), lr=0.3)  # far enough to tell the versions apart
    count = [s.num_tokens for s in samples]
    stale = [
        dataclasses.replace(s, staleness=np.ones(n, int), version=np.full(n, 7))
        for s, n in zip(samples, count, strict=True)
    ]
    stale[3] = lying(stale[3])
    settings = dataclasses.replace(AUDIT, audit_share=1.0)
    metrics = train_step(policy, stale, settings, 1e-2, weights_of=lambda number: tmp_path / f"{number}.safetensors")
    assert metrics.left_out == (3,)
    assert metrics.compared == tuple((i, 0, n, n if i == 3 else 0) for i, n in enumerate(count))
    assert math.isnan(metrics.logprob_gap)
    train_step(alone, [masked(s) if i == 3 else s for i, s in enumerate(stale)], AUDIT, lr=1e-2)
    torch.testing.assert_close(weights(policy), weights(alone), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("kind", KINDS)
def test_a_policy_has_its_own_weights_again_whatever_happens_meanwhile(kind, tmp_path):
    policy = Policy(KINDS[kind](), AdamSettings())
    file = tmp_path / "7.safetensors"
    save_file(published_tensors(policy.model), file)
    train_step(policy, honest_samples(policy), StepSettings(), lr=0.3)
    own = {name: tensor.clone() for name, tensor in published_tensors(policy.model).items()}

    def is_own() -> bool:
        return all(torch.equal(tensor, own[name]) for name, tensor in published_tensors(policy.model).items())

    def fail_inside() -> None:
        with policy.weights_of(file):
            assert not is_own()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_inside()
    assert is_own()


def test_weights_that_cannot_be_read_cost_an_audit_and_no_step(tmp_path):
    policy = Policy(tiny_model("llama"), AdamSettings())
    count = {i: s.num_tokens for i, s in enumerate(honest_samples(policy))}
    stale = [
        dataclasses.replace(s, staleness=np.ones(count[i], int), version=np.full(count[i], 7))
        for i, s in enumerate(honest_samples(policy))
    ]
    (tmp_path / "7.safetensors").write_bytes(b"half")
    settings = dataclasses.replace(AUDIT, audit_share=1.0)
    metrics = train_step(policy, stale, settings, 0.0, weights_of=lambda number: tmp_path / "7.safetensors")
    assert (metrics.compared, metrics.num_trained_tokens) == ((), sum(count.values()))


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
