"""Estimates against a slow reference that adds up one-step errors, and the cases with a closed form."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.trainer.advantages import estimate, rewards_by_token, whitened

number = st.integers(-300, 300).map(lambda n: n / 100)
moment = st.tuples(number, number, st.booleans())


def slowly(rewards, values, mask, gamma: float, lam: float) -> tuple[np.ndarray, np.ndarray]:
    """By definition: A_k is the sum over later choices of (gamma lambda)^j times their one-step error."""
    chosen = [t for t, is_trained in enumerate(mask) if is_trained]
    ends = [*chosen, len(rewards)][1:] if chosen else []
    earned = [sum(rewards[start:end]) for start, end in zip(chosen, ends, strict=True)]
    guess = [values[t] for t in chosen] + [0.0]
    errors = [earned[k] + gamma * guess[k + 1] - guess[k] for k in range(len(chosen))]
    advantages, returns = np.zeros(len(rewards)), np.zeros(len(rewards))
    for k, t in enumerate(chosen):
        advantages[t] = sum((gamma * lam) ** (j - k) * errors[j] for j in range(k, len(chosen)))
        returns[t] = advantages[t] + values[t]
    return advantages, returns


def parts(moments) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rewards, values, mask = zip(*moments, strict=True) if moments else ((), (), ())
    return np.array(rewards, float), np.array(values, np.float32), np.array(mask, bool)


@given(st.lists(moment, max_size=12), st.floats(0.1, 1), st.floats(0, 1))
def test_estimates_are_sums_of_one_step_errors(moments, gamma, lam):
    rewards, values, mask = parts(moments)
    for got, wanted in zip(
        estimate(rewards, values, mask, gamma, lam), slowly(rewards, values, mask, gamma, lam), strict=True
    ):
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-4)
        assert (got[~mask] == 0).all()


@given(st.lists(moment, min_size=1, max_size=12))
def test_with_gamma_and_lambda_1_the_return_is_all_that_is_still_earned(moments):
    rewards, values, mask = parts(moments)
    advantages, returns = estimate(rewards, values, mask, 1.0, 1.0)
    still = rewards[::-1].cumsum()[::-1]
    np.testing.assert_allclose(returns[mask], still[mask], atol=1e-4)
    np.testing.assert_allclose(advantages[mask], (still - values)[mask], atol=1e-4)


def test_with_lambda_0_only_the_next_guess_counts():
    advantages, returns = estimate(np.array([0.0, 0.5, 1.0]), np.array([0.2, 0.3, 0.6]), np.ones(3, bool), 0.9, 0.0)
    assert advantages.tolist() == pytest.approx([0.9 * 0.3 - 0.2, 0.5 + 0.9 * 0.6 - 0.3, 1.0 - 0.6])
    assert returns.tolist() == pytest.approx([0.27, 1.04, 1.0])


def test_tokens_in_between_are_passed_over_and_what_they_earned_goes_to_the_choice_before():
    """A given token is no step in time: nothing is discounted for it."""
    rewards, values = np.array([0.0, 2.0, 0.0, 1.0]), np.array([0.5, 99.0, 0.25, 99.0])
    mask = np.array([True, False, True, False])
    advantages, _ = estimate(rewards, values, mask, 0.5, 0.5)
    last = 1.0 - 0.25
    assert advantages.tolist() == pytest.approx([2.0 + 0.5 * 0.25 - 0.5 + 0.25 * last, 0, last, 0])


@given(st.lists(moment, max_size=8), st.sampled_from([np.nan, np.inf, 1e9]))
def test_guesses_where_nothing_is_trained_are_irrelevant(moments, junk):
    rewards, values, mask = parts(moments)
    worse = np.where(mask, values, junk)
    for one, other in zip(
        estimate(rewards, values, mask, 0.9, 0.8), estimate(rewards, worse, mask, 0.9, 0.8), strict=True
    ):
        assert np.array_equal(one, other)


def test_rewards_stand_at_their_positions_and_those_of_one_place_add_up():
    assert rewards_by_token(4, [(0, 0.5), (2, 1.0), (2, 0.25), (-1, 3.0)]).tolist() == [0.5, 0, 1.25, 3.0]
    assert rewards_by_token(2, [(5, 1.0)]).tolist() == [0, 1.0]  # the answer was cut before it
    assert rewards_by_token(0, [(-1, 1.0)]).tolist() == []


@given(st.lists(st.lists(st.tuples(number, st.booleans()), max_size=6), max_size=5))
def test_whitened_advantages_have_mean_0_and_spread_1_over_the_trained_tokens(batch):
    raw = [np.array([a for a, _ in moments], np.float32) for moments in batch]
    masks = [np.array([m for _, m in moments], bool) for moments in batch]
    found = whitened(raw, masks)
    trained = np.concatenate([f[m] for f, m in zip(found, masks, strict=True)]) if batch else np.zeros(0)
    before = np.concatenate([a[m] for a, m in zip(raw, masks, strict=True)]) if batch else np.zeros(0)
    assert all((f[~m] == 0).all() for f, m in zip(found, masks, strict=True))
    if len(before) > 1 and np.ptp(before) > 0:
        assert trained.mean() == pytest.approx(0, abs=1e-4)
        assert trained.std(ddof=1) == pytest.approx(1, abs=1e-3)
    else:
        assert (trained == 0).all()


def test_rounding_does_not_become_a_signal():
    raw = [np.array([0.3, 0.3 + 3e-9, 0.3], np.float64)]
    assert whitened(raw, [np.ones(3, bool)])[0].tolist() == [0, 0, 0]
