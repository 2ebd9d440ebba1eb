"""A placed gang takes what its slowest links give, a class has a version with its last node, nothing gets better."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from plan_clusters import GB, cluster

from offbeat.planner.columns.columns import problem_of
from offbeat.planner.cost.constants import Constants
from offbeat.planner.inputs.workload_file import load_workload
from offbeat.planner.place.islands import Group, lay_gang
from offbeat.planner.place.nodes import fabric_of
from offbeat.planner.place.realised import Arrivals, arrivals, load, period_s, slowed, step_s
from offbeat.planner.solve.check import check
from offbeat.planner.solve.search import fastest

SEVEN = load_workload(Path(__file__).parents[3] / "examples" / "planning" / "workload_hex_7b.toml")
PLAIN = cluster({"a": 3, "b": 2})
PROBLEM = problem_of(PLAIN, SEVEN)


def gang_of(nodes: dict[str, int]):
    return next(gang for gang in PROBLEM.gangs if gang.nodes == nodes and gang.pp == 1)


def took_s(gang, measured) -> float:
    fabric = fabric_of(dataclasses.replace(PLAIN, measured=measured))
    names = [f"{offer}-{i}" for offer, num in gang.nodes.items() for i in range(num)]
    return step_s(fabric, PLAIN, lay_gang(fabric, gang, names), gang, SEVEN, Constants())


@pytest.mark.parametrize("gang", PROBLEM.gangs, ids=lambda gang: gang.name)
def test_over_the_links_of_classes_every_gang_takes_what_its_column_says(gang):
    assert took_s(gang, {}) == pytest.approx(gang.step_s, rel=1e-9)


def test_a_slow_link_of_its_ring_slows_a_gang_and_a_fast_one_never_speeds_it_up():
    gang = gang_of({"a": 3})
    slow = {frozenset((f"a-{i}", f"a-{j}")): 0.01 * GB for i in range(3) for j in range(i)}
    fast = {pair: 50 * GB for pair in slow}
    assert took_s(gang, slow) > 1.02 * gang.step_s
    assert took_s(gang, fast) == gang.step_s


def test_what_crosses_between_stages_goes_by_the_busiest_node():
    fabric = fabric_of(cluster({"a": 2, "b": 2}))
    one, other = ([Group(f"{name}-{i}", 0, 8) for i in range(2)] for name in "ab")
    assert load(fabric, one, other) == pytest.approx(1 / (2 * 1.5 * GB))
    slow = fabric_of(dataclasses.replace(cluster({"a": 2, "b": 2}), measured={frozenset(("a-1", "b-1")): 0.1 * GB}))
    assert load(slow, one, other) == pytest.approx(1 / (2 * 0.1 * GB))
    shared = fabric_of(cluster({"a": 2, "b": 2}, shared=True))
    assert load(shared, one, other) == pytest.approx(1 / (1.5 * GB))
    assert load(fabric, one, one) == 0


def test_a_class_has_a_version_when_its_last_node_has_it():
    fabric = fabric_of(dataclasses.replace(cluster({"a": 1, "b": 2}), measured={frozenset(("b-0", "b-1")): 0.5 * GB}))
    senders = {"b-0": ("a-0",), "b-1": ("b-0",)}
    found = arrivals(fabric, senders, 3 * GB)
    assert found == Arrivals({"b": pytest.approx(6, rel=0.01)}, {})
    trained = arrivals(fabric, senders, 3 * GB, trains=["a-0", "b-0"])
    assert trained == Arrivals({"b": pytest.approx(6, rel=0.01)}, {"b": pytest.approx(2, rel=0.01)})


def test_only_what_is_slower_by_more_than_the_share_is_replaced():
    gang = PROBLEM.gangs[0]
    assert slowed(PROBLEM, gang, gang.step_s * 1.01, Arrivals({"a": 0.0}), by=0.02) is PROBLEM
    slower = slowed(PROBLEM, gang, gang.step_s * 1.03, Arrivals({"b": 1e3}), by=0.02)
    assert slower.gangs[0].step_s == gang.step_s * 1.03
    assert {column.lag_s[gang.root] for column in slower.rollout if column.offer == "b" and not column.is_home} == {1e3}
    assert [one for one in slower.rollout if one.offer == "a"] == [one for one in PROBLEM.rollout if one.offer == "a"]


@pytest.mark.parametrize("bound", [0, 4])
def test_the_placed_period_is_the_shortest_at_which_every_row_holds(bound):
    problem = dataclasses.replace(PROBLEM, demand=dataclasses.replace(PROBLEM.demand, bound=bound))
    solution = fastest(problem).solution
    gang = next(gang for gang in problem.gangs if gang.name == solution.gang)
    placed = slowed(problem, gang, gang.step_s * 1.5 + solution.tau_s, Arrivals({"a": 30.0, "b": 40.0}))
    tau_s = period_s(problem, placed, solution)
    assert check(placed, dataclasses.replace(solution, tau_s=tau_s)) == []
    assert check(placed, dataclasses.replace(solution, tau_s=tau_s * (1 - 1e-6)))
    assert period_s(problem, problem, solution) == solution.tau_s
