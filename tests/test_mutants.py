"""Deliberate breaks: each is one change that compiles, drawn evenly and again by its seed."""

from pathlib import Path

import pytest

from scripts.mutants import ROOT, SOURCE, Hunt, Mutant, draw, mutants_of, near_tests

TEXT = """
def f(a, b):
    if not a or b < 3:
        raise ValueError(f"{a + b}: wrong")
    a += b
    print("é", a - 1)
    crash_here("x")
    return a if b else None
"""


def test_each_change_is_one_of_its_kind_and_compiles():
    found = [*mutants_of(Path("x.py"), TEXT)]
    for mutant in found:
        compile(mutant.text, "x.py", "exec")
        assert mutant.text != TEXT
        assert mutant.function == "f"
    assert sorted((mutant.before, mutant.after) for mutant in found) == sorted(
        [
            ("not a or b < 3", "not a"),
            ("not a or b < 3", "not a and b < 3"),
            ("not a", "a"),
            ("b < 3", "b <= 3"),
            ("3", "4"),
            ("a += b", "pass"),
            ('print("é", a - 1)', "pass"),
            ("a - 1", "a + 1"),
            ("1", "2"),
            ("return a if b else None", "return None"),
            ("a if b else None", "a"),
            ("a if b else None", "None"),
        ]
    ), "errors and crash points are spared"


@pytest.mark.full
def test_a_seed_draws_the_same_changes_of_all_packages_and_each_has_tests_nearby():
    drawn = draw(1, 40)
    assert drawn == draw(1, 40) != draw(2, 40)
    assert len({(mutant.module, mutant.function) for mutant in drawn}) == 40
    assert len({mutant.module.parts[0] for mutant in drawn if len(mutant.module.parts) > 1}) > 15
    assert all(near_tests(mutant.module) for mutant in drawn)
    for mutant in drawn:
        compile(mutant.text, str(mutant.module), "exec")


@pytest.mark.full
def test_a_break_is_caught_by_the_tests_that_it_fails_and_no_break_by_none():
    module = Path("net.py")
    text = (ROOT / SOURCE / module).read_text()
    (broken,) = (mutant for mutant in mutants_of(module, text) if mutant.after == "start > stop")
    caught = Hunt().caught_by(broken, near_tests(module))
    assert caught == ["tests/test_net.py::test_a_range_names_the_bytes_that_the_standard_says"]
    assert Hunt().caught_by(Mutant(module, "f", 1, "", "", text), near_tests(module)) == []
