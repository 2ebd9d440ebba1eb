import functools

import pytest

from offbeat.errors import UserError
from offbeat.locate import accepted_arguments, is_async, locate, one_line

OFFERED = ("response", "answer", "info")


def refusal(call, *arguments):
    with pytest.raises(UserError) as caught:
        call(*arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_function_is_found_in_a_file_beside_what_it_imports(tmp_path):
    (tmp_path / "helper_of_locate_test.py").write_text("BONUS = 2\n")
    (tmp_path / "json.py").write_text(
        "from dataclasses import dataclass\nfrom helper_of_locate_test import BONUS\n\n"
        "@dataclass\nclass Pair:\n    a: 'int'\n\ndef judge(response):\n    return BONUS\n"
    )
    assert locate(f"{tmp_path}/json.py:judge", "task.reward")("x") == 2
    import json

    assert json.loads("1") == 1


def test_a_function_is_found_in_a_module_here(tmp_path, monkeypatch):
    (tmp_path / "module_of_locate_test.py").write_text("def judge(response):\n    return 1.0\n")
    monkeypatch.chdir(tmp_path)
    assert locate("module_of_locate_test:judge", "task.reward")("x") == 1.0


def test_what_is_not_there_is_named_with_its_nearest_spelling(tmp_path):
    (tmp_path / "rewards.py").write_text("def judge(response):\n    return 1.0\n")
    assert "did you mean 'rewards.py'?" in refusal(locate, f"{tmp_path}/reward.py:judge", "task.reward")
    assert "did you mean 'judge'?" in refusal(locate, f"{tmp_path}/rewards.py:jugde", "task.reward")
    assert "write module:function or file.py:function" in refusal(locate, "rewards.py", "task.path")
    assert "there is no module 'no_such_module'" in refusal(locate, "no_such_module:judge", "task.path")


def test_a_file_that_does_not_import_is_the_users_to_mend(tmp_path):
    (tmp_path / "needy.py").write_text("import a_package_that_is_missing\n")
    (tmp_path / "values.py").write_text("judge = 3\n")
    missing = refusal(locate, f"{tmp_path}/needy.py:judge", "task.reward")
    assert "No module named 'a_package_that_is_missing' (needy.py:1)" in missing
    assert "judge is an int, not a function" in refusal(locate, f"{tmp_path}/values.py:judge", "task.reward")


@pytest.mark.parametrize(
    "file, place",
    [
        ("/tmp/ipykernel_4711/2610492169.py", "notebook cell, line 1"),
        ("<ipython-input-4-2f1d9a>", "notebook cell [4], line 1"),
        ("/home/me/rewards.py", "rewards.py:1"),
    ],
)
def test_an_error_in_a_notebook_is_placed_by_its_cell_and_line(file, place):
    with pytest.raises(ZeroDivisionError) as caught:
        exec(compile("1 / 0", file, "exec"))
    assert one_line(caught.value) == f"ZeroDivisionError: division by zero ({place})"
    with pytest.raises(SyntaxError) as broken:
        compile("1 +", file, "exec")
    assert one_line(broken.value) == f"SyntaxError: invalid syntax ({place})"


def test_arguments_are_those_that_the_parameters_name():
    assert accepted_arguments(lambda answer, response: 0, OFFERED, "f") == ("response", "answer")
    assert accepted_arguments(lambda **kwargs: 0, OFFERED, "f") == OFFERED
    assert accepted_arguments(lambda response, strictness=3: 0, OFFERED, "f") == ("response",)
    assert accepted_arguments(functools.partial(lambda response, k: 0, k=1), OFFERED, "f") == ("response",)


def test_a_parameter_that_nobody_fills_is_a_mistake():
    assert "did you mean 'response'?" in refusal(accepted_arguments, lambda respones: 0, OFFERED, "f")
    assert "positional-only" in refusal(accepted_arguments, lambda response, /: 0, OFFERED, "f")
    assert "must include at least one of" in refusal(accepted_arguments, lambda: 0, OFFERED, "f")


def test_async_functions_and_objects_are_recognised():
    class Judge:
        async def __call__(self, response):
            return 1.0

    async def judge(response):
        return 1.0

    assert is_async(judge)
    assert is_async(Judge())
    assert not is_async(lambda response: 0)
