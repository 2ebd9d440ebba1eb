"""The value head: it learns what to expect, survives a checkpoint, and is published to no one."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from learning_samples import make_samples
from learning_steps import RecordingPolicy, preset_settings, uneven_samples, weights

from offbeat.errors import UserError
from offbeat.model.loading import state_tensors
from offbeat.trainer.advantages import GaeSettings
from offbeat.trainer.packing import pack
from offbeat.trainer.policy import ValueHead
from offbeat.trainer.step import train_step

PPO = preset_settings("ppo")


def constant_rewards():
    made = make_samples(np.random.default_rng(0), [(5, [3, 4]), (2, [6, 2, 5])])
    return [replace(s, reward=0.7) for s in made]


@pytest.mark.full
def test_it_learns_a_constant_reward():
    policy, samples = RecordingPolicy(has_value_head=True), constant_rewards()
    batch = pack(samples, range(len(samples)), policy.device)
    assert policy.infer(batch).values.abs().max() == 0  # it starts with no opinion
    losses = [train_step(policy, samples, PPO, lr=1e-3).value_loss for _ in range(150)]
    assert losses[0] > 0.1
    assert np.mean(losses[-10:]) < losses[0] / 3  # the policy learns too, so that values are seldom quite still
    assert policy.infer(batch).values.mean().item() == pytest.approx(0.7, abs=0.35)


def test_the_loss_of_values_is_half_the_squared_error_over_trained_tokens():
    """The head says 0 of everything, so the error is the return: with lambda 1 all that is earned."""
    how = replace(PPO, gae=GaeSettings(lam=1.0, value_coef=0.3))
    samples = [replace(s, mask=np.arange(s.num_tokens) % 2 == 0) for s in constant_rewards()]
    metrics = train_step(RecordingPolicy(has_value_head=True), samples, how, lr=0.0)
    assert metrics.value_loss == pytest.approx(0.7**2 / 2)
    # All advantages are equal, so the values' share is all there is.
    assert metrics.loss == pytest.approx(0.3 * 0.7**2 / 2)


class LookingPolicy(RecordingPolicy):
    """Takes down its values of some samples after each update."""

    def __init__(self, samples):
        super().__init__(has_value_head=True)
        self.batch = pack(samples, range(len(samples)), self.device)
        self.guesses: list[torch.Tensor] = []

    def update(self, lr: float) -> float:
        norm = super().update(lr)
        self.guesses.append(self.infer(self.batch).values)
        return norm


@pytest.mark.parametrize("reach", [1e-6, 0.02, 10.0])
def test_a_value_that_went_further_than_the_clip_has_no_slope_unless_it_went_the_wrong_way(reach):
    samples = constant_rewards()
    policy = LookingPolicy(samples[2:])  # the second update's
    how = replace(PPO, updates_per_step=2, gae=GaeSettings(lam=1.0, value_coef=0.5, value_clip=reach))
    train_step(policy, samples, how, lr=1e-2)
    assert policy.names[-1] == "value_head.bias"
    errors = policy.guesses[0] - 0.7
    sloped = policy.guesses[0] < reach  # the step began at 0
    assert policy.gradients[1][-1].item() == pytest.approx(0.5 * errors[sloped].sum().item() / len(errors), rel=1e-4)
    assert sloped.sum() > 0
    assert (sloped.sum() < len(errors)) == (reach < 1)


def test_every_target_has_the_guess_that_was_made_before_it_was_chosen():
    """Members of a group share their prompt's last place, so they share the first guess and no other."""
    policy = RecordingPolicy(has_value_head=True)
    torch.nn.init.normal_(policy.head.linear.weight, generator=torch.Generator().manual_seed(0))
    samples = constant_rewards()
    together = policy.infer(pack(samples, range(len(samples)), policy.device)).values
    apart = torch.cat([policy.infer(pack([s], [0], policy.device)).values for s in samples])
    torch.testing.assert_close(together, apart, atol=1e-5, rtol=1e-4)
    assert together[0] == together[3]
    changed = [replace(samples[0], response=(samples[0].response + 1) % 40)]
    other = policy.infer(pack(changed, [0], policy.device)).values
    assert other[0].item() == pytest.approx(together[0].item(), abs=1e-5)
    assert abs(other[1].item() - together[1].item()) > 1e-4


def test_it_lives_in_the_checkpoint_and_goes_on_to_the_bit():
    samples = uneven_samples()
    first = RecordingPolicy(has_value_head=True)
    for _ in range(2):
        train_step(first, samples, PPO, lr=1e-2)
    saved = {name: tensor.clone() for name, tensor in first.state().items()}
    assert {"master.value_head.weight", "master.value_head.bias", "exp_avg.value_head.weight"} <= saved.keys()
    assert saved["master.value_head.weight"].any()
    second = RecordingPolicy(seed=5, has_value_head=True)
    second.load_state(saved)
    for policy in (first, second):
        train_step(policy, samples, PPO, lr=1e-2)
    assert torch.equal(weights(first), weights(second))


def test_it_is_no_part_of_what_is_published():
    with_head, without = RecordingPolicy(has_value_head=True), RecordingPolicy()
    assert state_tensors(with_head.model).keys() == state_tensors(without.model).keys()
    assert not any("value_head" in name for name in state_tensors(with_head.model))


def test_a_guess_where_nothing_is_trained_may_be_infinite(monkeypatch):
    sample = constant_rewards()[2]
    sample = replace(sample, mask=np.arange(sample.num_tokens) != 2)
    results = []
    for junk in (0.0, float("inf")):
        policy = RecordingPolicy(has_value_head=True)
        offsets, values = torch.zeros(sample.num_tokens), policy.head.values
        offsets[2] = junk
        monkeypatch.setattr(policy.head, "values", lambda v=values, o=offsets: v() + o)
        train_step(policy, [sample], PPO, lr=1e-2)
        results.append(weights(policy))
    assert torch.equal(*results)


def test_it_keeps_no_activations_and_wants_a_forward_pass():
    policy = RecordingPolicy(has_value_head=True)
    policy.infer(pack(constant_rewards(), [0], policy.device))
    with pytest.raises(AssertionError, match="no forward pass"):
        policy.head.values()


def test_a_model_without_an_output_layer_is_refused():
    class Bare(torch.nn.Module):
        def get_output_embeddings(self):
            return None

    with pytest.raises(
        UserError, match=r'^loss\.advantage = "gae" needs a model with an output layer, but Bare has none'
    ):
        ValueHead(Bare())
