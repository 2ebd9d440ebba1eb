"""What stands where nothing is trained has no effect; what is not finite where something is, is masked and counted."""

import math
from dataclasses import replace

import pytest
import torch
from fixture_tokens import doubles, fixture, some_tokens, value_and_gradient

from offbeat.trainer.losses import CORRECTIONS, MAX_LOG_RATIO, POLICY_LOSSES, CorrectionSettings, clean

NUMBERS = ("logprobs", "proximal", "behaviour", "advantages", "reference")
SPOILS = [math.nan, math.inf, -math.inf, 1e30]


def spoilt(tokens, field: str, at: int, value: float):
    numbers = getattr(tokens, field).detach().clone()
    numbers[at] = value
    return replace(tokens, **{field: numbers.requires_grad_() if field == "logprobs" else numbers})


@pytest.mark.parametrize("value", SPOILS)
@pytest.mark.parametrize("field", NUMBERS)
def test_a_number_under_the_mask_has_no_effect_on_value_or_gradient(field, value):
    tokens = some_tokens(3)
    at = int((~tokens.mask).nonzero()[0])
    worse = spoilt(tokens, field, at, value)
    for name, loss in POLICY_LOSSES.items():
        for kind in CORRECTIONS:
            how = {"correction": CorrectionSettings(kind, 0.5, 2.0)}
            assert value_and_gradient(worse, loss, **how) == value_and_gradient(tokens, loss, **how), (name, kind)
    assert not clean(worse)[1].any()


@pytest.mark.parametrize("value", SPOILS[:3])
@pytest.mark.parametrize("field", NUMBERS)
def test_a_trained_number_that_is_not_finite_is_masked_and_told(field, value):
    tokens = some_tokens(3)
    at = int(tokens.mask.nonzero()[2])
    cleaned, wrong = clean(spoilt(tokens, field, at, value))
    assert wrong.nonzero().tolist() == [[at]]
    assert not cleaned.mask[at]
    assert cleaned.mask.sum() == tokens.mask.sum() - 1
    for name in NUMBERS:
        assert getattr(cleaned, name).isfinite().all()
    for loss in POLICY_LOSSES.values():
        number, gradient = value_and_gradient(spoilt(tokens, field, at, value), loss)
        assert math.isfinite(number)
        assert all(map(math.isfinite, gradient))
        assert gradient[at] == 0


def test_cleaned_tokens_are_zero_wherever_nothing_is_trained():
    cleaned, wrong = clean(some_tokens(5))
    assert not wrong.any()
    for name in NUMBERS:
        assert (getattr(cleaned, name)[~cleaned.mask] == 0).all()
    assert clean(fixture())[0].reference is None


def test_means_are_over_a_sequences_trained_tokens():
    tokens = fixture()
    values = doubles([1, 2, 6, 10, 20, 1e9])
    assert tokens.means(values).tolist() == [3, 15]
    assert tokens.per_token(tokens.means(values)).tolist() == [3, 3, 3, 15, 15, 15]
    nothing = replace(tokens, mask=torch.zeros(6, dtype=torch.bool))
    assert nothing.means(values).tolist() == [0, 0]


def test_the_order_of_sequences_and_tokens_in_a_micro_batch_does_not_matter():
    tokens = some_tokens(1)
    order = torch.tensor([7, 0, 3, 10, 4, 1, 9, 2, 6, 5, 8])
    fields = (*NUMBERS, "mask", "sequence", "staleness")
    shuffled = replace(tokens, **{name: getattr(tokens, name)[order] for name in fields})
    assert shuffled.means(shuffled.behaviour).tolist() == pytest.approx(tokens.means(tokens.behaviour).tolist())


def test_differences_of_log_probs_are_bounded_before_anything_is_exponentiated():
    tokens = replace(some_tokens(0, (2,)), logprobs=doubles([0.0, -500.0]), proximal=doubles([-500.0, 0.0]))
    assert tokens.log_ratio.tolist() == [MAX_LOG_RATIO, -MAX_LOG_RATIO]
    tokens = replace(tokens, behaviour=doubles([0.0, -500.0]))
    assert tokens.log_importance.tolist() == [-MAX_LOG_RATIO, MAX_LOG_RATIO]


def test_ratio_and_importance_are_what_their_names_say():
    tokens, _ = clean(fixture())
    assert tokens.log_ratio.exp().tolist() == pytest.approx([1, 1.5, 0.7, 1.25, 0.6, 1])
    assert tokens.log_importance.exp().tolist() == pytest.approx([3, 1, 0.5, 1, 1, 1])
