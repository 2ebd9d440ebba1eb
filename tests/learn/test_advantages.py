import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from offbeat.learn.advantages import group_normalised


def test_one_right_answer_in_four_gives_the_known_advantages():
    got = group_normalised(np.array([1.0, 0, 0, 0]), np.zeros(4))
    np.testing.assert_allclose(got, [1.499997, -0.499999, -0.499999, -0.499999], rtol=1e-6)


def test_a_singleton_has_no_advantage():
    assert group_normalised(np.array([1.0]), np.array([7])).tolist() == [0]


def test_equal_rewards_have_exactly_no_advantage_even_when_rounding_differs():
    assert group_normalised(np.array([0.1 + 0.2, 0.3, 0.3]), np.zeros(3)).tolist() == [0, 0, 0]


@given(st.lists(st.tuples(st.integers(0, 3), st.floats(-5, 5)), min_size=1, max_size=20), st.randoms())
def test_order_and_unequal_groups_do_not_matter(pairs, random):
    groups, rewards = np.array([g for g, _ in pairs]), np.array([r for _, r in pairs])
    order = list(range(len(pairs)))
    random.shuffle(order)
    shuffled = group_normalised(rewards[order], groups[order])
    np.testing.assert_allclose(shuffled, group_normalised(rewards, groups)[order], rtol=1e-5, atol=1e-6)
