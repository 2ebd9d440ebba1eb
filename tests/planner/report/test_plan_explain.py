"""What holds the golden plan back, and why there is none."""

import pytest
from plan_instances import golden

from offbeat.planner.report.explain import gains_of, infeasible_because, relaxations, savings_of
from offbeat.planner.solve.search import cheapest, fastest


def gained(budget=None):
    """What each relaxation of the golden problem brings, by name."""
    found = [(each.name, fastest(each.problem, each.budget)) for each in relaxations(golden(), budget)]
    plans = [(name, plan.tokens_per_s, plan.price_per_h) for name, plan in found if plan.solution is not None]
    return {gain.name: gain for gain in gains_of(fastest(golden(), budget).tokens_per_s, plans)}


def test_the_in_flight_cap_binds_and_another_node_of_b_brings_nothing():
    gains = gained()
    assert f"{120_000 / 34:,.0f} tokens/s" in gains["no limit on trajectories in flight"].line
    assert gains["max_staleness = 3"].line.startswith("max_staleness = 3: +16.2%")
    assert gains["one more node of B"].line == "one more node of B: nothing"


def test_more_money_helps_where_money_is_short():
    gains = gained(budget=22.0)
    assert gains["budget +10%"].gain > 0.2


def test_too_small_a_budget_is_told_with_the_least_that_suffices():
    assert infeasible_because(golden(), budget=7.0) == ["budget: 7.00 $/h is too little; 12.00 $/h suffices"]


def test_too_high_a_throughput_is_told_with_the_most_there_is():
    lines = infeasible_because(golden(), throughput=3_400.0)
    assert lines[0] == "throughput: 3,038 tokens/s is the most; ask for that or less"
    assert any(line.startswith("staleness: max_staleness = 3 would allow a plan") for line in lines)


def test_an_age_window_that_is_too_short_is_told():
    strict = golden(age_guard=1.0, tail_tokens=6_000.0)  # 34 s of training and 60 s of tail fit 2 periods of 47 s
    lines = infeasible_because(strict, throughput=3_000.0)
    assert lines[0].startswith(f"throughput: {120_000 / 47:,.0f} tokens/s is the most")
    assert any(line.startswith("age window: no deadline for long answers would allow a plan") for line in lines)
    assert all("\n" not in line for line in lines)


def test_a_problem_with_a_plan_has_nothing_to_tell():
    assert infeasible_because(golden(), budget=40.0, throughput=3_000.0) == []


def test_a_further_node_saves_money_at_a_throughput():
    plans = [(each.name, cheapest(each.problem, 120_000 / 80)) for each in relaxations(golden(), None)]
    best, *others = savings_of(20.0, [(name, plan.tokens_per_s, plan.price_per_h) for name, plan in plans])
    assert (best.name, best.gain) == ("one more node of B", pytest.approx(0.2))
    assert best.line == "one more node of B: -20.0% of the price, 16.00 $/h"
    assert "one more node of A: nothing" in [saving.line for saving in others]
