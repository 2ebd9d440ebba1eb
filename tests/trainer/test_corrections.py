"""What each correction makes of the fixture's ρ = [3, 1, 0.5], [1, 1], and what it never does."""

import math
from dataclasses import replace

import pytest
import torch
from fixture_tokens import IMPORTANCE, doubles, fixture, some_tokens, total_loss
from hypothesis import given
from hypothesis import strategies as st

from offbeat.config.schema import IMPORTANCE as BOUNDS
from offbeat.trainer.losses import CORRECTIONS, VETO, CorrectionSettings, clean, correct, reinforce

MEAN = math.exp((math.log(3) + math.log(0.5)) / 3)
ALL = [True] * 5


def corrected(kind: str, low: float = 0.0, high: float = math.inf, tokens=None):
    cleaned, _ = clean(tokens or fixture())
    return correct(cleaned, CorrectionSettings(kind, low, high))


def of_importance(*importance: float, lengths: tuple[int, ...]):
    """Tokens with these ρ."""
    tokens = some_tokens(0, lengths)
    return replace(
        tokens,
        behaviour=tokens.proximal - doubles(importance).log(),
        mask=torch.ones(sum(lengths), dtype=torch.bool),
    )


@pytest.mark.parametrize(
    "kind, low, high, weights, kept",
    [
        ("off", 0, 1, [1] * 5, ALL),
        ("decoupled", 0, math.inf, IMPORTANCE, ALL),
        ("tis", 0, 2, [2, 1, 0.5, 1, 1], ALL),
        ("icepop", 0.49, 2, [0, 1, 0.5, 1, 1], [False, True, True, True, True]),
        ("icepop", 0.51, 5, [3, 1, 0, 1, 1], [True, True, False, True, True]),
        ("sequence_tis", 0, 2, [MEAN] * 3 + [1, 1], ALL),
        ("sequence_tis", 0, 1.1, [1.1] * 3 + [1, 1], ALL),
        ("sequence_mask", 0.5, 2, [2, 1, 0.5, 1, 1], ALL),
        ("sequence_mask", 0.5, 1.1, [0, 0, 0, 1, 1], [False] * 3 + [True] * 2),
        ("sequence_mask", 1.1, 2, [2, 1, 0.5, 0, 0], [True] * 3 + [False] * 2),
    ],
)
def test_the_fixture_is_weighed_as_worked_out_by_hand(kind, low, high, weights, kept):
    found = corrected(kind, low, high)
    assert found.weight[:5].tolist() == pytest.approx(weights)
    assert found.kept[:5].tolist() == kept


def test_a_sequences_importance_is_the_geometric_mean():
    weights = corrected("sequence_tis").weight
    assert weights[0].item() == pytest.approx(1.144714, abs=1e-6)
    assert weights[3].item() == pytest.approx(1)


def test_bounds_are_inclusive():
    tokens = of_importance(1.0, 1.0, lengths=(1, 1))
    tokens = replace(tokens, behaviour=tokens.proximal)  # exactly 1
    for kind in ("icepop", "sequence_mask"):
        assert corrected(kind, 1.0, 1.0, tokens).kept.all()


def test_one_token_that_cannot_be_believed_vetoes_its_sequence_and_no_other():
    tokens = of_importance(VETO / 2, 50.0, 40.0, 1.0, 1.0, lengths=(3, 2))
    found = corrected("sequence_mask", 0.0, 100.0, tokens)
    assert found.kept.tolist() == [False] * 3 + [True] * 2
    assert found.weight.tolist() == pytest.approx([0, 0, 0, 1, 1])
    above = of_importance(VETO * 2, 50.0, 40.0, 1.0, 1.0, lengths=(3, 2))
    assert corrected("sequence_mask", 0.0, 100.0, above).kept.all()


def test_a_token_that_is_not_trained_vetoes_nothing_and_is_in_no_mean():
    tokens = of_importance(VETO / 2, 2.0, 1.0, lengths=(2, 1))
    tokens = replace(tokens, mask=torch.tensor([False, True, True]))
    found = corrected("sequence_mask", 0.5, 3.0, tokens)
    assert found.kept.tolist() == [True] * 3
    assert corrected("sequence_tis", 0, 3.0, tokens).weight[1:].tolist() == pytest.approx([2, 1])


def test_importance_does_not_explode_with_the_length_of_a_sequence():
    tokens = of_importance(*[1.5] * 400, lengths=(400,))
    assert corrected("sequence_tis", tokens=tokens).weight[0].item() == pytest.approx(1.5)


def test_what_is_rejected_stays_in_every_denominator():
    """With half of the tokens rejected, what is left costs what it cost before."""
    tokens = of_importance(1.0, 9.0, 1.0, 9.0, lengths=(2, 2))
    tokens = replace(tokens, advantages=doubles([1, 1, 1, 1]), logprobs=doubles([-1, -1, -1, -1]))
    for aggregate in ("token_mean", "sequence_mean", "constant"):
        how = {"aggregate": aggregate, "constant": 2}
        whole = total_loss(tokens, reinforce, **how).item()
        half = total_loss(tokens, reinforce, **how, correction=CorrectionSettings("icepop", 0.5, 2.0)).item()
        assert half == pytest.approx(whole / 2)


@pytest.mark.parametrize("kind", CORRECTIONS)
def test_no_gradient_flows_through_a_weight(kind):
    tokens = some_tokens(2)
    tokens = replace(tokens, proximal=tokens.logprobs)  # even where the start of the step is the policy itself
    found = correct(tokens, CorrectionSettings(kind, 0.5, 2.0))
    assert not found.weight.requires_grad


@pytest.mark.parametrize("kind", CORRECTIONS)
def test_tokens_of_the_very_weights_count_as_they_are(kind):
    tokens = some_tokens(2)
    tokens = replace(tokens, behaviour=tokens.proximal)
    found = correct(tokens, CorrectionSettings(kind, *BOUNDS[kind]))
    assert found.weight.tolist() == pytest.approx([1] * len(found.weight))
    assert found.kept.all()


@given(st.integers(0, 50), st.floats(0, 1), st.floats(1, 10))
def test_weights_keep_to_their_bounds_and_are_0_exactly_where_rejected(seed, low, high):
    tokens, _ = clean(some_tokens(seed))
    for kind in CORRECTIONS:
        found = correct(tokens, CorrectionSettings(kind, low, high))
        if kind != "decoupled":
            assert (found.weight <= high * (1 + 1e-9)).all(), kind
        assert ((found.weight == 0) == ~found.kept).all(), kind


def test_every_correction_of_the_configuration_exists():
    assert set(CORRECTIONS) == set(BOUNDS)
