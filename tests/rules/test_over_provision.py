"""The over-provision factor: the largest, unless rounds with it are measured to be no faster than with 1."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from offbeat.rules.over_provision import FIRST_PATIENCE, MIN_GAIN, NUM_TRIED, Decision, OverProvision

BOUND, LARGEST = 4, 5.0


def play(
    made: OverProvision, num_rounds: int, tokens_per_s: Callable[[float], float], noise: float = 0.0
) -> tuple[list[float], list[Decision]]:
    """Returns the factor of each round, and all decisions. Rounds last one second."""
    rng, factors, decisions = np.random.default_rng(0), [], []
    for _ in range(num_rounds):
        factors.append(made.factor)
        decision = made.outcome(tokens_per_s(made.factor) * float(np.exp(rng.normal(0, noise))), 1.0)
        decisions += [] if decision is None else [decision]
    return factors, decisions


def gaining(gain: float) -> Callable[[float], float]:
    """Returns the speed by factor of an engine on which the largest factor gains so much over 1."""
    return lambda factor: 1000.0 if factor == 1.0 else 1000.0 * (1 + gain)


def test_it_begins_with_the_largest_factor_and_keeps_it_where_it_is_faster():
    factors, decisions = play(OverProvision(BOUND), 1000, gaining(0.5), noise=0.1)
    assert (factors[0], factors[-1]) == (LARGEST, LARGEST)
    assert factors.count(1.0) == 3 * (BOUND + 1 + NUM_TRIED), "three trials in a thousand rounds"
    assert decisions[0].reason == f"factor 1 is tried for {NUM_TRIED} rounds"
    assert "tokens/s with factor 1, " in decisions[1].reason


def test_the_first_trial_comes_after_as_many_measured_rounds_as_the_patience_says():
    factors, _ = play(OverProvision(BOUND), 200, gaining(0.5))
    assert factors.index(1.0) == BOUND + 1 + FIRST_PATIENCE


def test_where_the_largest_factor_gains_too_little_it_falls_to_one():
    for gain in (-0.2, 0.0, 0.9 * MIN_GAIN):
        factors, decisions = play(OverProvision(BOUND), 100, gaining(gain))
        assert factors[-1] == decisions[-1].factor == 1.0


def test_at_one_the_largest_factor_is_tried_again_and_kept_once_it_pays():
    made = OverProvision(BOUND)
    assert play(made, 100, gaining(0.0))[0][-1] == 1.0
    factors, _ = play(made, 200, gaining(0.0))
    assert (LARGEST in factors, factors[-1]) == (True, 1.0)
    assert play(made, 1000, gaining(0.5))[0][-1] == LARGEST


def test_rounds_that_mix_two_factors_are_not_measured():
    made, num_since = OverProvision(BOUND), {"": BOUND + 1}
    factors = []
    for number in range(200):
        changed = bool(factors) and factors[-1] != made.factor
        num_since[""] = number if changed else num_since[""]
        is_mixed = number < BOUND + 1 or number - num_since[""] < BOUND + 1
        factors.append(made.factor)
        made.outcome(1e9 if is_mixed else gaining(0.5)(made.factor), 1.0)
    assert factors[-1] == LARGEST, "a mixed round at factor 1 would look fast"


def test_without_a_bound_above_zero_there_is_nothing_to_choose():
    factors, decisions = play(OverProvision(0), 300, gaining(0.5))
    assert (set(factors), decisions) == ({1.0}, [])


def test_a_trial_that_engines_join_or_leave_is_void():
    made = OverProvision(BOUND)
    while made.factor == LARGEST:
        made.outcome(1000.0, 1.0)
    for _ in range(BOUND + 1 + NUM_TRIED - 1):
        assert made.outcome(9000.0, 1.0) is None  # as fast as nine times as many engines
    made.fleet_changed()
    assert made.outcome(9000.0, 1.0) is None, "nothing to compare with"
    factors, _ = play(made, 300, gaining(0.5))
    assert factors[-1] == LARGEST


@given(
    bound=st.integers(0, 8),
    rounds=st.lists(st.tuples(st.integers(0, 10**6), st.floats(0, 1e4), st.integers(0, 9)), max_size=300),
)
def test_whatever_is_measured_the_factor_is_one_or_the_largest_and_every_change_is_returned(bound, rounds):
    made = OverProvision(bound)
    for tokens, seconds, event in rounds:
        before = made.factor
        if event == 0:
            made.fleet_changed()
        decision = made.outcome(tokens, seconds)
        assert made.factor in (1.0, bound + 1.0)
        assert made.factor == before or (decision is not None and decision.factor == made.factor)
