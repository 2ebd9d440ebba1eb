"""The checker accepts plans and names each row that is broken."""

from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from plan_instances import at_home, drawn, golden

from offbeat.planner.solve.bounds import Multipliers
from offbeat.planner.solve.check import (
    _age_rows,
    _best_in_turn,
    _Floats,
    _ladders,
    _lost_s,
    _memory_rows,
    check,
    unproven,
)
from offbeat.planner.solve.search import cheapest, fastest


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10_000))
def test_every_plan_and_its_certificate_are_accepted(seed):
    problem = drawn(seed)
    plan = fastest(problem)
    assume(plan.solution is not None)
    assert check(problem, plan.solution, plan.certificate) == []
    cheap = cheapest(problem, plan.tokens_per_s / 2)
    assert check(problem, cheap.solution, cheap.certificate) == []


@pytest.mark.parametrize(
    "row, change",
    [
        ("gang", {"gang": "B x 3"}),
        ("tokens", {"replicas": {"on B": 7}}),
        ("tokens", {"tau_s": 39.499999999}),
        ("hardware", {"nodes": {"B": 1}}),
        ("hardware", {"nodes": {"B": 4}}),
        ("in flight", {"replicas": {"on B": 9}, "nodes": {"B": 3}}),
        ("names", {"replicas": {"on C": 8}}),
        ("counts", {"replicas": {"on B": 8.5}}),
        ("budget", {"nodes": {"B": 3}}),
    ],
)
def test_a_broken_row_is_named(row, change):
    plan = fastest(golden())
    broken = check(golden(), replace(plan.solution, **change), budget=40.0)
    assert any(line.startswith(row) for line in broken)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10_000))
def test_an_accelerator_is_worth_the_most_of_all_columns_that_are_done_in_time(seed):
    problem = drawn(seed)
    assume(problem.demand.bound and problem.gangs and problem.rollout)
    gang, tau, nu, lam = problem.gangs[0], Fraction(100), Fraction(1, 7), Fraction(1, 1000)
    for (offer, is_home), (times, worths) in _ladders(problem, gang, tau, nu, lam).items():
        columns = [c for c in problem.rollout if c.offer == offer and (c.room_bytes is not None) == is_home]
        assert len(times) == len(worths) == len(columns)
        assert times == sorted(times)
        assert worths == sorted(worths)
        values = {
            (nu * Fraction(c.tokens_per_s) * max(tau - _lost_s(problem, gang, c), Fraction(0)) - lam * c.concurrency)
            / c.num_accelerators
            for c in columns
        }
        assert worths[-1] == max(values)


@pytest.mark.parametrize(
    "row, demand",
    [("age window", {"tail_tokens": 10_000.0}), ("reward", {"reward_rate": 1.0}), ("in flight", {"queue": 1.0})],
)
def test_a_row_that_the_demand_tightens_is_named(row, demand):
    plan = fastest(golden())
    assert [line.split(":")[0] for line in check(golden(**demand), plan.solution)] == [row]


def test_what_shares_the_gangs_nodes_is_held_to_their_room_and_memory_and_to_bound_0():
    problem = at_home(golden(bound=0), room_bytes=8.0)
    plan = fastest(problem)
    assert plan.solution.replicas == {"on A at home": 4}

    def broken(problem, **changes):
        return {line.split(":")[0] for line in check(problem, replace(plan.solution, **changes))}

    assert broken(problem) == set()
    assert "hardware" in broken(problem, replicas={"on A at home": 9})
    assert "hardware" in broken(problem, replicas={"on B at home": 4})
    for kept, rows in ((8.0, set()), (9.0, {"memory"})):
        gangs = tuple(replace(gang, kept_bytes={"A": kept}) for gang in problem.gangs)
        assert broken(replace(problem, gangs=gangs)) == rows
    assert "hardware" in broken(replace(problem, demand=replace(problem.demand, bound=2)))


def test_a_column_that_a_version_reaches_too_late_is_named():
    problem = golden(tail_tokens=1_000.0)
    plan = fastest(problem)
    on_a, on_b = problem.rollout
    for lag_s, broken in ((54.0, []), (55.0, ["age window"])):  # 2.5 x 39.5 less 34 of training and 10 of tail
        late = replace(problem, rollout=(on_a, replace(on_b, lag_s={"A": lag_s, "B": 1_000.0})))
        assert [line.split(":")[0] for line in check(late, plan.solution)] == broken


def test_prices_alone_prove_the_golden_period_without_a_solvers_word():
    plan = fastest(golden())
    assert plan.certificate.by_solver == ()
    assert unproven(golden(), plan.certificate) == set()


def test_a_certificate_that_proves_nothing_is_refused():
    plan = fastest(golden())
    for empty in ((), (Multipliers(-1.0, -1.0, 0.0),), (Multipliers(1.0, 0.0, 0.0),)):
        broken = check(golden(), plan.solution, replace(plan.certificate, prices=empty))
        assert "certificate: its proof does not rule out a better plan with gang A x 2" in broken


def test_a_certificate_of_other_columns_is_refused():
    plan = fastest(golden())
    broken = check(replace(golden(), fixed_price_per_h=1.0), plan.solution, plan.certificate)
    assert any("it is for another problem" in line for line in broken)


def test_a_certificate_that_forbids_its_own_plan_is_refused():
    plan = fastest(golden())
    broken = check(golden(), plan.solution, replace(plan.certificate, tau_lo_s=40.0))
    assert any("claims that no period is below 40 s" in line for line in broken)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10_000))
def test_taking_turns_the_most_valuable_column_is_found_without_computing_all_exactly(seed):
    problem = drawn(seed)
    problem = replace(problem, demand=replace(problem.demand, bound=0))
    assume(problem.gangs and problem.rollout)
    gang, prices = problem.gangs[0], Multipliers(1 / 7, 1 / 1000, 0.0)
    tau_s = gang.period_s * 3
    tau, nu, lam = Fraction(tau_s), Fraction(prices.nu), Fraction(prices.lam)
    among = _Floats.of(problem, [gang]).by_worth(gang, tau_s, prices)
    found = _best_in_turn(problem, gang, tau, nu, lam, among)
    for place in among:
        values = [
            (nu * Fraction(c.tokens_per_s) * max(tau - _lost_s(problem, gang, c), Fraction(0)) - lam * c.concurrency)
            / c.num_accelerators
            for c in problem.rollout
            if (c.offer, c.room_bytes is not None) == place
            and not [*_age_rows(problem, gang, tau, [(c, 1)]), *_memory_rows(gang, [(c, 1)])]
        ]
        assert found.get(place, ([], []))[1] == ([max(values)] if values else [])
