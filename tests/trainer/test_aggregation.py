"""Denominators: fixed beforehand, over all parts, and never of a part's own."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.trainer.step import Totals, token_weights

WAYS = ["token_mean", "sequence_mean", "constant"]
MASKS = [np.array([1, 1, 1, 0], bool), np.array([1], bool), np.array([0, 0], bool)]


@pytest.mark.parametrize(
    "how, wanted",
    [
        ("token_mean", [[1 / 4, 1 / 4, 1 / 4, 0], [1 / 4], [0, 0]]),
        ("sequence_mean", [[1 / 9, 1 / 9, 1 / 9, 0], [1 / 3], [0, 0]]),
        ("constant", [[1 / 30, 1 / 30, 1 / 30, 0], [1 / 30], [0, 0]]),
    ],
)
def test_weights_are_their_closed_forms_and_a_masked_sequence_still_counts_as_one(how, wanted):
    weights = token_weights(MASKS, Totals.of(MASKS), how, 10)
    for got, expected in zip(weights, wanted, strict=True):
        assert got.dtype == np.float32
        assert got.tolist() == pytest.approx(expected)


masks = st.lists(st.lists(st.booleans(), max_size=6).map(lambda bits: np.array(bits, bool)), max_size=6)


@given(masks, masks, st.sampled_from(WAYS))
def test_parts_with_the_totals_of_all_weigh_as_the_whole(some, others, how):
    totals = Totals.of(some + others)
    whole = token_weights(some + others, totals, how, 5)
    apart = token_weights(some, totals, how, 5) + token_weights(others, totals, how, 5)
    for one, other in zip(whole, apart, strict=True):
        assert np.array_equal(one, other)


@given(masks)
def test_weights_of_a_mean_add_up_to_1_where_all_sequences_have_a_trained_token(some):
    some = [mask for mask in some if mask.any()]
    for how in WAYS[:2]:
        total = sum(float(w.sum()) for w in token_weights(some, Totals.of(some), how, 1))
        assert total == pytest.approx(1 if some else 0, abs=1e-5)


@pytest.mark.parametrize("how", WAYS)
def test_nothing_to_train_on_divides_by_nothing(how):
    assert token_weights([], Totals(), how, 3) == []
    weights = token_weights([np.zeros(2, bool)], Totals.of([np.zeros(2, bool)]), how, 3)
    assert weights[0].tolist() == [0, 0]


def test_a_token_that_is_too_old_still_counts_in_denominators():
    trained, sampled = [np.array([0, 1, 1], bool), np.array([1], bool)], [np.ones(3, bool), np.ones(1, bool)]
    totals = Totals.of(sampled)
    assert token_weights(trained, totals, "token_mean", 1, sampled)[0].tolist() == pytest.approx([0, 1 / 4, 1 / 4])
    assert token_weights(trained, totals, "sequence_mean", 1, sampled)[0].tolist() == pytest.approx([0, 1 / 6, 1 / 6])
