"""Suggestions in place of a name that does not exist."""

from __future__ import annotations

import pytest

from offbeat.spelling import nearest, suggest

LOSSES = ("grpo", "dr_grpo", "dapo", "gspo", "ppo")


@pytest.mark.parametrize(
    "word, meant",
    [("gpro", "grpo"), ("gsop", "gspo"), ("grpoo", "grpo"), ("DrGRPO", "dr_grpo"), ("rl", None), ("dpao", "dapo")],
)
def test_neighbouring_letters_that_are_swapped_count_as_one_mistake(word, meant):
    assert nearest(word, LOSSES) == meant


def test_a_swap_wins_in_short_names_too():
    assert nearest("rl", ["lr", "beta2"]) == "lr"


def test_few_allowed_values_are_listed_beside_the_nearest():
    assert suggest("gpro", LOSSES, lists_few=True) == f"did you mean 'grpo'? there are {', '.join(LOSSES)}"
    assert suggest("gpro", LOSSES) == "did you mean 'grpo'?"
    assert suggest("n1", [f"n{i}x" for i in range(99)], lists_few=True).endswith("?")
