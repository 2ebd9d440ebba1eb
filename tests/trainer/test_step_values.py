"""The step as losses see it: what reaches them, what is refused, and what is fixed at its start."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from learning_samples import make_samples
from learning_steps import (
    RecordingPolicy,
    honest,
    own_logprobs,
    preset_settings,
    reference_model,
    uneven_samples,
    weights,
)

from offbeat.config.schema import IMPORTANCE, PRESETS
from offbeat.trainer.losses import CorrectionSettings, LossSettings, TokenLoss, clip, reinforce
from offbeat.trainer.not_finite import NotFinite
from offbeat.trainer.step import StepSettings, Totals, token_weights, train_step

SHAPE = [(5, [3, 4]), (2, [6, 2, 5])]


def plain_samples():
    return make_samples(np.random.default_rng(0), SHAPE)


def seen_by(found: list, loss=clip):
    """A loss that takes down the tokens it is given."""

    def watching(tokens, settings):
        found.append(tokens)
        return loss(tokens, settings)

    return watching


@pytest.mark.parametrize("name", PRESETS)
def test_a_batch_without_a_trained_token_costs_nothing_and_moves_nothing(name):
    samples = [replace(s, mask=np.zeros(s.num_tokens, bool)) for s in uneven_samples()]
    for correction in IMPORTANCE:
        policy = RecordingPolicy(has_value_head=name == "ppo")
        before = weights(policy)
        metrics = train_step(policy, samples, preset_settings(name, correction), lr=1e-2)
        assert (metrics.loss, metrics.grad_norm, metrics.num_trained_tokens) == (0, 0, 0)
        assert torch.equal(weights(policy), before)


def test_groups_of_one_and_of_equal_rewards_cost_nothing():
    samples = [replace(s, reward=0.3, group=s.group if s.group else 10 + i) for i, s in enumerate(plain_samples())]
    policy = RecordingPolicy()
    metrics = train_step(policy, samples, StepSettings(), lr=1e-2)
    assert (metrics.loss, metrics.grad_norm, metrics.signal_share) == (0, 0, 0)


@pytest.mark.parametrize("aggregate", ["token_mean", "sequence_mean", "constant"])
def test_what_has_nothing_to_learn_still_counts_in_every_denominator(aggregate):
    samples = [replace(s, reward=0.5) if s.group == 1 else s for s in plain_samples()]
    how = StepSettings(aggregate=aggregate, aggregate_tokens=9)
    mixed, alone = RecordingPolicy(), RecordingPolicy()
    train_step(mixed, samples, how, lr=1e-2)
    train_step(alone, samples[:2], how, lr=1e-2)
    share = 7 / 20 if aggregate == "token_mean" else 2 / 5
    torch.testing.assert_close(mixed.gradients[0], share * alone.gradients[0], rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["grpo", "gspo", "cispo", "ppo"])
def test_an_engines_log_prob_under_the_mask_has_no_effect(name, junk):
    samples = uneven_samples()
    assert any(not s.mask.all() for s in samples)
    spoilt = [replace(s, logprobs=np.where(s.mask, s.logprobs, junk).astype(np.float32)) for s in samples]
    results = []
    for some in (samples, spoilt):
        policy = RecordingPolicy(has_value_head=name == "ppo")
        train_step(policy, some, preset_settings(name, "sequence_mask", max_sample_gap=5.0), lr=1e-2)
        results.append(weights(policy))
    assert torch.equal(*results)


def refused(policy, samples, settings) -> NotFinite:
    """The refusal; nothing of the policy or its optimizer has changed, and nothing is left of the gradient."""
    before = {name: tensor.clone() for name, tensor in policy.state().items()}
    with pytest.raises(NotFinite) as caught:
        train_step(policy, samples, settings, lr=1e-2)
    for name, tensor in policy.state().items():
        assert torch.equal(tensor.view(torch.int32), before.pop(name).view(torch.int32)), name  # also where NaN is
    assert not before
    assert not policy.gathered().any()
    return caught.value


@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("budget", [5, 10_000])
def test_a_trained_log_prob_that_is_not_finite_stops_the_step_and_is_named(junk, budget):
    samples = plain_samples()
    spoilt = samples[3].logprobs.copy()
    spoilt[1] = junk
    samples[3] = replace(samples[3], logprobs=spoilt)
    error = refused(RecordingPolicy(), samples, StepSettings(tokens_per_microbatch=budget))
    assert (error.tensor, error.sample, error.token) == ("the engine's log-prob", 3, 1)


def test_it_does_so_in_a_sample_that_has_nothing_to_learn():
    samples = [replace(s, reward=0.5) if s.group == 1 else s for s in plain_samples()]
    spoilt = samples[2].logprobs.copy()
    spoilt[5] = math.nan
    samples[2] = replace(samples[2], logprobs=spoilt)
    error = refused(RecordingPolicy(), samples, StepSettings())
    assert (error.tensor, error.sample, error.token) == ("the engine's log-prob", 2, 5)


@pytest.mark.parametrize("reward", [math.nan, math.inf])
def test_a_reward_that_is_no_number_stops_the_step(reward):
    samples = plain_samples()
    samples[2] = replace(samples[2], reward=reward)
    with np.errstate(invalid="ignore"):
        error = refused(RecordingPolicy(), samples, StepSettings())
    assert (error.tensor, error.sample) == ("the advantage", 2)


def test_a_weight_that_is_no_number_is_the_trainers_own_log_prob():
    policy = RecordingPolicy()
    with torch.no_grad():
        policy.parameters[0][int(plain_samples()[0].prompt[0]), 0] = math.nan
    error = refused(policy, plain_samples(), StepSettings(max_sample_gap=1.0))
    assert (error.tensor, error.sample, error.token) == ("the trainer's log-prob", 0, 0)


class _Steep(torch.autograd.Function):
    """The identity, with a slope that is not finite."""

    @staticmethod
    def forward(ctx, values):
        return values.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * math.inf


def steep(tokens, settings) -> TokenLoss:
    return TokenLoss(_Steep.apply(tokens.logprobs) * 0.1, torch.zeros_like(tokens.mask))


def test_a_gradient_that_is_not_finite_stops_before_the_optimizer():
    error = refused(RecordingPolicy(), plain_samples(), StepSettings(policy_loss=steep, is_own=True))
    assert error.tensor.startswith("the gradient of ")


def test_a_loss_that_is_not_finite_stops_before_the_backward_pass():
    def infinite(tokens, settings):
        return TokenLoss(tokens.logprobs * math.inf, torch.zeros_like(tokens.mask))

    error = refused(RecordingPolicy(), plain_samples(), StepSettings(policy_loss=infinite, is_own=True))
    assert error.tensor == "the loss"


@pytest.mark.parametrize("loss", [steep, None])
def test_a_step_that_was_refused_leaves_nothing_behind(loss):
    """The next step is, to the bit, the one that would have been made without it."""
    samples = plain_samples()
    spoilt = [*samples[:-1], replace(samples[-1], logprobs=np.full(5, math.nan, np.float32))]
    tried, fresh = RecordingPolicy(), RecordingPolicy()
    wrong = StepSettings(tokens_per_microbatch=5)
    if loss is not None:
        wrong, spoilt = replace(wrong, policy_loss=loss, is_own=True), samples
    refused(tried, spoilt, wrong)
    for policy in (tried, fresh):
        train_step(policy, samples, StepSettings(), lr=1e-2)
    assert torch.equal(weights(tried), weights(fresh))


def test_fresh_tokens_have_importance_1_and_two_segments_are_one():
    found: list = []
    samples = honest(RecordingPolicy(), plain_samples())
    how = StepSettings(policy_loss=seen_by(found), correction=CorrectionSettings("tis", high=2.0))
    one, other = RecordingPolicy(), RecordingPolicy()
    metrics = train_step(one, samples, how, lr=1e-2)
    for tokens in found:
        assert tokens.log_importance.abs().max() < 1e-5
        assert tokens.log_ratio.abs().max() == 0
    stitched = [replace(s, staleness=np.arange(s.num_tokens)[::-1].copy()) for s in samples]
    train_step(other, stitched, how, lr=1e-2)
    assert torch.equal(weights(one), weights(other))
    assert metrics.ess == pytest.approx(1)


def test_each_token_is_given_its_own_numbers():
    found: list = []
    samples = uneven_samples()
    how = StepSettings(policy_loss=seen_by(found), is_own=True, tokens_per_microbatch=10_000)
    train_step(RecordingPolicy(), samples, how, lr=0.0)
    (tokens,) = found
    mask = np.concatenate([s.mask for s in samples])
    assert tokens.mask.tolist() == mask.tolist()
    engine = np.concatenate([s.logprobs for s in samples])
    own = np.concatenate(own_logprobs(RecordingPolicy(), samples))
    ages = np.concatenate([s.staleness for s in samples])
    assert tokens.behaviour[mask].tolist() == engine[mask].tolist()
    assert tokens.proximal[mask].tolist() == pytest.approx(own[mask].tolist(), abs=1e-5)
    assert tokens.staleness[mask].tolist() == ages[mask].tolist()
    owner = np.repeat(np.arange(len(samples)), [s.num_tokens for s in samples])
    assert tokens.sequence.tolist() == owner.tolist()


def test_the_start_of_a_step_stays_fixed_while_its_updates_go_on():
    found: list = []
    samples = plain_samples()
    how = StepSettings(updates_per_step=2, policy_loss=seen_by(found), tokens_per_microbatch=10_000)
    policy = RecordingPolicy()
    start = own_logprobs(policy, samples)
    train_step(policy, samples, how, lr=1e-2)
    first, second = found
    np.testing.assert_allclose(first.proximal, np.concatenate(start[:2]), atol=1e-5)
    np.testing.assert_allclose(second.proximal, np.concatenate(start[2:]), atol=1e-5)
    assert first.log_ratio.abs().max() < 1e-5
    assert second.log_ratio.abs().max() > 1e-3  # the first update moved it


def test_the_second_update_of_a_step_is_clipped_against_its_start():
    """With a clip as narrow as this, whatever moved its own way is held and what moved the wrong way is not."""
    found: list = []
    how = StepSettings(updates_per_step=2, policy_loss=seen_by(found), loss=LossSettings(1e-4, 1e-4))
    metrics = train_step(RecordingPolicy(), plain_samples(), how, lr=1e-2)
    second = found[1]
    held = (second.log_ratio * second.advantages.sign() > 1.1e-4).sum().item()
    assert metrics.clip_share == pytest.approx(held / metrics.num_trained_tokens)


def test_a_dual_clip_reaches_the_loss():
    """Against an answer that became much likelier since the step's start, only so much is done."""
    norms = []
    for limit in (None, 1.0001):
        policy = RecordingPolicy()
        how = StepSettings(updates_per_step=2, loss=LossSettings(dual_clip=limit))
        train_step(policy, plain_samples(), how, lr=3e-2)
        norms.append(policy.gradients[1].norm())
    assert norms[1] < norms[0]


@pytest.mark.parametrize("aggregate", ["token_mean", "sequence_mean", "constant"])
def test_a_kl_term_adds_up_as_the_loss_does_and_holds_what_has_no_advantage_too(aggregate):
    samples = [replace(s, reward=0.5, sampled=None) for s in uneven_samples()]
    how = StepSettings(kl_coef=0.3, aggregate=aggregate, aggregate_tokens=7, tokens_per_microbatch=40)
    policy, reference = RecordingPolicy(), RecordingPolicy(seed=1)
    x = np.concatenate(own_logprobs(reference, samples)) - np.concatenate(own_logprobs(policy, samples))
    masks = [s.mask for s in samples]
    weight = np.concatenate(token_weights(masks, Totals.of(masks), aggregate, 7))
    metrics = train_step(policy, samples, how, lr=1e-2, reference=reference_model(seed=1))
    k3 = np.exp(x) - x - 1
    assert metrics.loss == pytest.approx(0.3 * float((k3 * weight).sum()), rel=1e-3)
    assert metrics.kl == pytest.approx(float(k3[np.concatenate(masks)].mean()), rel=1e-3)
    assert metrics.grad_norm > 0


def test_what_was_earned_on_the_way_is_credited_from_there_on():
    """Without a value head's guesses, each choice is credited with what is still to be earned."""
    found: list = []
    samples = [replace(s, reward=1.0, rewards=((1, 1.0),)) for s in plain_samples()]
    how = preset_settings("ppo")
    how = replace(how, gae=replace(how.gae, lam=1.0), policy_loss=seen_by(found, reinforce))
    train_step(RecordingPolicy(has_value_head=True), samples, how, lr=0.0)
    (tokens,) = found
    places = np.concatenate([np.arange(s.num_tokens) for s in samples])
    early = tokens.advantages[torch.as_tensor(places < 2)]
    late = tokens.advantages[torch.as_tensor(places >= 2)]
    assert (early > 0).all()
    assert (late < 0).all()
    assert tokens.advantages.mean().item() == pytest.approx(0, abs=1e-5)
    assert tokens.advantages.std().item() == pytest.approx(1, abs=1e-3)
