"""A gang on the nodes that it got: the step that their links give it."""

from dataclasses import replace

import pytest
from plan_shapes import cluster, machines, work

from offbeat.planner.columns.gangs import _alone_on, mixed, over_links
from offbeat.planner.cost.constants import Constants
from offbeat.planner.inputs.hardware import Link

BIG = {"memory_bytes": 200e9, "flops": 700e12}
PLACE = cluster(machines("a", 2, **BIG), machines("b", 1, **BIG), between=50e9)
ALONE = list(_alone_on(PLACE.classes["a"], 2, PLACE, work(), Constants()))
MIXED = list(mixed(*PLACE.classes.values(), PLACE, work(), Constants()))


def over(gang, *slow):
    links = {**PLACE.links, frozenset(slow): Link(1e6)} if slow else PLACE.links
    return over_links(gang, replace(PLACE, links=links), work(), Constants()).step_s


def test_over_the_links_that_it_was_made_for_a_gang_is_as_fast_as_it_was():
    assert {bool(gang.batch_shares) for gang in MIXED} == {True, False}
    for gang in MIXED:
        assert over(gang) <= gang.step_s  # of ways that differ in recomputing alone the fastest
    for gang in ALONE:  # of ways that differ in recomputing alone the faster
        assert over(gang) <= gang.step_s * (1 + 1e-12)


@pytest.mark.parametrize("gang", MIXED, ids=lambda gang: gang.name)
def test_gangs_of_two_classes_wait_for_the_link_between_them(gang):
    assert over(gang, "a", "b") > 2 * over(gang)


def test_a_gang_of_one_class_does_not_care_for_links_to_others():
    assert all(over(gang, "a", "b") == over(gang) for gang in ALONE)
    assert all(over(gang, "a") > over(gang) for gang in ALONE if gang.pp == 1)
