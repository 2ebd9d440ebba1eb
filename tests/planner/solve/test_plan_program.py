"""The integer program at a fixed period, beside counting."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_instances import drawn, golden, least_price

from offbeat.planner.problem import Offer
from offbeat.planner.solve import bounds
from offbeat.planner.solve.program import Aim, ProgramAnswer, Status, highs, solve, with_whole_nodes
from offbeat.planner.solve.view import MICRO, ColumnCounts, restore, view_of


def every(view):
    return range(len(view.gangs))


@pytest.mark.parametrize("tau_s, price", [(39.5, 40), (60, 24), (80, 20), (110, 12)])
def test_the_golden_instance_costs_what_counting_says(tau_s, price):
    view = view_of(golden())
    outcome = solve(view, tau_s, every(view), gap=0.0)
    assert view.price(outcome.counts) == price * MICRO


def test_below_the_shortest_period_there_is_no_plan():
    view = view_of(golden())
    assert solve(view, 39.4999, every(view)).status is Status.INFEASIBLE


def test_a_budget_is_a_row():
    view = view_of(golden())
    assert solve(view, 60.0, every(view), budget=24 * MICRO).status is Status.FEASIBLE
    assert solve(view, 60.0, every(view), budget=24 * MICRO - 10_000).status is Status.INFEASIBLE


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from([8.5, 15.0, 25.0, 45.0, 90.0]))
def test_all_gangs_in_one_program_cost_what_counting_says(seed, tau_s):
    problem = drawn(seed)
    view = view_of(problem)
    outcome = solve(view, tau_s, every(view), gap=0.0)
    wanted = least_price(problem, tau_s)
    found = None if outcome.counts is None else view.price(outcome.counts) / MICRO
    assert found == wanted
    assert outcome.status is (Status.INFEASIBLE if wanted is None else Status.FEASIBLE)


def test_three_classes_of_four_nodes_cost_what_counting_says():
    for seed in range(3):
        problem = drawn(seed, num_classes=3, max_nodes=2)
        view = view_of(problem)
        outcome = solve(view, 40.0, every(view), gap=0.0)
        found = None if outcome.counts is None else view.price(outcome.counts) / MICRO
        assert found == least_price(problem, 40.0)


def test_coefficients_lie_within_three_orders_of_one():
    view, seen = view_of(golden()), []

    def look(model, gap, within_s):
        seen.append(model)
        return ProgramAnswer(Status.UNKNOWN)

    solve(view, 60.0, [1], Aim.PRICE, budget=40 * MICRO, solver=look)
    values = np.abs(seen[0].rows.data[seen[0].rows.data != 0])
    assert 1e-3 <= values.min() <= values.max() <= 1e3


def test_an_answer_that_holds_only_within_the_tolerance_is_not_called_feasible():
    view = view_of(golden())

    def sloppy(model, gap, within_s):
        x = np.zeros(len(model.cost))
        x[0], x[1] = 1, 7  # one replica less than a period of 39.5 s asks for
        return ProgramAnswer(Status.FEASIBLE, x, 0.0)

    assert solve(view, 39.5, [0], solver=sloppy).status is Status.UNKNOWN


def test_a_solver_out_of_time_is_unknown():
    view = view_of(golden())
    outcome = solve(view, 60.0, every(view), solver=lambda *_: ProgramAnswer(Status.UNKNOWN, None, 20.0))
    assert outcome.status is Status.UNKNOWN
    assert outcome.counts is None


def test_replicas_of_sizes_that_do_not_divide_one_another_are_refused():
    problem = golden()
    offers = {**problem.offers, "A": Offer("A", 2, 5, 16.0)}
    columns = (*problem.rollout, problem.rollout[0].__class__("odd", "A", 3, 3, 16, 900.0, 0.01, {"A": 2.0, "B": 2.0}))
    with pytest.raises(ValueError, match="3 does not divide 5, so a replica could be split"):
        view_of(problem.__class__(offers, columns, problem.gangs, problem.demand))


def test_a_merged_class_is_told_apart_again():
    problem = golden()
    b, on_b = problem.offers["B"], problem.rollout[1]
    offers = {"A": problem.offers["A"], "B": Offer("B", 1, 4, 4.0), "B2": Offer("B2", 2, b.per_node, 4.0)}
    columns = (*problem.rollout, on_b.__class__("on B2", "B2", 1, 1, 16, 400.0, 0.01, {"A": 2.0, "B": 2.0}))
    view = view_of(problem.__class__(offers, columns, problem.gangs[:2], problem.demand))
    assert ("B", "B2") in view.offers
    solution = restore(view, ColumnCounts(0, (7, 0)), 50.0)
    assert solution.replicas == {"on B": 4, "on B2": 3}
    assert solution.nodes == {"B": 1, "B2": 1}


def test_among_chosen_columns_a_plan_uses_no_other():
    view = view_of(golden())
    whole = solve(view, 60.0, every(view))
    for j in range(len(view.columns)):
        found = solve(view, 60.0, every(view), among=np.array([j])).counts
        if found is not None:
            assert [i for i, count in enumerate(found.replicas) if count] == [j]
            assert view.price(found) >= view.price(whole.counts)
    assert solve(view, 60.0, every(view), among=np.array([], dtype=int)).counts is None


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from([8.5, 15.0, 25.0, 45.0, 90.0]))
def test_whole_nodes_with_parts_of_replicas_rule_out_no_plan_and_cost_no_more(seed, tau_s):
    problem = drawn(seed)
    view = view_of(problem)
    for gang in every(view):
        wanted = least_price(replace(problem, gangs=(view.gangs[gang],)), tau_s)
        relaxed = with_whole_nodes(view, tau_s, gang, Aim.PRICE, None, 1e-3, 5.0, highs)
        if wanted is None:
            continue
        assert relaxed.status is Status.FEASIBLE
        assert relaxed.bound <= wanted * MICRO * (1 + 1e-9) + 1
        assert relaxed.shortest_s <= tau_s


def many_shapes(num: int):
    """The golden instance with `num` shapes for each class, whose rates grow less and less with what is in flight."""
    problem = golden()
    rollout = tuple(
        replace(one, name=f"{one.name} {rows}", concurrency=rows, tokens_per_s=one.tokens_per_s * rows / (16 + rows))
        for one in problem.rollout
        for rows in range(1, num + 1)
    )
    return replace(problem, rollout=rollout)


def test_few_shapes_stand_for_hundreds():
    view = view_of(many_shapes(300))
    few, factor = bounds.envelope(view, 60.0, 0, 1e-3)
    assert len(few) < len(view.columns) / 4
    assert factor <= 1.001
    tokens = view.tokens(60.0, np.array([0]))[0]
    for j in range(len(view.columns)):
        mine = [i for i in few if view.group[i] == view.group[j]]
        most = np.interp(view.concurrency[j], [0, *view.concurrency[mine]], [0, *(factor * tokens[i] for i in mine)])
        assert tokens[j] <= most * (1 + 1e-12)


def test_a_class_that_must_generate_has_a_replica_on_each_node_that_it_must_use():
    free, forced = golden(), golden()
    forced = replace(forced, offers={**forced.offers, "A": replace(forced.offers["A"], least_generating=1)})
    for problem, generates in ((free, False), (forced, True)):
        view = view_of(problem)
        gang = next(s for s in every(view) if view.gangs[s].name == "A x 1")
        chosen = restore(view, solve(view, 60.0, [gang], gap=0.0).counts, 60.0)
        assert bool(chosen.nodes.get("A")) is generates
