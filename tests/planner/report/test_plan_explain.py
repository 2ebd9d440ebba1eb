"""What holds the golden plan back, and why there is none."""

import pytest
from plan_instances import golden

from offbeat.planner.report.explain import explain, infeasible_because, relaxations, savings
from offbeat.planner.solve.search import fastest


def test_the_in_flight_cap_binds_and_another_node_of_b_brings_nothing():
    gains = {gain.name: gain for gain in explain(golden(), fastest(golden()))}
    assert f"{120_000 / 34:,.0f} tokens/s" in gains["no limit on trajectories in flight"].line
    assert gains["max_staleness = 3"].line.startswith("max_staleness = 3: +16.2%")
    assert gains["one more node of B"].line == "one more node of B: nothing"


def test_more_money_helps_where_money_is_short():
    plan = fastest(golden(), budget=22.0)
    gains = {gain.name: gain for gain in explain(golden(), plan, budget=22.0)}
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
    best, *others = savings(120_000 / 80, 20.0, relaxations(golden(), None))
    assert (best.name, best.gain) == ("one more node of B", pytest.approx(0.2))
    assert best.line == "one more node of B: -20.0% of the price, 16.00 $/h"
    assert "one more node of A: nothing" in [saving.line for saving in others]
