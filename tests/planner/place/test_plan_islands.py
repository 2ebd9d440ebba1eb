"""Groups of cards stay whole on a node, and what fits by count is packed."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_clusters import GB, cluster

from offbeat.errors import UserError
from offbeat.planner.place.islands import Group, lay_gang, pack, ring_bytes_per_s, ring_order
from offbeat.planner.place.nodes import fabric_of, nodes_of
from offbeat.planner.problem import Gang

SIZES = {"one": 1, "two": 2, "four": 4, "eight": 8}


def gang(nodes: dict[str, int], tp: int, pp: int, dp: int, **more) -> Gang:
    return Gang("g", nodes, next(iter(nodes)), 1.0, 0.0, tp, pp, dp, **more)


def test_nodes_are_named_by_class_and_number():
    assert [node.name for node in nodes_of(cluster({"h800": 1, "h20": 2}))] == ["h800-0", "h20-0", "h20-1"]


@settings(max_examples=80, deadline=None)
@given(counts=st.fixed_dictionaries({name: st.integers(0, 9) for name in SIZES}))
def test_sizes_that_are_powers_of_two_are_packed_whenever_they_fit_by_count(counts):
    nodes = nodes_of(cluster({"a": 5}))
    placed = pack(SIZES, counts, nodes)
    wanted = sum(SIZES[name] * num for name, num in counts.items())
    assert (placed is not None) == (wanted <= 40)
    if placed is not None:
        assert Counter(one.column for one in placed) == +Counter(counts)
        cards = [(one.group.node, one.group.first + i) for one in placed for i in range(one.group.size)]
        assert len(set(cards)) == len(cards) == wanted
        assert all(one.group.first + one.group.size <= 8 for one in placed)


def test_stages_of_a_gang_lie_together_and_cross_classes_whole():
    fabric = fabric_of(cluster({"a": 1, "b": 1}))
    stages = lay_gang(fabric, gang({"a": 1, "b": 1}, tp=4, pp=2, dp=2, layers=(20, 8)), ["a-0", "b-0"])
    assert stages == ((Group("a-0", 0, 4), Group("a-0", 4, 4)), (Group("b-0", 0, 4), Group("b-0", 4, 4)))


def test_data_parallelism_over_classes_gives_each_class_whole_pipelines():
    fabric = fabric_of(cluster({"a": 1, "b": 2}))
    shares = {"a": 0.5, "b": 0.5}
    stages = lay_gang(fabric, gang({"a": 1, "b": 2}, 4, 2, 3, batch_shares=shares), ["a-0", "b-0", "b-1"])
    assert [[group.node for group in stage] for stage in stages] == [
        ["a-0", "b-0", "b-0"],
        ["a-0", "b-1", "b-1"],
    ]


def test_stages_of_different_classes_stand_in_the_gangs_order_with_a_tensor_parallelism_of_their_own():
    fabric = fabric_of(cluster({"a": 2, "b": 1}))
    stages = lay_gang(fabric, gang({"b": 1, "a": 2}, tp=4, pp=2, dp=2, layers=(8, 20)), ["a-0", "a-1", "b-0"])
    assert stages == ((Group("b-0", 0, 4), Group("b-0", 4, 4)), (Group("a-0", 0, 8), Group("a-1", 0, 8)))
    with pytest.raises(UserError, match="16 cards of a cannot be divided into 3 equal groups, each inside one node"):
        lay_gang(fabric, gang({"a": 2, "b": 1}, tp=4, pp=2, dp=3), ["a-0", "a-1", "b-0"])


def test_a_shape_that_its_nodes_cannot_hold_is_refused():
    fabric = fabric_of(cluster({"a": 1}))
    with pytest.raises(UserError, match="needs 3 groups of 4 cards, but its nodes have 2"):
        lay_gang(fabric, gang({"a": 1}, 4, 1, 3), ["a-0"])
    with pytest.raises(UserError, match="tp 3 does not divide the 8 cards of a-0"):
        lay_gang(fabric, gang({"a": 1}, 3, 1, 2), ["a-0"])


def test_a_ring_follows_the_fast_links():
    fast = [("a-0", "a-2"), ("a-2", "a-1"), ("a-1", "a-3"), ("a-3", "a-0")]
    fabric = fabric_of(replace(cluster({"a": 4}), measured={frozenset(pair): 20 * GB for pair in fast}))
    ring = ring_order(fabric, ["a-0", "a-1", "a-2", "a-3"])
    assert sorted(ring) == ["a-0", "a-1", "a-2", "a-3"]
    assert ring_bytes_per_s(fabric, ring) == 20 * GB
    assert ring_bytes_per_s(fabric, ["a-0", "a-1", "a-2", "a-3"]) == 5 * GB


def test_alike_nodes_stand_by_class_and_number_in_a_ring():
    fabric = fabric_of(cluster({"a": 11, "b": 1}))
    assert ring_order(fabric, ["a-10", "b-0", "a-2"]) == ("a-2", "a-10", "b-0")
