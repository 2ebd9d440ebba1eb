import pytest

from offbeat.data.function import FunctionSource
from offbeat.data.prompts import Problem
from offbeat.errors import UserError


def refusal(function, ordinal=0):
    with pytest.raises(UserError) as caught:
        FunctionSource(function).problem(ordinal)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def squares(ordinal, seed, held_out):
    if held_out and ordinal >= 3:
        return None
    return {"prompt": f"{ordinal}*{ordinal}=", "answer": ordinal**2, "info": {"seed": seed, "held_out": held_out}}


def test_a_function_is_a_source():
    source = FunctionSource(squares, seed=4)
    assert source.name == "squares"
    assert source.problem(5) == Problem("5*5=", "25", {"seed": 4, "held_out": False})
    assert [problem.answer for problem in source.held_out(10)] == ["0", "1", "4"]
    assert len(source.held_out(2)) == 2


def test_a_function_in_a_file_takes_what_it_names(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("def pose(ordinal):\n    return {'prompt': [{'role': 'user', 'content': str(ordinal)}]}\n")
    source = FunctionSource(f"{file}:pose")
    assert source.name == "pose"
    assert source.problem(3).prompt == [{"role": "user", "content": "3"}]
    assert source.held_out(5) == []


def test_what_a_function_does_wrong_is_one_line():
    def broken(ordinal):
        return [][ordinal]

    assert "problem 2: the function raised IndexError: list index out of range (test_function_source.py:" in refusal(
        broken, 2
    )
    assert "return a problem for each ordinal" in refusal(lambda ordinal: None)
    assert "the result is 'x', a str; return a dict" in refusal(lambda ordinal: "x")
    assert "unknown key 'promt'; did you mean 'prompt'?" in refusal(lambda ordinal: {"promt": "x"})
    assert "prompt is None, a NoneType" in refusal(lambda ordinal: {"answer": "x"})
    assert "needs role and content" in refusal(lambda ordinal: {"prompt": ["x"]})
    assert "info is 3, an int" in refusal(lambda ordinal: {"prompt": "x", "info": 3})
    assert "no argument is passed for parameter 'index'" in refusal(lambda index: {"prompt": "x"})
