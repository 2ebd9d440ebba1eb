"""Ports, shared links and chunks: when a relayed version is where."""

from __future__ import annotations

from dataclasses import replace

import pytest
from plan_clusters import GB, cluster

from offbeat.planner.place.nodes import fabric_of
from offbeat.planner.place.sync_tree import arrival_s, hop_rates


def test_a_port_is_divided_among_those_it_feeds():
    fabric = fabric_of(cluster({"a": 3}))
    assert set(hop_rates(fabric, {"a-1": ("a-0",), "a-2": ("a-0",)}).values()) == {2.5 * GB}
    assert set(hop_rates(fabric, {"a-1": ("a-0",), "a-2": ("a-1",)}).values()) == {5 * GB}
    three = fabric_of(cluster({"a": 1, "b": 1, "c": 1}))
    assert set(hop_rates(three, {"b-0": ("a-0",), "c-0": ("a-0",)}).values()) == {0.75 * GB}


def test_a_slow_hop_leaves_its_rest_of_the_port_to_the_others():
    measured = {frozenset(("a-0", "a-1")): 1 * GB}
    fabric = fabric_of(replace(cluster({"a": 3}), measured=measured))
    rates = hop_rates(fabric, {"a-1": ("a-0",), "a-2": ("a-0",)})
    assert rates == {("a-0", "a-1"): 1 * GB, ("a-0", "a-2"): 4 * GB}


def test_a_shared_link_is_divided_among_all_that_crosses():
    senders = {"b-0": ("a-0",), "b-1": ("a-1",), "a-1": ("a-0",)}
    own, shared = (fabric_of(cluster({"a": 2, "b": 2}, shared=shared)) for shared in (False, True))
    assert hop_rates(own, senders)["a-0", "b-0"] == 1.5 * GB
    assert hop_rates(shared, senders)["a-0", "b-0"] == 0.75 * GB


def test_a_way_takes_all_bytes_at_its_least_rate_and_a_chunk_more_per_hop():
    fabric = fabric_of(cluster({"a": 1, "b": 2}))
    arrived_s = arrival_s(fabric, {"b-0": ("a-0",), "b-1": ("b-0",)}, 3 * GB, 0.3 * GB)
    assert arrived_s["b-0"] == pytest.approx(2.0 + 50e-6)
    assert arrived_s["b-1"] == pytest.approx(2.0 + 0.3 / 5 + 100e-6)


def test_two_who_take_turns_bring_a_version_at_the_rate_of_one_whole_port():
    fabric = fabric_of(cluster({"a": 3}))
    crossed = {"a-1": ("a-0", "a-2"), "a-2": ("a-1", "a-0")}
    # The root sends each of both a half at 2.5 GB/s; each passes its half on to the other with a port of its own.
    arrived_s = arrival_s(fabric, crossed, 10 * GB, 0.1 * GB)
    half_s = (5 - 0.1) / 2.5
    assert arrived_s["a-1"] == pytest.approx(half_s + 0.1 / 2.5 + 0.1 / 5 + 100e-6)
    assert arrived_s["a-2"] == pytest.approx(arrived_s["a-1"])


def test_what_comes_from_one_is_passed_on_in_shares():
    fabric = fabric_of(cluster({"a": 1, "b": 3}))
    senders = {"b-0": ("a-0",), "b-1": ("b-0", "b-2"), "b-2": ("b-1", "b-0")}
    arrived_s = arrival_s(fabric, senders, 15 * GB, 0.15 * GB)
    assert arrived_s["b-0"] == pytest.approx(10 + 50e-6)
    slow = (15 - 2 * 0.15) / 1.5  # what comes in is slower than any hop after it
    assert arrived_s["b-1"] == pytest.approx(slow + 0.15 / 1.5 + 0.15 / 2.5 + 0.15 / 5 + 150e-6)
