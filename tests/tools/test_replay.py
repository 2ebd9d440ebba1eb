"""Repeating a step finds the first module and the first gradient that is not finite, and the sample that brings it."""

import copy
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from learning_models import tiny_model
from learning_samples import make_samples

from offbeat.model.loading import state_tensors
from offbeat.tools.replay import load_published, repeat
from offbeat.trainer.advantages import GaeSettings
from offbeat.trainer.losses import TokenLoss
from offbeat.trainer.policy import AdamSettings, Policy
from offbeat.trainer.step import StepSettings, train_step

SAMPLES = make_samples(np.random.default_rng(0), [(5, [3, 9, 4]), (4, [6, 2, 8])])


def policy(**how) -> Policy:
    return Policy(tiny_model("qwen2"), AdamSettings(), **how)


def scaled(name, factor):
    """A policy one of whose layers is out of proportion."""
    made = policy()
    with torch.no_grad():
        made.model.get_submodule(name).weight.mul_(factor)
    return made


@pytest.mark.parametrize("updates", [1, 2])
def test_a_healthy_step_is_repeated_as_it_is_trained(updates):
    settings = StepSettings(updates_per_step=updates)
    done = repeat(policy(), SAMPLES, settings, lr=1e-2)
    assert done.problem is None
    assert (done.module, done.gradient) == (None, None)
    assert done.metrics == train_step(policy(), SAMPLES, settings, lr=1e-2)


def test_samples_add_up_to_their_step_and_the_one_with_the_longest_gradient_comes_first():
    settings = StepSettings(aggregate="token_mean")
    done = repeat(policy(), SAMPLES, settings, lr=1e-2)
    assert sum(sample.loss for sample in done.samples) == pytest.approx(done.metrics.loss, abs=1e-6)
    norms = [sample.grad_norm for sample in done.samples]
    assert norms == sorted(norms, reverse=True)
    assert norms[0] > 0
    assert sorted(sample.sample for sample in done.samples) == list(range(len(SAMPLES)))


def test_the_largest_log_ratio_is_that_of_a_trained_token():
    off = copy.deepcopy(SAMPLES)
    off[2].logprobs[1] -= 30
    off[4].logprobs[0] -= 50
    off[4] = replace(off[4], mask=np.array([False, True]))
    by_sample = {sample.sample: sample for sample in repeat(policy(), off, StepSettings(), lr=0.0).samples}
    assert by_sample[2].max_log_ratio > 25
    assert by_sample[4].max_log_ratio < 25


def test_the_first_module_is_named_whose_output_is_not_finite():
    done = repeat(scaled("model.layers.1.mlp.up_proj", torch.inf), SAMPLES, StepSettings(), lr=1e-2)
    assert (done.module, done.had_finite_input) == ("model.layers.1.mlp.up_proj", True)
    assert done.problem.tensor == "the trainer's log-prob"
    assert done.metrics is None
    assert all(math.isnan(sample.loss) for sample in done.samples)


def test_what_overflows_between_modules_shows_as_an_input_that_was_not_finite():
    broken = scaled("model.layers.0.mlp.up_proj", 1e25)
    with torch.no_grad():
        broken.model.get_submodule("model.layers.0.mlp.gate_proj").weight.mul_(1e25)
    done = repeat(broken, SAMPLES, StepSettings(), lr=1e-2)
    assert (done.module, done.had_finite_input) == ("model.layers.0.mlp.down_proj", False)


def rooted(tokens, settings):
    """0 in value, and infinite in slope, at the second sequence."""
    zero = (tokens.log_ratio * 0 * (tokens.sequence == 1)).abs()
    root = torch.where(tokens.sequence == 1, zero.sqrt(), torch.zeros_like(zero))
    return TokenLoss(-tokens.log_ratio.exp() * tokens.advantages + root, torch.zeros_like(tokens.mask))


def test_a_gradient_is_named_by_the_parameter_nearest_to_the_loss():
    done = repeat(policy(), SAMPLES, StepSettings(policy_loss=rooted, is_own=True), lr=1e-2)
    assert done.module is None
    assert done.gradient == "lm_head.weight"
    assert done.problem.tensor == "the gradient of model.embed_tokens.weight"


def test_an_update_that_makes_weights_infinite_is_a_problem_too():
    done = repeat(policy(), SAMPLES, StepSettings(), lr=float("inf"))
    assert done.problem.tensor.startswith("the updated ")


def test_a_value_head_that_breaks_every_advantage_shows_for_every_sample():
    broken = policy(has_value_head=True)
    with torch.no_grad():
        broken.head.linear.bias.fill_(torch.inf)
    done = repeat(broken, SAMPLES, StepSettings(gae=GaeSettings()), lr=1e-2)
    assert done.module == "value_head"
    assert done.problem.tensor == "the value head's estimate"
    assert len(done.samples) == len(SAMPLES)


def test_nothing_watches_a_model_afterwards():
    repeated = policy()
    repeat(repeated, SAMPLES, StepSettings(), lr=1e-2)
    assert not any(module._forward_hooks for module in repeated.model.modules())
    assert not any(parameter._backward_hooks for parameter in repeated.parameters)


def test_published_weights_reach_the_masters():
    learner = Policy(tiny_model("llama").to(torch.bfloat16), AdamSettings())
    other = state_tensors(tiny_model("llama", seed=1).to(torch.bfloat16))
    load_published(learner, other)
    for name, master in zip(learner.names, learner.masters, strict=True):
        assert torch.equal(master, other[name].float())
