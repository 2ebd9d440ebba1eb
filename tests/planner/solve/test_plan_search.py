"""Fastest, cheapest and what lies between: by hand, by counting, and by what must never hurt."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from plan_instances import at_home, drawn, golden, is_plan, least_price, plans

from offbeat.planner.problem import Offer
from offbeat.planner.solve import bounds
from offbeat.planner.solve.check import check
from offbeat.planner.solve.program import Aim, ProgramAnswer, Status, highs, solve
from offbeat.planner.solve.search import cheapest, fastest
from offbeat.planner.solve.view import MICRO, view_of

EXACT = 1e-6


def rate_of(problem, **options):
    """Tokens a second; 0 where there is no plan."""
    result = fastest(problem, **options)
    return 0.0 if result.solution is None else result.tokens_per_s


def test_the_golden_instance_takes_39_and_a_half_seconds_because_of_the_in_flight_cap():
    plan = fastest(golden())
    assert plan.solution.tau_s == 39.5
    assert plan.solution.gang == "A x 2"
    assert plan.solution.replicas == {"on B": 8}
    assert plan.in_flight == 128


def test_without_the_cap_the_golden_instance_takes_its_gangs_34_seconds():
    assert fastest(golden(bound=20)).solution.tau_s == 34.0


@pytest.mark.parametrize(
    "tau_s, price, gang, num_replicas, mean_age",
    [(39.5, 40, "A x 2", 8, 2.0), (60, 24, "A x 1", 6, 1.5), (80, 20, "A x 1", 4, 1.0), (110, 12, "B x 2", 3, 0.75)],
)
def test_the_cheapest_golden_plans(tau_s, price, gang, num_replicas, mean_age):
    plan = cheapest(golden(), 120_000 / tau_s)
    assert plan.price_per_h == price
    assert price * MICRO * (1 - 1e-3) <= plan.certificate.price_cap + 1 <= price * MICRO
    assert (plan.solution.gang, plan.solution.replicas) == (gang, {"on B": num_replicas})
    assert plan.in_flight == mean_age * golden().demand.trajectories


def test_a_budget_that_pays_for_no_relay_still_gives_the_plan_that_needs_none():
    problem = drawn(57)
    for budget in (5.0, 10.0, 20.0, 40.0):
        exists = least_price(problem, 1e6)
        found = fastest(problem, budget)
        assert (found.solution is not None) == (exists is not None and exists <= budget)


def test_with_bound_0_generation_and_training_add_up_and_a_line_says_so():
    plan = fastest(golden(bound=0))
    assert plan.solution.tau_s == 92.0  # 60 s of training, 2 s blocked, 120,000 tokens by 4 replicas of 1,000 a second
    assert plan.note.startswith("max_staleness = 0: generation and training take turns on separate nodes")
    assert "\n" not in plan.note


def test_with_bound_0_shared_nodes_generate_what_disjoint_ones_cannot():
    problem = at_home(golden(bound=0))
    shared = fastest(problem)
    assert shared.solution.tau_s == 66.0  # 34 s of training on both nodes of A, 2 s, and 4 replicas there: 64 in flight
    assert shared.solution.nodes == {}
    assert shared.solution.replicas == {"on A at home": 4}
    assert shared.note.startswith("max_staleness = 0: generation and training take turns on the training nodes")
    assert check(problem, shared.solution, shared.certificate) == []


def test_replicas_share_no_nodes_where_memory_or_a_bound_forbids_it():
    apart, kept = fastest(golden(bound=0)), [replace(gang, kept_bytes={"A": 9.0}) for gang in golden().gangs]
    crowded = fastest(replace(at_home(golden(bound=0), room_bytes=8.0), gangs=tuple(kept)))
    assert crowded.solution == apart.solution
    assert crowded.note == apart.note
    roomy = fastest(replace(at_home(golden(bound=0), room_bytes=9.0), gangs=tuple(kept)))
    assert roomy.solution.tau_s == 66.0
    assert fastest(at_home(golden())).solution == fastest(golden()).solution


def test_a_slower_shape_that_needs_less_memory_is_kept_for_gangs_that_leave_little():
    problem = at_home(golden(bound=0), room_bytes=8.0)
    lean = [replace(one, name=f"{one.name}, lean", tokens_per_s=900.0, room_bytes=9.0) for one in problem.rollout[2:3]]
    gangs = tuple(replace(gang, kept_bytes={"A": 9.0}) for gang in problem.gangs)
    plan = fastest(replace(problem, rollout=(*problem.rollout, *lean), gangs=gangs))
    assert plan.solution.replicas == {"on A at home, lean": 4}


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10_000))
def test_the_bracket_holds_the_period_that_counting_finds(seed):
    problem = drawn(seed)
    result = fastest(problem)
    if result.solution is None:
        assert result.status is Status.INFEASIBLE
        assert least_price(problem, 1e6) is None
        return
    tau_s = result.solution.tau_s
    assert least_price(problem, tau_s) == pytest.approx(result.price_per_h, rel=1.1e-3)
    assert least_price(problem, result.tau_lo_s) is None
    assert tau_s <= result.tau_lo_s * (1 + 1.01e-3)


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10_000))
def test_a_fastest_plan_keeps_its_budget_and_has_least_in_flight_at_its_price(seed):
    problem = drawn(seed)
    free = fastest(problem)
    assume(free.solution is not None)
    budget = 0.8 * free.price_per_h
    result = fastest(problem, budget=budget)
    if result.solution is None:
        assert not any(p <= budget and is_plan(problem, g, c, 1e6) for g, c, p in plans(problem))
        return
    assert result.price_per_h <= budget
    assert check(problem, result.solution, result.certificate, budget) == []
    flights = [
        sum(num * column.concurrency for num, column in zip(counts, problem.rollout, strict=True))
        for gang, counts, price in plans(problem)
        if gang.name == result.solution.gang
        and price <= result.price_per_h
        and is_plan(problem, gang, counts, result.solution.tau_s)
    ]
    assert result.in_flight == min(flights)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10_000), st.floats(5.0, 80.0), st.floats(1.0, 3.0))
def test_who_has_a_plan_has_one_at_every_longer_period(seed, tau_s, factor):
    problem = drawn(seed)
    if cheapest(problem, problem.demand.tokens / tau_s).solution is not None:
        assert cheapest(problem, problem.demand.tokens / (tau_s * factor)).solution is not None


@pytest.mark.full
@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10_000))
def test_a_node_more_or_a_lower_price_never_hurts(seed):
    problem = drawn(seed)
    first = next(iter(problem.offers.values()))
    more = {**problem.offers, first.name: replace(first, num_nodes=first.num_nodes + 1)}
    lower = {**problem.offers, first.name: replace(first, node_price_per_h=first.node_price_per_h / 2)}
    before = rate_of(problem, gap=EXACT, budget=40.0) * (1 - 2 * EXACT)
    assert rate_of(replace(problem, offers=more), gap=EXACT, budget=40.0) >= before
    assert rate_of(replace(problem, offers=lower), gap=EXACT, budget=40.0) >= before


@pytest.mark.full
@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10_000))
def test_other_names_give_the_same_answer(seed):
    problem = drawn(seed)
    new = {name: f"z{9 - index}" for index, name in enumerate(problem.offers)}
    relabelled = replace(
        problem,
        offers={new[name]: replace(o, name=new[name]) for name, o in reversed(problem.offers.items())},
        rollout=tuple(
            replace(
                c,
                offer=new[c.offer],
                blocking_s={new[root]: s for root, s in c.blocking_s.items()},
                lag_s={new[root]: s for root, s in c.lag_s.items()},
                lag_over_s={
                    new[root]: {new[name]: s for name, s in over_s.items()} for root, over_s in c.lag_over_s.items()
                },
            )
            for c in reversed(problem.rollout)
        ),
        gangs=tuple(
            replace(
                g,
                nodes={new[name]: num for name, num in g.nodes.items()},
                root=new[g.root],
                kept_bytes={new[name]: kept for name, kept in g.kept_bytes.items()},
            )
            for g in reversed(problem.gangs)
        ),
    )
    one, other = fastest(problem), fastest(relabelled)
    assert (one.tau_lo_s, one.in_flight, one.status) == (other.tau_lo_s, other.in_flight, other.status)
    if one.solution is not None:
        assert (one.solution.tau_s, one.price_per_h) == (other.solution.tau_s, other.price_per_h)
        assert one.solution.replicas == other.solution.replicas


def test_a_class_split_in_two_gives_the_same_answer():
    whole = golden()
    on_b = whole.rollout[1]
    split = replace(
        whole,
        offers={"A": whole.offers["A"], "B": Offer("B", 2, 4, 4.0), "C": Offer("C", 1, 4, 4.0)},
        rollout=(*whole.rollout, replace(on_b, name="on C", offer="C")),
    )
    plan = fastest(split)
    assert plan.solution.tau_s == 39.5
    assert plan.price_per_h == 40
    assert check(split, plan.solution, plan.certificate) == []


def test_a_solver_out_of_time_leaves_a_wider_bracket_and_never_infeasible():
    def tired(model, gap, within_s):
        return ProgramAnswer(Status.UNKNOWN)

    nothing = fastest(golden(), solver=tired)
    assert nothing.status is Status.UNKNOWN
    assert nothing.tau_lo_s == pytest.approx(39.5, rel=1e-3)  # what duality proves needs no program
    assert cheapest(golden(), 2000.0, solver=tired).status is Status.UNKNOWN


def test_a_solver_that_tires_keeps_the_plan_that_it_found():
    calls = []

    def tiring(model, gap, within_s):
        calls.append(model)
        return highs(model, gap, within_s) if len(calls) < 3 else ProgramAnswer(Status.UNKNOWN)

    problem = drawn(11, num_classes=3)
    rested, tired = fastest(problem), fastest(problem, solver=tiring)
    assert tired.status is Status.FEASIBLE
    assert check(problem, tired.solution, tired.certificate) == []
    assert tired.tau_lo_s <= rested.solution.tau_s <= tired.solution.tau_s


@pytest.mark.parametrize("misled", ["by nothing", "by the worst of each class"])
def test_guesses_among_few_columns_never_decide_what_is_proven(monkeypatch, misled):
    def worst(view, tau_s, prices, gang):
        keep = {int(k): int(j) for j, k in enumerate(view.group)} if misled != "by nothing" else {}
        return np.array(sorted(keep.values()), dtype=int)

    monkeypatch.setattr(bounds, "likely", worst)
    for seed in range(12):
        problem = drawn(seed)
        result = fastest(problem)
        if result.solution is None:
            assert least_price(problem, 1e6) is None
            continue
        assert least_price(problem, result.solution.tau_s) == pytest.approx(result.price_per_h, rel=1.1e-3)
        assert least_price(problem, result.tau_lo_s) is None
        assert result.solution.tau_s <= result.tau_lo_s * (1 + 1.01e-3)


def test_the_likely_columns_are_the_best_of_their_class_and_few():
    problem = golden()
    on_a, on_b = problem.rollout
    many = [
        replace(one, name=f"{one.name} {num}", concurrency=num, tokens_per_s=one.tokens_per_s * num / (num + 10))
        for one in (on_a, on_b)
        for num in range(1, 20)
    ]
    view = view_of(replace(problem, rollout=tuple(many)))
    assert len(view.columns) == len(many)
    most = bounds.likely(view, 60.0, bounds.Multipliers(1.0, 0.0, 0.0), 0)
    assert [view.columns[j][0].concurrency for j in most] == [16, 17, 18, 19] * 2
    fewest = bounds.likely(view, 60.0, bounds.Multipliers(1e-9, 1.0, 0.0), 0)
    assert [view.columns[j][0].concurrency for j in fewest] == [1, 2, 3, 4] * 2


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10_000), st.floats(10.0, 90.0))
def test_no_plan_has_less_in_flight_than_its_relaxation(seed, tau_s):
    problem = drawn(seed)
    view = view_of(problem)
    for gang in range(len(view.gangs)):
        budget = 40 * MICRO
        relaxed = bounds.least_in_flight(view, tau_s, gang, budget)
        outcome = solve(view, tau_s, [gang], Aim.IN_FLIGHT, budget)
        if outcome.counts is not None:
            assert relaxed is not None
            assert view.in_flight(outcome.counts) >= relaxed[0] * (1 - 1e-6)
