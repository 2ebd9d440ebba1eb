"""Which modules of the full tier continuous integration runs: those of what changed, within a budget, and a tenth."""

from xml.etree import ElementTree

import pytest

from scripts.full_tier import UNKNOWN_S, Run, choose, in_turn, modules_here, packages_touched, passed

MODULES = [
    f"tests/{package}/test_{name}.py" for package in ("faults", "weights", "planner", "docs") for name in "abcde"
]
SAME_DAY = {module: Run("2026-01-05", 10.0) for module in MODULES}


@pytest.mark.parametrize(
    "file, packages",
    [
        ("src/offbeat/weights/codec.py", {"weights", "faults"}),
        ("src/offbeat/coordinator/api/app.py", {"coordinator", "faults"}),
        ("src/offbeat/planner/cost/sync_time.py", {"planner"}),
        ("src/offbeat/testing/crash_points.py", {"testing", "faults"}),
        ("tests/weights/test_codec.py", {"weights"}),
        ("tests/full_tier.json", set()),
        ("benchmarks/wan/swarms.py", {"benchmarks"}),
        ("docs/swarm.md", {"docs"}),
        ("examples/swarm.toml", {"docs"}),
        ("README.md", {"docs"}),
        ("LICENSE", set()),
    ],
)
def test_a_changed_file_touches_its_package_and_whole_runs_where_it_takes_part_in_them(file, packages):
    assert packages_touched([file]) == packages


def test_modules_of_touched_packages_are_chosen_and_a_tenth_of_the_others_waits_no_longer():
    changed, left_out, tenth = choose(MODULES, SAME_DAY, {"weights"}, "c1")
    assert sorted(changed) == [module for module in MODULES if "/weights/" in module]
    assert left_out == []
    assert len(tenth) == 2
    assert not set(tenth) & set(changed)


def test_the_tenth_is_of_those_that_have_waited_longest():
    older = {**SAME_DAY, MODULES[7]: Run("2026-01-03", 10.0), MODULES[3]: Run("2026-01-04", 10.0)}
    assert choose(MODULES, older, set(), "c1")[2] == [MODULES[7], MODULES[3]]
    new = "tests/faults/test_new.py"
    assert choose([*MODULES, new], older, set(), "c1")[2][0] == new


def test_the_tenth_is_one_of_time_and_at_least_one_module():
    quick = {module: Run("2026-01-05", 1.0) for module in MODULES} | {MODULES[0]: Run("2026-01-04", 500.0)}
    assert choose(MODULES, quick, set(), "c1")[2] == [MODULES[0]]


def test_what_exceeds_the_budget_is_named_and_those_that_have_waited_longest_stay():
    older = {**SAME_DAY, MODULES[4]: Run("2026-01-01", 10.0), MODULES[2]: Run("2026-01-02", 10.0)}
    changed, left_out, _ = choose(MODULES, older, {"faults"}, "c1", budget_s=10.0)
    assert changed == [MODULES[4], MODULES[2]]
    assert sorted(left_out) == [MODULES[0], MODULES[1], MODULES[3]]


def test_a_module_that_was_never_recorded_counts_for_a_minute():
    new = "tests/faults/test_new.py"
    assert choose([new], {}, {"faults"}, "c1", budget_s=UNKNOWN_S / 2)[0] == [new]
    assert choose([new], {}, {"faults"}, "c1", budget_s=UNKNOWN_S / 2 - 1)[1] == [new]


def test_modules_of_one_date_take_turns_by_the_commit_and_one_commit_always_chooses_the_same():
    orders = {commit: in_turn(MODULES, SAME_DAY, commit) for commit in ("c1", "c2", "c3")}
    assert len({tuple(order) for order in orders.values()}) == 3
    assert in_turn(reversed(MODULES), SAME_DAY, "c1") == orders["c1"]


def test_only_modules_whose_long_tests_all_passed_count_as_run():
    def case(module, seconds, ending="", is_full=True):
        tier = f'<properties><property name="full" value="{module}"/></properties>' if is_full else ""
        return f'<testcase time="{seconds}">{tier}{ending}</testcase>'

    cases = [
        case("a", 1.5),
        case("a", 2, "<skipped/>"),
        case("b", 1),
        case("b", 1, "<failure/>"),
        case("c", 1, "<error/>"),
    ]
    results = ElementTree.fromstring(f"<testsuites>{''.join(cases)}{case('a', 9, is_full=False)}</testsuites>")
    assert passed(results) == {"a": 3.5}


def test_the_modules_here_are_those_with_the_marker():
    assert "tests/faults/test_crash_points.py" in modules_here()
    assert "tests/test_locate.py" not in modules_here()
