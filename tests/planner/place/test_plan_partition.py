"""Sides have the counts that were asked for, and the nodes that the true cost prefers."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
from plan_clusters import GB, cluster

from offbeat.planner.place import placing
from offbeat.planner.place.islands import ring_bytes_per_s, ring_order
from offbeat.planner.place.nodes import NodeFabric, fabric_of
from offbeat.planner.place.placing import split


def racks(counts: dict[str, int], seed: int) -> NodeFabric:
    """Nodes of a class lie in one of two racks, at random: 20 GB/s within, 2 GB/s between."""
    draw = random.Random(seed)
    inventory = cluster(counts)
    names = list(fabric_of(inventory).nodes)
    rack = {name: draw.random() < 0.5 for name in names}
    rates = {
        frozenset(pair): (20 if rack[pair[0]] == rack[pair[1]] else 2) * GB for pair in itertools.combinations(names, 2)
    }
    return fabric_of(replace(inventory, measured=rates))


def slowness(fabric: NodeFabric):
    """Slow links of the training ring, and the rest of the cost from pairs that train together."""

    def cost(training: frozenset[str], rollout: frozenset[str]) -> float:
        pairs = sum(1 / fabric.bytes_per_s(*pair) for pair in itertools.combinations(sorted(training), 2))
        return pairs * 1e9 + 1e9 / ring_bytes_per_s(fabric, ring_order(fabric, sorted(training)))

    return cost


def test_alike_nodes_are_taken_in_order():
    training, rollout = split(fabric_of(cluster({"a": 3, "b": 2})), {"a": 1}, {"a": 1, "b": 2}, lambda *_: 0.0)
    assert training == {"a-0"}
    assert rollout == {"a-1", "b-0", "b-1"}


@pytest.mark.parametrize("seed", range(6))
def test_exchanges_find_what_trying_all_finds(seed, monkeypatch):
    fabric = racks({"a": 8}, seed)
    cost = slowness(fabric)
    best = split(fabric, {"a": 3}, {"a": 4}, cost)
    monkeypatch.setattr(placing, "MAX_TRIED", 0)
    found = split(fabric, {"a": 3}, {"a": 4}, cost)
    assert [len(side) for side in found] == [3, 4]
    assert not found[0] & found[1]
    assert cost(*found) <= 1.02 * cost(*best)


def test_few_choices_are_all_tried():
    fabric = racks({"a": 5}, 1)
    cost = slowness(fabric)
    chosen = split(fabric, {"a": 2}, {"a": 3}, cost)
    names = set(fabric.nodes)
    every = [(frozenset(one), frozenset(names - set(one))) for one in itertools.combinations(sorted(names), 2)]
    assert cost(*chosen) == min(cost(*pair) for pair in every)
