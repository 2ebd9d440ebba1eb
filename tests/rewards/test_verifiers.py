import sys
from decimal import Decimal

import pytest

from offbeat.errors import UserError
from offbeat.rewards.verifiers import exact, final_answer, last_number, load_reward, number


def test_exact_looks_past_blanks_at_both_ends_only():
    assert exact(" a b\n", "a b") == 1.0
    assert exact("a  b", "a b") == 0.0


@pytest.mark.parametrize(
    "text, found",
    [
        ("85 91", "91"),
        ("1:7 2:14", "14"),
        ("The answer is 42.", "42"),
        ("it costs $1,234.50 in all", "1234.50"),
        ("1,2,3", "3"),
        ("3 - -7", "-7"),
        ("10-5", "5"),
        ("x = -2", "-2"),
        ("about 1.5e3", "1.5e3"),
        ("9" * 5000, "9" * 5000),
        ("none", None),
    ],
)
def test_the_last_number_of_a_text(text, found):
    assert last_number(text) == (None if found is None else Decimal(found))


def test_number_compares_values_not_spelling():
    assert number("so 91.0", "91") == 1.0
    assert number("91 and 92", "91") == 0.0
    assert number("no idea", "91") == 0.0


def test_a_missing_or_unreadable_answer_is_a_failure_and_not_reward_0():
    with pytest.raises(ValueError, match="needs an answer"):
        exact("x", None)
    with pytest.raises(ValueError, match="needs a number in the problem's answer"):
        number("1", "one")
    with pytest.raises(ValueError, match="needs an answer"):
        number("1", None)


def test_math_sees_through_notation():
    math = load_reward("math")
    assert math("The result is $\\frac{2}{4}$", "1/2") == 1.0
    assert math("so it is \\boxed{x^2+2x+1}", "$(x+1)^2$") == 1.0
    assert math("I get 0.25", "\\frac{1}{2}") == 0.0
    assert math("", "\\frac{1}{2}") == 0.0


def test_a_missing_package_names_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(UserError, match=r"pip install 'offbeat\[math\]'"):
        load_reward("math")


def test_a_parser_that_reads_no_latex_is_told_before_every_answer_is_wrong(monkeypatch):
    class Plain:
        @staticmethod
        def parse(text, **_):
            return [] if "frac" in text else [text]

        @staticmethod
        def verify(gold, found, **_):
            return bool(gold) and gold == found

    monkeypatch.setitem(sys.modules, "math_verify", Plain)
    with pytest.raises(UserError, match="math-verify cannot read LaTeX here"):
        load_reward("math")


def test_an_unknown_reward_gets_the_nearest_spelling_or_the_list():
    with pytest.raises(UserError, match="did you mean 'exact'"):
        load_reward("exactly")
    with pytest.raises(UserError, match="there are exact, number, math, gym"):
        load_reward("zzz")


def test_the_last_pair_of_tags_holds_the_final_answer():
    assert final_answer("<answer>1</answer> no, <answer>\n2 </answer> done") == "2"
    assert final_answer(" 3 \n") == "3"
    assert final_answer("<answer>4") == "<answer>4"
