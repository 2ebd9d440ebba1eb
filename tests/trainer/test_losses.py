"""Values and gradients that were worked out by hand, and gradients against finite differences."""

import math
from dataclasses import replace

import pytest
import torch
from fixture_tokens import doubles, fixture, some_tokens, total_loss, value_and_gradient

from offbeat.trainer.losses import (
    DIVERGENCES,
    POLICY_LOSSES,
    CorrectionSettings,
    LossSettings,
    cispo,
    clean,
    clip,
    reinforce,
    sequence_clip,
)

DAPO = LossSettings(clip_low=0.2, clip_high=0.28)

TABLE = {
    "grpo": (clip, LossSettings(), {}, 0.0291667, [-1 / 6, 0, -0.1166667, 0.3125, 0]),
    "dr_grpo": (
        clip,
        LossSettings(),
        {"aggregate": "constant", "constant": 3},
        -0.1416667,
        [-1 / 6, 0, -0.1166667, 0.2083333, 0],
    ),
    "dapo": (clip, DAPO, {"aggregate": "token_mean"}, -0.186, [-0.2, 0, -0.14, 0.25, 0]),
    "gspo, wide": (sequence_clip, LossSettings(), {}, -0.0751855, [-0.169399] * 3 + [0.216506] * 2),
    "gspo": (sequence_clip, LossSettings(3e-4, 4e-4), {}, -0.00035, [0] * 5),
    "cispo, cap 1.28": (
        cispo,
        LossSettings(ratio_max=1.28),
        {"aggregate": "token_mean"},
        None,
        [-0.2, -0.256, -0.14, 0.25, 0.12],
    ),
    "dapo, tis": (
        clip,
        DAPO,
        {"aggregate": "token_mean", "correction": CorrectionSettings("tis", high=2.0)},
        -0.316,
        [-0.4, 0, -0.07, 0.25, 0],
    ),
    "dapo, decoupled": (
        clip,
        DAPO,
        {"aggregate": "token_mean", "correction": CorrectionSettings("decoupled")},
        -0.516,
        [-0.6, 0, -0.07, 0.25, 0],
    ),
    "dapo, icepop": (
        clip,
        DAPO,
        {
            "aggregate": "token_mean",
            "correction": CorrectionSettings("icepop", 0.5 - 1e-9, 2.0),
        },  # ρ is a log's exponential
        0.084,
        [0, 0, -0.07, 0.25, 0],
    ),
}


@pytest.mark.parametrize("name", TABLE)
def test_the_fixture_costs_what_was_worked_out_by_hand_and_so_does_its_gradient(name):
    loss, settings, rest, wanted, wanted_gradient = TABLE[name]
    value, gradient = value_and_gradient(fixture(), loss, settings, **rest)
    assert gradient == pytest.approx([*wanted_gradient, 0], abs=1e-6)
    if wanted is not None:
        assert value == pytest.approx(wanted, abs=1e-6)


def test_cispo_costs_the_capped_ratio_times_the_log_prob():
    value, _ = value_and_gradient(fixture(), cispo, LossSettings(ratio_max=1.28), aggregate="token_mean")
    logprobs = fixture().logprobs[:5].tolist()
    weights = [1.0, 1.28, 0.7, -1.25, -0.6]
    assert value == pytest.approx(-sum(w * p for w, p in zip(weights, logprobs, strict=True)) / 5)


def test_a_capped_token_of_cispo_still_learns_and_none_counts_as_clipped():
    tokens, _ = clean(fixture())
    found = cispo(tokens, LossSettings(ratio_max=1.0))
    assert not found.clipped.any()
    _, gradient = value_and_gradient(fixture(), cispo, LossSettings(ratio_max=1.0), aggregate="token_mean")
    assert gradient == pytest.approx([-0.2, -0.2, -0.14, 0.2, 0.12, 0])


def test_reinforce_is_the_advantage_times_the_log_prob_whatever_the_ratio():
    value, gradient = value_and_gradient(fixture(), reinforce, aggregate="token_mean")
    logprobs = fixture().logprobs.tolist()
    assert value == pytest.approx((-sum(logprobs[:3]) + sum(logprobs[3:5])) / 5)
    assert gradient == pytest.approx([-0.2, -0.2, -0.2, 0.2, 0.2, 0])


def test_clipped_tokens_are_those_without_a_gradient():
    tokens, _ = clean(fixture())
    assert clip(tokens, LossSettings()).clipped.tolist() == [False, True, False, False, True, False]
    assert not sequence_clip(tokens, LossSettings()).clipped.any()
    assert sequence_clip(tokens, LossSettings(3e-4, 4e-4)).clipped[:5].all()


@pytest.mark.parametrize(
    "ratio, advantage, loss, is_clipped",
    [
        (4.0, -1.0, 3.0, True),  # over the limit: the constant c
        (2.9, -1.0, 2.9, False),
        (4.0, -2.0, 6.0, True),
        (0.5, -1.0, 0.8, True),  # the lower clip goes on as before
        (4.0, 1.0, -1.2, True),  # and a good answer is none of its business
        (0.5, 1.0, -0.5, False),
    ],
)
def test_a_dual_clip_limits_what_a_bad_answer_costs(ratio, advantage, loss, is_clipped):
    tokens = one_token(ratio, advantage)
    found = clip(tokens, LossSettings(dual_clip=3.0))
    assert found.loss.item() == pytest.approx(loss)
    assert found.clipped.tolist() == [is_clipped]
    (gradient,) = torch.autograd.grad(found.loss.sum(), tokens.logprobs)
    assert gradient.item() == pytest.approx(0 if is_clipped else -ratio * advantage)


@pytest.mark.parametrize(
    "ratio, advantage, loss",
    [(1.27, 1, -1.27), (1.29, 1, -1.28), (0.1, 1, -0.1), (0.81, -1, 0.81), (0.75, -1, 0.8), (9.0, -1, 9.0)],
)
@pytest.mark.parametrize("policy_loss", [clip, sequence_clip])
def test_the_clips_two_sides_are_told_apart(policy_loss, ratio, advantage, loss):
    """The fixture's value is the same with them mixed up."""
    found = policy_loss(one_token(ratio, advantage), DAPO)
    assert found.loss.item() == pytest.approx(loss)
    assert found.clipped.item() == (abs(loss) != ratio)


@pytest.mark.parametrize("ratio, advantage, is_clipped", [(1.2, 1, False), (1.21, 1, True), (0.8, -1, False)])
def test_at_the_clips_own_border_a_token_still_learns(ratio, advantage, is_clipped):
    tokens = one_token(1.0, advantage)
    tokens = replace(tokens, logprobs=tokens.proximal + doubles([ratio]).log())
    assert clip(tokens, LossSettings(0.2 + 1e-12, 0.2 + 1e-12)).clipped.tolist() == [is_clipped]


def one_token(ratio: float, advantage: float):
    tokens = some_tokens(0, (1,))
    proximal = doubles([-1.0])
    return replace(
        tokens,
        logprobs=(proximal + math.log(ratio)).requires_grad_(),
        proximal=proximal,
        advantages=doubles([advantage]),
        mask=torch.tensor([True]),
    )


def test_a_ratio_beyond_all_bounds_costs_a_finite_number_and_has_a_finite_gradient():
    for loss in POLICY_LOSSES.values():
        tokens = replace(one_token(1.0, -1.0), proximal=doubles([-1000.0]))
        found = loss(tokens, LossSettings()).loss
        (gradient,) = torch.autograd.grad(found.sum(), tokens.logprobs)
        assert found.isfinite().all()
        assert gradient.isfinite().all()


@pytest.mark.parametrize("aggregate", ["token_mean", "sequence_mean", "constant"])
@pytest.mark.parametrize("divergence", ["k2", "k3", None])
@pytest.mark.parametrize("name", ["clip", "clip, dual", "sequence_clip", "reinforce"])
def test_gradients_are_those_of_finite_differences(name, divergence, aggregate):
    loss = POLICY_LOSSES[name.split(",")[0]]
    settings = LossSettings(0.2, 0.28, dual_clip=3.0 if "dual" in name else None)
    for seed in range(4):
        tokens = some_tokens(seed)

        def cost(logprobs, tokens=tokens):
            moved = replace(tokens, logprobs=logprobs)
            how = {"aggregate": aggregate, "constant": 7}
            value = total_loss(moved, loss, settings, **how, correction=CorrectionSettings("tis", high=2.0))
            if divergence is None:
                return value
            return value + 0.3 * (DIVERGENCES[divergence](logprobs, tokens.reference) * tokens.mask).sum()

        assert torch.autograd.gradcheck(cost, (tokens.logprobs,), eps=1e-6, atol=1e-6)


@pytest.mark.parametrize("seed", range(4))
def test_cispos_gradient_is_its_closed_form(seed):
    tokens = some_tokens(seed)
    _, gradient = value_and_gradient(tokens, cispo, LossSettings(ratio_max=1.8), aggregate="token_mean")
    ratios = (tokens.logprobs - tokens.proximal).detach().exp().clamp(max=1.8)
    wanted = -ratios * tokens.advantages * tokens.mask / tokens.mask.sum()
    assert gradient == pytest.approx(wanted.tolist(), abs=1e-6)


def test_two_segments_are_one_where_the_weights_did_not_change():
    """Versions are only labels: what counts of a segment is the log-probs that it brought."""
    tokens = fixture()
    stitched = replace(tokens, staleness=torch.tensor([1, 0, 0, 4, 0, -1]))
    for name, loss in POLICY_LOSSES.items():
        how = {"correction": CorrectionSettings("icepop", 0.5, 2.0)}
        assert value_and_gradient(tokens, loss, **how) == value_and_gradient(stitched, loss, **how), name


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_a_batch_without_a_trained_token_costs_nothing_and_has_no_gradient(name):
    tokens = replace(fixture(), mask=torch.zeros(6, dtype=torch.bool))
    for aggregate in ("token_mean", "sequence_mean", "constant"):
        assert value_and_gradient(tokens, POLICY_LOSSES[name], aggregate=aggregate) == (0, [0] * 6)
