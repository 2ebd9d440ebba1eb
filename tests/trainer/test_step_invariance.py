"""However a batch is split, into micro-batches or over ranks, its loss and its gradient are the same."""

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from learning_steps import RecordingPolicy, preset_settings, reference_model, uneven_samples

from offbeat.config.schema import IMPORTANCE, PRESETS
from offbeat.trainer.losses import DIVERGENCES
from offbeat.trainer.step import StepInProgress, StepSettings, parts_of, train_step

SAMPLES = uneven_samples()
REFERENCE = reference_model()
COMBINATIONS = list(itertools.product(PRESETS, IMPORTANCE))
NUM_SAMPLES = len(SAMPLES)


def policy_for(how: StepSettings) -> RecordingPolicy:
    policy = RecordingPolicy(has_value_head=how.gae is not None)
    if policy.head is not None:  # one that has learnt something
        torch.nn.init.normal_(policy.head.linear.weight, generator=torch.Generator().manual_seed(3))
    return policy


def whole(how: StepSettings, reference=None):
    policy = policy_for(how)
    return train_step(policy, SAMPLES, how, lr=1e-3, reference=reference), policy.gradients


def over_ranks(how: StepSettings, ranks, reference=None) -> tuple[float, torch.Tensor]:
    """Each rank has the same weights and some of the samples; their gradients are added."""
    losses, gradients = 0.0, []
    (part,) = parts_of(SAMPLES, 1)
    for share in ranks:
        policy = policy_for(how)
        step = StepInProgress(policy, SAMPLES, how, reference)
        step.begin([part])
        step.accumulate(part, only=share)
        losses += step.sums.loss
        gradients.append(policy.gathered())
    return losses, torch.stack(gradients).sum(0)


def assert_same(one: torch.Tensor, other: torch.Tensor) -> None:
    assert (one - other).norm() <= 2e-5 * max(float(one.norm()), 1e-3)


@pytest.mark.parametrize("name, correction", COMBINATIONS)
def test_any_micro_batches_and_any_ranks_give_the_same_loss_and_gradient(name, correction):
    how = preset_settings(name, correction)
    wanted, (gradient,) = whole(how)
    assert wanted.grad_norm > 1e-4
    small, (other,) = whole(replace(how, tokens_per_microbatch=30))
    assert small.num_microbatches > wanted.num_microbatches
    assert small.loss == pytest.approx(wanted.loss, abs=1e-5)
    assert_same(gradient, other)
    ranks = [[0, 5, 9], [1, 2, 3, 4], [], [6, 7, 8, 10, 11]]
    loss, added = over_ranks(replace(how, tokens_per_microbatch=40), ranks)
    assert loss == pytest.approx(wanted.loss, abs=1e-5)
    assert_same(gradient, added)


@pytest.mark.full
@settings(max_examples=12)
@given(
    st.sampled_from(COMBINATIONS),
    st.sampled_from([None, *DIVERGENCES]),
    st.integers(1, 120),
    st.lists(st.integers(0, 3), min_size=NUM_SAMPLES, max_size=NUM_SAMPLES),
)
def test_so_does_every_other_split_with_every_divergence(combination, kl, budget, rank_of):
    reference = None if kl is None else REFERENCE
    how = preset_settings(*combination, tokens_per_microbatch=budget)
    if kl is not None:
        how = replace(how, kl_coef=0.1, divergence=DIVERGENCES[kl])
    wanted, (gradient,) = whole(replace(how, tokens_per_microbatch=10_000), reference)
    ranks = [[i for i in range(NUM_SAMPLES) if rank_of[i] == rank] for rank in range(4)]
    loss, added = over_ranks(how, ranks, reference)
    assert loss == pytest.approx(wanted.loss, abs=2e-5)
    assert_same(gradient, added)


@pytest.mark.parametrize("name", PRESETS)
def test_figures_do_not_depend_on_micro_batches(name):
    how = preset_settings(name, "icepop")
    one, _ = whole(how)
    other, _ = whole(replace(how, tokens_per_microbatch=30))
    split = {"num_row_tokens", "num_microbatches"}
    for figure, value in one.row().items():
        if figure not in split:
            assert other.row()[figure] == pytest.approx(value, rel=1e-3, abs=1e-5), figure


@pytest.mark.parametrize("name", PRESETS)
def test_several_updates_are_the_same_whatever_the_micro_batches(name):
    how = preset_settings(name, "tis", updates_per_step=2)
    _, wanted = whole(how)
    _, others = whole(replace(how, tokens_per_microbatch=30))
    assert len(wanted) == len(others) == 2
    assert_same(wanted[0], others[0])
    # After the first update Adam has made signs of rounding, so the second is only nearly the same.
    assert (wanted[1] - others[1]).norm() <= 0.02 * wanted[1].norm()


@pytest.mark.parametrize("name", PRESETS)
def test_the_order_of_samples_does_not_matter(name):
    how = preset_settings(name, "sequence_mask")
    _, (gradient,) = whole(how)
    policy = policy_for(how)
    train_step(policy, [SAMPLES[i] for i in (7, 2, 11, 0, 9, 4, 1, 10, 3, 6, 8, 5)], how, lr=1e-3)
    assert_same(gradient, policy.gradients[0])


def test_answers_that_were_claimed_apart_are_trained_like_those_of_whole_groups():
    """But for the updates, which they are dealt to one by one."""
    how = preset_settings("grpo", "tis", recalls_siblings=True)
    wanted, (gradient,) = whole(how)
    apart = [replace(sample, group=100 - i, siblings=sample.group) for i, sample in enumerate(SAMPLES)]
    policy = policy_for(how)
    found = train_step(policy, apart, how, lr=1e-3)
    assert found.loss == pytest.approx(wanted.loss, abs=1e-6)
    assert found.num_row_tokens == wanted.num_row_tokens, "a prompt is packed once, whoever claimed its answers"
    assert_same(gradient, policy.gradients[0])
    assert [len(part) for part in parts_of(apart, 4)] == [3, 3, 3, 3]


def test_a_sibling_outside_the_batch_moves_advantages_where_it_is_asked_for():
    how = preset_settings("rloo")
    recalling = [replace(sample, earlier=(9.0, 9.0)) for sample in SAMPLES]
    told = {}
    for recalls in (False, True):
        step = StepInProgress(policy_for(how), recalling, replace(how, recalls_siblings=recalls), None)
        step.begin(parts_of(recalling, 1))
        told[recalls] = [float(a[0]) for a in step.credit.advantages]
    assert max(told[True]) < 0 <= max(told[False])
