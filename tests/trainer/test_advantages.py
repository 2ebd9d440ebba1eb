"""Known advantages, and what has none: a group of one, and rewards that are all equal."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.config.schema import ADVANTAGES as NAMES
from offbeat.trainer.advantages import (
    ADVANTAGES,
    batch_normalised,
    group_centred,
    group_normalised,
    leave_one_out,
    siblings_normalised,
)

ONE_RIGHT = np.array([1.0, 0, 0, 0])


def test_one_right_answer_in_four_gives_the_known_advantages():
    one = np.zeros(4)
    np.testing.assert_allclose(group_normalised(ONE_RIGHT, one), [1.499997] + [-0.499999] * 3, rtol=1e-6)
    np.testing.assert_allclose(group_centred(ONE_RIGHT, one), [0.75] + [-0.25] * 3)
    np.testing.assert_allclose(leave_one_out(ONE_RIGHT, one), [1] + [-1 / 3] * 3, rtol=1e-6)
    np.testing.assert_allclose(siblings_normalised(ONE_RIGHT, one), [1.999996] + [-0.6666653] * 3, rtol=1e-6)
    np.testing.assert_allclose(batch_normalised(ONE_RIGHT, np.arange(4)), [1.499997] + [-0.499999] * 3, rtol=1e-6)


@pytest.mark.parametrize("name", ["group", "mean", "leave_one_out", "siblings"])
def test_a_singleton_has_no_advantage_and_takes_none_from_others(name):
    advantage = ADVANTAGES[name]
    got = advantage(np.array([1.0, 7.0, 0.0]), np.array([7, 3, 7]))
    assert got[1] == 0
    assert got[[0, 2]].tolist() == advantage(np.array([1.0, 0.0]), np.array([7, 7])).tolist()


@pytest.mark.parametrize("name", ADVANTAGES)
def test_equal_rewards_have_exactly_no_advantage_even_when_rounding_differs(name):
    assert ADVANTAGES[name](np.array([0.1 + 0.2, 0.3, 0.3]), np.zeros(3)).tolist() == [0, 0, 0]


def test_over_a_batch_a_group_of_equal_rewards_has_an_advantage_all_the_same():
    got = batch_normalised(np.array([1.0, 1.0, 0.0, 0.0]), np.array([0, 0, 1, 1]))
    np.testing.assert_allclose(got, [0.866024, 0.866024, -0.866024, -0.866024], rtol=1e-5)


def one_by_one(name: str, rewards: np.ndarray, groups: np.ndarray) -> list[float]:
    """The same, written as a loop over answers."""
    found = []
    for i, reward in enumerate(rewards):
        others = [r for j, r in enumerate(rewards) if groups[j] == groups[i] or name == "batch"]
        if len(others) < 2 or max(others) - min(others) <= 1e-8:
            found.append(0.0)
            continue
        mean = math.fsum(others) / len(others)
        spread = math.sqrt(math.fsum((r - mean) ** 2 for r in others) / (len(others) - 1))
        rest = (math.fsum(others) - reward) / (len(others) - 1)
        scale = 1 / (spread + 1e-6) if name in ("group", "siblings", "batch") else 1.0
        found.append((reward - (rest if name in ("leave_one_out", "siblings") else mean)) * scale)
    return found


pairs = st.lists(st.tuples(st.integers(0, 3), st.integers(-500, 500).map(lambda n: n / 100)), max_size=20)


@given(pairs, st.sampled_from(list(ADVANTAGES)))
def test_unequal_groups_in_any_order_are_each_judged_by_themselves(found, name):
    groups, rewards = np.array([g for g, _ in found], np.int64), np.array([r for _, r in found])
    got = ADVANTAGES[name](rewards, groups)
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, one_by_one(name, rewards, groups), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ADVANTAGES)
@pytest.mark.parametrize("reward", [math.nan, math.inf])
def test_a_reward_that_is_no_number_is_not_taken_for_one_that_equals_the_others(name, reward):
    with np.errstate(invalid="ignore"):
        got = ADVANTAGES[name](np.array([reward, 0.0, 1.0, 0.0]), np.array([0, 0, 1, 1]))
    assert not np.isfinite(got[0])  # the step refuses it
    assert name == "batch" or np.isfinite(got[2:]).all()


def test_every_advantage_of_the_configuration_exists():
    assert {*ADVANTAGES, "gae"} == set(NAMES)
