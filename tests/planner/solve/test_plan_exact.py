"""What is a plan to the last bit, whatever a solver says."""

from dataclasses import replace

import numpy as np
from plan_instances import at_home, golden

from offbeat.planner.solve.program import holds, shortest_s, solve
from offbeat.planner.solve.view import ColumnCounts, view_of


def test_more_in_flight_than_the_bound_allows_does_not_hold_whatever_a_solver_says():
    view = view_of(golden())
    counts = solve(view, 60.0, range(len(view.gangs)), gap=0.0).counts
    (used,) = np.flatnonzero(counts.replicas)
    for num_replicas, is_allowed in ((8, True), (9, False)):  # of 16 each, where 128 may be in flight
        replicas = tuple(num_replicas if column == used else 0 for column in range(len(counts.replicas)))
        assert holds(view, replace(counts, replicas=replicas), 60.0) is is_allowed


def test_a_plan_is_shortened_to_where_it_just_holds():
    view = view_of(golden())
    counts = ColumnCounts(0, (8, 0))
    assert shortest_s(view, counts, 60.0) == 39.5
    assert holds(view, counts, 39.5)
    assert not holds(view, counts, np.nextafter(39.5, 0))


def test_a_replica_holds_on_the_gangs_nodes_only_as_long_as_memory_and_nodes_last():
    problem = at_home(golden(bound=0), room_bytes=8.0)
    for kept, num_replicas, is_plan in ((8.0, 4, True), (8.1, 4, False), (8.0, 5, False)):
        gangs = tuple(replace(gang, kept_bytes={"A": kept}) for gang in problem.gangs if gang.name == "A x 1")
        view = view_of(replace(problem, gangs=gangs))
        replicas = [num_replicas if shapes[0].name == "on A at home" else 0 for shapes in view.columns]
        assert (
            holds(view, ColumnCounts(0, tuple(replicas)), 92.0) is is_plan
        )  # 60 s, 2 s, and 120,000 tokens by 4 of 1,000
