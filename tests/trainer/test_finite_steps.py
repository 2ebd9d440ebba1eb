"""A step that meets NaN or infinity says where, changes nothing of its update, and tells whether it is half made."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from learning_models import tiny_model
from learning_samples import make_samples

from offbeat.trainer.advantages import GaeSettings
from offbeat.trainer.losses import TokenLoss
from offbeat.trainer.not_finite import NotFinite
from offbeat.trainer.policy import AdamSettings, Policy
from offbeat.trainer.step import StepSettings, train_step

SAMPLES = make_samples(np.random.default_rng(0), [(5, [3, 9, 4]), (4, [6, 2, 8])])


def policy(**how) -> Policy:
    return Policy(tiny_model("qwen2"), AdamSettings(), **how)


def weights(policy):
    return torch.cat([p.detach().reshape(-1) for p in policy.parameters])


def sour(*, at, after_an_update=False):
    """A loss that is NaN at one of each micro-batch's tokens."""

    def loss(tokens, settings):
        values = -tokens.log_ratio.exp() * tokens.advantages
        if not after_an_update or float(tokens.log_ratio.detach().abs().max()) > 1e-4:
            values = torch.where(torch.arange(len(values)) == at, torch.nan, values)
        return TokenLoss(values, torch.zeros_like(tokens.mask))

    return loss


@pytest.mark.parametrize("at, place", [(0, (0, 0)), (2, (0, 2)), (3, (1, 0)), (15, (2, 3)), (16, (3, 0)), (31, (5, 7))])
def test_a_loss_that_is_not_finite_is_found_at_its_token(at, place):
    learner = policy()
    before = weights(learner)
    with pytest.raises(NotFinite, match="the loss is not finite") as told:
        train_step(learner, SAMPLES, StepSettings(policy_loss=sour(at=at), is_own=True), lr=1e-2)
    assert (told.value.sample, told.value.token, told.value.num_updates) == (*place, 0)
    assert torch.equal(weights(learner), before)


def test_gradients_gathered_before_it_do_not_reach_a_later_update():
    learner, gathered = policy(), []

    def loss(tokens, settings):
        gathered.append(sum(master.grad is not None for master in learner.masters))
        return sour(at=0 if len(gathered) == 2 else -1)(tokens, settings)

    with pytest.raises(NotFinite):
        train_step(learner, SAMPLES, StepSettings(tokens_per_microbatch=20, policy_loss=loss, is_own=True), lr=1e-2)
    assert gathered == [0, len(learner.masters)]
    assert all(master.grad is None for master in learner.masters)


def test_updates_of_the_same_step_are_counted():
    settings = StepSettings(policy_loss=sour(at=1, after_an_update=True), is_own=True, updates_per_step=2)
    with pytest.raises(NotFinite) as told:
        train_step(policy(), SAMPLES, settings, lr=1e-2)
    assert told.value.num_updates == 1


def test_the_gradient_that_is_not_finite_is_named_and_no_other():
    learner = policy()
    before = weights(learner)
    spoilt = learner.names.index("model.layers.1.mlp.up_proj.weight")
    for i, master in enumerate(learner.masters):
        master.grad = torch.full_like(master, torch.nan if i == spoilt else 1.0)
    with pytest.raises(NotFinite, match=r"the gradient of model\.layers\.1\.mlp\.up_proj\.weight is not finite"):
        learner.update(1e-2)
    assert torch.equal(weights(learner), before)


def test_a_gradient_whose_norm_alone_overflows_is_told():
    learner = policy()
    for master in learner.masters:
        master.grad = torch.full_like(master, 3e38)
    with pytest.raises(NotFinite, match="the gradient of all weights together"):
        learner.update(1e-2)


def test_a_value_that_is_not_finite_is_not_blamed_on_other_samples_advantages():
    learner = policy(has_value_head=True)
    learner.head.values = lambda original=learner.head.values: _with_inf(original())
    with pytest.raises(NotFinite, match="the value head's estimate") as told:
        train_step(learner, SAMPLES, StepSettings(gae=GaeSettings()), lr=1e-2)
    assert (told.value.sample, told.value.token) == (1, 1)


def _with_inf(values):
    """The fourth position that predicts: after the prompt's last token and the first sample's two others."""
    return torch.where(torch.arange(values.shape[-1]) == 3, torch.inf, values)


def test_an_advantage_that_is_not_finite_is_found_at_its_sample():
    def advantage(rewards, groups):
        return np.where(np.arange(len(rewards)) == 4, np.inf, 1.0)

    with pytest.raises(NotFinite, match="the advantage is not finite") as told:
        train_step(policy(), SAMPLES, StepSettings(advantage=advantage), lr=1e-2)
    assert (told.value.sample, told.value.token) == (4, 0)


def test_a_number_that_is_not_trained_on_may_be_anything():
    masked = [replace(s, mask=np.arange(s.num_tokens) > 0, logprobs=s.logprobs.copy()) for s in SAMPLES]
    for sample in masked:
        sample.logprobs[0] = np.nan
    assert np.isfinite(train_step(policy(), masked, StepSettings(), lr=1e-2).loss)
