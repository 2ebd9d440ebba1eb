import json
import sys

import pytest

from offbeat.data.gym import Gym, is_held_out
from offbeat.errors import UserError
from offbeat.rewards.verifiers import load_reward


def refusal(*arguments, **options):
    with pytest.raises(UserError) as caught:
        Gym(*arguments, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_problem_is_a_function_of_seed_and_ordinal():
    one, again, other = Gym("chain_sum", seed=3), Gym("chain_sum", seed=3), Gym("chain_sum", seed=4)
    ordinals = [700, 0, 499, 500, 501]
    problems = [one.problem(ordinal) for ordinal in ordinals]
    assert problems == [again.problem(ordinal) for ordinal in ordinals]
    assert problems != [other.problem(ordinal) for ordinal in ordinals]
    assert len({problem.prompt for problem in problems}) == len(ordinals)


def test_a_held_out_question_never_trains():
    # So few questions that without the hash both sides would share most of them.
    options = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    source = Gym("chain_sum", options, seed=1)
    held_out = {problem.prompt for problem in source.held_out(30)}
    drawn = {source.problem(ordinal).prompt for ordinal in range(600)}
    assert len(held_out) == 30
    assert len(drawn) > 60
    assert not held_out & drawn
    assert all(map(is_held_out, held_out))


def test_held_out_problems_are_the_same_for_every_seed():
    assert Gym("chain_sum", seed=1).held_out(5) == Gym("chain_sum", seed=2).held_out(5)


@pytest.mark.parametrize("dataset", ["chain_sum", "list_functions", "rearc", "word_sorting"])
def test_a_data_set_judges_its_own_answers_after_a_journey_through_json(dataset):
    reward = load_reward("gym")
    problem = Gym(dataset).problem(1)
    info = json.loads(json.dumps(problem.info))
    assert reward(problem.prompt, f"I think <answer>{problem.answer}</answer>", info) == 1.0
    assert reward(problem.prompt, problem.answer, info) == 1.0
    assert reward(problem.prompt, "<answer>no</answer>", info) < 0.5


def test_the_gym_reward_refuses_other_problems():
    with pytest.raises(ValueError, match="only problems of reasoning-gym"):
        load_reward("gym")("1+1=", "2", {})


def test_what_is_wrong_is_said_in_one_line():
    assert "did you mean 'chain_sum'?" in refusal("chainsum")
    assert "did you mean 'max_terms'?" in refusal("chain_sum", {"max_term": 3})
    assert "Offbeat sets this option itself" in refusal("chain_sum", {"seed": 3})
    assert "task.options of 'chain_sum': refused by reasoning-gym" in refusal("chain_sum", {"min_terms": -1})
    assert "task.options of 'chain_sum': refused by reasoning-gym" in refusal("chain_sum", {"min_terms": "two"})


def test_a_missing_package_names_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    assert "pip install 'offbeat[gym]'" in refusal("chain_sum")
