"""How late a version may be: the age window, and ways over a third class."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from plan_instances import drawn, golden, least_price

from offbeat.planner.problem import Gang, Offer, PlanningProblem
from offbeat.planner.solve.check import check
from offbeat.planner.solve.search import fastest
from offbeat.planner.solve.view import lags_of, view_of


@pytest.mark.parametrize(("bound", "age_guard"), [(1, 0.5), (1, 1.0), (3, 0.5), (3, 1.0)])
def test_the_age_window_is_what_a_timeline_of_steps_leaves(bound, age_guard):
    problem = golden(bound=bound, age_guard=age_guard, tail_tokens=20_000.0)
    problem = replace(problem, rollout=tuple(replace(column, lag_s={"A": 7.0}) for column in problem.rollout))
    solution = fastest(problem).solution
    tau_s, trained_s = solution.tau_s, next(gang.period_s for gang in problem.gangs if gang.name == solution.gang)
    arrivals_s = [step * tau_s + trained_s + 7.0 for step in range(50)]  # of version step + 1
    left_s = []
    for tick in range(1_000):
        begun_s = (20 + tick / 1_000) * tau_s
        version = sum(at_s <= begun_s for at_s in arrivals_s)
        left_s.append((version + bound) * tau_s - begun_s)  # the last step that may train on it starts then
    expected = min(left_s) if age_guard == 1 else sum(left_s) / len(left_s)
    assert expected == pytest.approx(20_000 * 0.01, rel=2e-3)


def test_a_class_that_versions_reach_late_waits_for_its_own_window_alone():
    problem = golden(tail_tokens=1_000.0)
    on_a, on_b = problem.rollout
    late_a = replace(problem, rollout=(replace(on_a, lag_s={"A": 1_000.0, "B": 1_000.0}), on_b))
    assert fastest(late_a).solution.tau_s == 39.5
    late_b = replace(problem, rollout=(on_a, replace(on_b, lag_s={"A": 60.0})))
    assert fastest(late_b).solution.tau_s == pytest.approx((1_000 * 0.01 + 60 + 34) / (2 + 0.5))
    from_elsewhere = replace(problem, rollout=(on_a, replace(on_b, lag_s={"B": 60.0})))
    assert fastest(from_elsewhere).solution.tau_s == 39.5


@pytest.mark.parametrize("names", [("first", "second"), ("second", "first")])
def test_of_gangs_that_differ_in_who_publishes_the_nearer_is_kept_whatever_they_are_called(names):
    problem = golden(tail_tokens=1_000.0)
    gang = problem.gangs[0]
    near, far = (replace(gang, name=name, root=root) for name, root in zip(names, ("A", "B"), strict=True))
    late = tuple(replace(column, lag_s={"A": 1.0, "B": 2.0}) for column in problem.rollout)
    view = view_of(replace(problem, gangs=(near, far), rollout=late))
    assert [kept.root for kept in view.gangs] == ["A"]


def far_away(*, generates: bool, **demand) -> PlanningProblem:
    """The golden instance with B too far from A, and a node of a third class, C, between them."""
    problem = golden(**({"bound": 20, "tail_tokens": 1_000.0} | demand))
    on_a, on_b = problem.rollout
    on_b = replace(on_b, lag_s={"A": 700.0}, lag_over_s={"A": {"C": 600.0}})  # 653 s are left at 34 s a period
    on_c = replace(on_b, name="on C", offer="C", tokens_per_s=1.0, concurrency=1, lag_s={"A": 5.0}, lag_over_s={})
    offers = {**problem.offers, "C": Offer("C", 1, 4, 2.0)}
    return replace(problem, offers=offers, rollout=(on_a, on_b, on_c) if generates else (on_a, on_b))


def test_a_class_that_is_far_gets_versions_over_one_that_generates_in_between():
    problem = far_away(generates=True)
    plan = fastest(problem)
    assert (plan.solution.tau_s, plan.solution.gang) == (34.0, "A x 2")
    assert plan.solution.replicas == {"on B": 10, "on C": 1}
    assert check(problem, plan.solution) == []
    without = replace(plan.solution, replicas={"on B": 10})
    assert [line.split(":")[0] for line in check(problem, without)] == ["age window"]


def test_a_class_that_passes_nothing_on_while_it_does_nothing():
    alone = fastest(far_away(generates=False))
    assert alone.solution.tau_s == pytest.approx((10 + 700 + 34) / 20.5)


def test_a_gangs_own_class_passes_versions_on():
    problem = far_away(generates=False)
    longer = Gang("A and C", {"A": 2, "C": 1}, "A", 35.0, 0.0)
    plan = fastest(replace(problem, gangs=(*problem.gangs, longer)))
    assert (plan.solution.tau_s, plan.solution.gang) == (35.0, "A and C")
    assert set(plan.solution.replicas) == {"on B"}


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000).map(lambda number: 2 * number + 1))  # odd ones have ways over other classes
def test_with_three_classes_the_bracket_holds_the_period_that_counting_finds(seed):
    problem = drawn(seed, num_classes=3, max_nodes=1)
    found = fastest(problem)
    assume(found.solution is not None)
    assert check(problem, found.solution, found.certificate) == []
    assert least_price(problem, found.solution.tau_s) is not None
    assert least_price(problem, found.tau_lo_s * (1 - 1e-6)) is None


@given(st.integers(0, 10_000), st.sets(st.sampled_from(["c0", "c1", "c2"])))
def test_lags_of_all_columns_are_those_of_each(seed, over):
    columns = drawn(2 * seed + 1, num_classes=3).rollout
    for root in ("c0", "c1", "c2"):
        each = [column.lag_from_s(root, over) for column in columns]
        assert np.array_equal(lags_of(columns, [root]).of(root, over), each)
