import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.data.arithmetic import Arithmetic, is_held_out, last_number, worked_answer
from offbeat.rewards.verifiers import number


@given(st.integers(1, 5), st.floats(0, 1), st.integers(0, 10**6))
def test_the_reward_accepts_the_worked_answer_and_no_other(level, tail, ordinal):
    problem = Arithmetic(level=level, tail=tail).problem(ordinal)
    worked = worked_answer(problem.prompt)
    assert number(worked, problem.answer) == 1.0
    assert number(worked + "1", problem.answer) == 0.0


@pytest.mark.parametrize("level", [1, 3])
def test_held_out_problems_never_train(level):
    source = Arithmetic(level=level, tail=0.3)
    assert not any(is_held_out(source.problem(ordinal).prompt) for ordinal in range(500))
    held_out = [problem.prompt for problem in source.held_out(50)]
    assert held_out
    assert all(map(is_held_out, held_out))
    assert len(set(held_out)) == len(held_out)


@given(st.integers(1, 5), st.floats(0, 1), st.integers(0, 10**6))
def test_the_answer_is_the_value_of_the_prompt(level, tail, ordinal):
    problem = Arithmetic(level=level, tail=tail).problem(ordinal)
    assert problem.answer == str(eval(problem.prompt.rstrip("=")))


@pytest.mark.parametrize(("prompt", "worked"), [("3+4+5=", "7 12"), ("7*3=", "1:7 2:14 3:21")])
def test_an_answer_is_worked_out_step_by_step(prompt, worked):
    assert worked_answer(prompt) == worked


@pytest.mark.parametrize(("text", "number"), [("1:7 2:14", "14"), ("so 42 \n", "42"), ("42 apples", None), ("", None)])
def test_an_answer_is_the_number_that_a_text_ends_with(text, number):
    assert last_number(text) == number
