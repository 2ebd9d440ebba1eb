"""Weights of a reward's parts, and what answers lose for their length."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.errors import UserError
from offbeat.rewards.child import BadValue, parts_of
from offbeat.rewards.pool import Shaping, penalty
from offbeat.trajectory import Reward, total


@pytest.mark.parametrize(
    ("num_tokens", "gained"), [(0, 0.0), (12288, 0.0), (12289, -1 / 4096), (14336, -0.5), (16384, -1.0), (20000, -1.0)]
)
def test_the_penalty_for_length_has_its_published_values(num_tokens: int, gained: float):
    assert penalty(num_tokens, 16384, 4096) == gained


@given(st.integers(1, 50), st.integers(1, 50), st.integers(0, 99))
def test_longer_answers_never_lose_less_and_none_loses_more_than_one(cap: int, window: int, n: int):
    window = min(cap, window)
    assert -1 <= penalty(n + 1, cap, window) <= penalty(n, cap, window) <= 0
    assert penalty(cap - window, cap, window) == 0
    assert penalty(cap, cap, window) == -1


def test_parts_count_by_their_weights_and_keep_their_values():
    shaping = Shaping({"brief": 0.5})
    rewards = shaping.weighted([Reward(1.0, "right"), Reward(-2.0, "brief", 3)])
    assert rewards == (Reward(1.0, "right"), Reward(-2.0, "brief", 3, 0.5))
    assert total(rewards) == 0.0


def test_what_an_answer_loses_for_its_length_is_one_more_part_of_training_alone():
    shaping = Shaping({"right": 2.0, "overlong": 3.0}, max_new_tokens=10, overlong_tokens=4)
    assert shaping.for_training([Reward(1.0, "right")], 8) == (
        Reward(1.0, "right", weight=2.0),
        Reward(-0.5, "overlong", weight=3.0),
    )
    assert shaping.for_training([Reward(1.0, "right")], 3)[1] == Reward(0.0, "overlong", weight=3.0)
    shaping.check_names({"right"})
    assert shaping.weighted([Reward(1.0, "right")]) == (Reward(1.0, "right", weight=2.0),)


def test_a_weight_of_a_part_that_no_reward_gives_is_refused_by_its_key():
    shaping = Shaping({"breif": 0.5})
    with pytest.raises(UserError, match=r"^reward\.weights\.breif = 0\.5: when .* none gave .*did you mean 'brief'\?$"):
        shaping.check_names({"right", "brief"})
    Shaping({"brief": 0.5}).check_names({"right", "brief"})


def test_a_part_may_not_be_named_like_the_penalty_where_there_is_one():
    with pytest.raises(UserError, match=r"^reward\.overlong_tokens = 4: a reward gives a part named 'overlong', which"):
        Shaping(max_new_tokens=8, overlong_tokens=4).check_names({"overlong"})
    Shaping().check_names({"overlong"})


def test_a_reward_may_be_a_number_numbers_by_name_or_numbers_with_a_position_and_a_name():
    assert parts_of(1) == [(1.0, "reward", -1)]
    assert parts_of({"right": 1, "brief": 0.5}) == [(1.0, "right", -1), (0.5, "brief", -1)]
    assert parts_of([(0, 1, "step"), [3, 0.5, "step"], (-1, True, "end")]) == [
        (1.0, "step", 0),
        (0.5, "step", 3),
        (1.0, "end", -1),
    ]


@pytest.mark.parametrize(
    ("returned", "told"),
    [
        ([], "an empty list"),
        ([1.0], r"a list with 1\.0; its entries must be \(position, value, name\)"),
        ([(0, 1.0)], "a list with .*; its entries must be"),
        ([(-2, 1.0, "a")], "a position of 0 or more, or -1 for the last token"),
        ([(True, 1.0, "a")], "its entries must be"),
        ([(0.5, 1.0, "a")], "its entries must be"),
        ([(0, 1.0, 2)], "its entries must be"),
        (["abc"], "its entries must be"),
        ([(0, float("nan"), "a")], "nan as 'a' at 0; return a finite number"),
        ([(0, "1", "a")], "'1' as 'a' at 0, a str; return a finite number"),
    ],
)
def test_a_list_of_anything_else_is_told_in_one_line(returned: object, told: str):
    with pytest.raises(BadValue, match=told) as caught:
        parts_of(returned)
    assert "\n" not in str(caught.value)
