import copy
import dataclasses

import numpy as np
import pytest
import torch
from learning_models import KINDS, tiny_model
from learning_samples import make_samples

from offbeat.trainer import attention
from offbeat.trainer.losses import LossSettings
from offbeat.trainer.policy import AdamSettings, Policy, learning_rate
from offbeat.trainer.step import StepSettings, train_step

SHAPE = [(5, [3, 9, 1, 4]), (2, [30, 4]), (7, [6, 2, 8]), (3, [5, 5])]


def weights(policy):
    return torch.cat([p.detach().reshape(-1).float() for p in policy.parameters])


@pytest.mark.parametrize("kind", KINDS)
def test_any_split_into_microbatches_gives_the_same_update(kind):
    samples = make_samples(np.random.default_rng(0), SHAPE)
    results, losses = [], []
    for budget in (40, 64, 10_000):
        policy = Policy(tiny_model(kind), AdamSettings(max_grad_norm=1e9, eps=1e-2))
        metrics = train_step(policy, samples, StepSettings(tokens_per_microbatch=budget), lr=1e-2)
        results.append(weights(policy))
        losses.append(metrics.loss)
    assert metrics.num_microbatches == 1
    for other in results[:2]:
        torch.testing.assert_close(other, results[2], rtol=1e-3, atol=1e-5)
    assert losses[0] == pytest.approx(losses[2], abs=1e-5)


def test_a_masked_token_has_no_influence():
    samples = make_samples(np.random.default_rng(0), SHAPE)
    masked = copy.deepcopy(samples)
    for sample in masked:
        sample.mask[-1] = False
        if len(sample.logprobs) > 1:
            sample.logprobs[-1] = -100.0
    spoilt = copy.deepcopy(masked)
    for sample in spoilt:
        sample.response[-1] = (sample.response[-1] + 1) % 40
    first, second = (Policy(tiny_model("llama"), AdamSettings()) for _ in range(2))
    metrics = train_step(first, masked, StepSettings(), lr=1e-2)
    train_step(second, spoilt, StepSettings(), lr=1e-2)
    assert torch.equal(weights(first), weights(second))
    assert metrics.num_trained_tokens == sum(s.num_tokens - 1 for s in samples)
    assert metrics.logprob_gap < 10


def test_a_batch_without_a_trainable_token_changes_nothing():
    samples = make_samples(np.random.default_rng(0), SHAPE)
    for sample in samples:
        sample.mask[:] = False
    policy = Policy(tiny_model("llama"), AdamSettings())
    before = weights(policy)
    metrics = train_step(policy, samples, StepSettings(), lr=1e-2)
    assert metrics.loss == 0
    assert metrics.grad_norm == 0
    assert torch.equal(weights(policy), before)


def with_equal_rewards(samples, group):
    """The same samples, where those of one group have nothing to tell apart."""
    return [dataclasses.replace(s, reward=0.5) if s.group == group else s for s in samples]


def test_a_group_of_equal_rewards_is_measured_and_counted_but_sends_no_gradient(monkeypatch):
    samples = with_equal_rewards(make_samples(np.random.default_rng(0), [(5, [3, 9, 4]), (4, [6, 2, 8])]), group=1)
    told = [s for s in samples if s.group == 0]
    backward = []
    original = Policy.forward_backward
    monkeypatch.setattr(Policy, "forward_backward", lambda p, b, *rest: backward.append(b) or original(p, b, *rest))
    policy, alone = (Policy(tiny_model("llama"), AdamSettings()) for _ in range(2))
    metrics = train_step(policy, samples, StepSettings(), lr=1e-2)
    assert [batch.samples for batch in backward] == [(0, 1, 2)]
    assert metrics.num_trained_tokens == sum(s.num_tokens for s in samples)
    assert metrics.grad_norm == pytest.approx(train_step(alone, told, StepSettings(), lr=1e-2).grad_norm / 2, rel=1e-4)


@pytest.mark.parametrize("updates", [1, 2])
def test_what_is_measured_does_not_depend_on_who_has_an_advantage(updates):
    samples = make_samples(np.random.default_rng(0), SHAPE)
    settings = StepSettings(updates_per_step=updates)
    gaps = []
    for some in (samples, with_equal_rewards(samples, group=samples[0].group)):
        gaps.append(train_step(Policy(tiny_model("llama"), AdamSettings()), some, settings, lr=1e-2).logprob_gap)
    assert gaps[0] == pytest.approx(gaps[1], rel=1e-5)


def test_a_step_without_any_advantage_goes_on_with_its_momentum():
    samples = make_samples(np.random.default_rng(0), SHAPE)
    silent = [dataclasses.replace(s, reward=0.5) for s in samples]
    policy, by_hand = (Policy(tiny_model("llama"), AdamSettings()) for _ in range(2))
    for made in (policy, by_hand):
        train_step(made, samples, StepSettings(), lr=1e-2)
    metrics = train_step(policy, silent, StepSettings(), lr=1e-2)
    for master in by_hand.masters:
        master.grad = torch.zeros_like(master)
    by_hand.update(1e-2)
    assert (metrics.loss, metrics.grad_norm, metrics.signal_share) == (0, 0, 0)
    assert torch.equal(weights(policy), weights(by_hand))


def test_a_right_answer_becomes_more_likely_and_a_wrong_one_less():
    samples = make_samples(np.random.default_rng(0), [(4, [5, 5])])
    samples = [copy.copy(s) for s in samples]
    object.__setattr__(samples[0], "reward", 1.0)
    object.__setattr__(samples[1], "reward", 0.0)
    policy = Policy(tiny_model("llama"), AdamSettings())
    from offbeat.trainer.packing import pack

    batch = pack(samples, [0, 1], policy.device)
    before = policy.logprobs(batch)
    train_step(policy, samples, StepSettings(), lr=1e-2)
    change = policy.logprobs(batch) - before
    assert change[:5].sum() > 0 > change[5:].sum()


def test_several_updates_per_step_split_by_whole_groups_and_clip_against_the_start():
    samples = make_samples(np.random.default_rng(0), SHAPE)
    policy = Policy(tiny_model("llama"), AdamSettings())
    metrics = train_step(policy, samples, StepSettings(updates_per_step=2, loss=LossSettings(1e-6, 1e-6)), lr=1e-2)
    assert metrics.clip_share > 0  # only the second update can be clipped
    policy = Policy(tiny_model("llama"), AdamSettings())
    metrics = train_step(policy, samples, StepSettings(loss=LossSettings(1e-6, 1e-6)), lr=1e-2)
    assert metrics.clip_share == 0


def test_a_reference_holds_the_policy_back():
    samples = make_samples(np.random.default_rng(0), SHAPE)
    reference = tiny_model("llama", seed=1)
    attention.use_packed_attention(reference)
    moved = []
    for kl_coef in (0.0, 10.0):
        policy = Policy(tiny_model("llama"), AdamSettings())
        for _ in range(5):
            metrics = train_step(policy, samples, StepSettings(kl_coef=kl_coef), lr=1e-2, reference=reference)
        moved.append(metrics.kl)
    assert moved[1] < moved[0]


def test_bfloat16_weights_keep_float32_masters_and_small_updates_add_up():
    model = tiny_model("llama").to(torch.bfloat16)
    policy = Policy(model, AdamSettings())
    before = weights(policy)
    samples = make_samples(np.random.default_rng(0), SHAPE)
    masters = [m.clone() for m in policy.masters]
    train_step(policy, samples, StepSettings(), lr=1e-6)
    assert any(not torch.equal(a, b) for a, b in zip(masters, policy.masters, strict=True))
    for _ in range(30):
        train_step(policy, samples, StepSettings(), lr=1e-5)
    assert all(p.dtype == torch.bfloat16 for p in policy.parameters)
    assert not torch.equal(weights(policy), before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_restored_state_goes_on_to_the_bit(dtype):
    samples = make_samples(np.random.default_rng(0), SHAPE)
    first = Policy(tiny_model("llama").to(dtype), AdamSettings())
    for _ in range(2):
        train_step(first, samples, StepSettings(), lr=1e-2)
    saved = {name: tensor.clone() for name, tensor in first.state().items()}
    train_step(first, samples, StepSettings(), lr=1e-2)

    second = Policy(tiny_model("llama", seed=5).to(dtype), AdamSettings())
    second.load_state(saved)
    train_step(second, samples, StepSettings(), lr=1e-2)
    assert torch.equal(weights(first), weights(second))


def test_gradient_checkpointing_changes_no_result():
    samples = make_samples(np.random.default_rng(0), SHAPE)
    results = []
    for checkpointing in (False, True):
        policy = Policy(tiny_model("llama"), AdamSettings(), gradient_checkpointing=checkpointing)
        train_step(policy, samples, StepSettings(), lr=1e-2)
        results.append(weights(policy))
    torch.testing.assert_close(results[0], results[1])


def test_the_learning_rate_warms_up_and_decays():
    rates = [learning_rate(s, 1.0, "linear", 3, 11) for s in range(11)]
    assert rates[:3] == [0.25, 0.5, 0.75]
    assert rates[3] == 1.0
    assert rates[10] == pytest.approx(1 / 8)
    assert learning_rate(500, 0.1, "constant", 0, 10) == 0.1
    assert learning_rate(5, 1.0, "cosine", 0, 10) == pytest.approx(0.5)
