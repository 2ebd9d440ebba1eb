import math
from dataclasses import replace

import pytest
from plan_shapes import CARD, QWEN_14B, cluster, machines, work

from offbeat.planner.cost.constants import Efficiencies
from offbeat.planner.cost.sizes import update_bytes
from offbeat.planner.cost.sync_time import CHUNK_BYTES, least_s, one_tree_s, publish_s, swap_s, two_trees_s, wake_s
from offbeat.planner.inputs.hardware import Link
from offbeat.planner.inputs.model_shapes import weight_bytes

PLACE = cluster(machines("a", 1), machines("b", 6))
WORK = work(QWEN_14B)


def test_one_copy_crosses_the_link_between_two_classes():
    one_copy_s = weight_bytes(QWEN_14B) / 1.5e9
    assert one_copy_s == pytest.approx(19.7, abs=0.05)
    assert least_s(WORK, PLACE, "a", "b") == pytest.approx(one_copy_s)


def test_a_relay_is_no_faster_than_its_slowest_link():
    place = cluster(machines("a", 1), machines("b", 2), machines("c", 1), same=1e9, between=1.5e9)
    link = place.links[frozenset(("a", "b"))]
    slow = replace(place, links={**place.links, frozenset(("a", "b")): replace(link, bytes_per_s=1e8)})
    assert least_s(WORK, slow, "a", "b", over="c") >= update_bytes(WORK) / 1.5e9
    assert (
        least_s(WORK, slow, "a", "b", over="c")
        < least_s(WORK, slow, "a", "b")
        == pytest.approx(update_bytes(WORK) / 1e8)
    )


def test_a_large_class_is_spread_by_a_tree_and_not_along_a_line():
    within = PLACE.links[frozenset(("b",))]
    one, large = (one_tree_s(update_bytes(WORK), 1.5e9, within, num_nodes) for num_nodes in (2, 400))
    assert large - one < 9 * (
        CHUNK_BYTES / (5e9 / 2) + within.latency_s
    )  # 1 + 2 + 4 + ... + 256 nodes: 8 hops, not 399


@pytest.mark.parametrize(("num_nodes", "depth"), [(3, 2), (4, 2), (5, 3), (9, 4)])
def test_two_trees_use_the_whole_port_and_are_as_deep_as_one(num_nodes, depth):
    within = Link(4e9, 1e-3)
    hops_s = depth * (CHUNK_BYTES / 2e9 + 1e-3)
    assert two_trees_s(8e9, 2e9, within, num_nodes) == pytest.approx(4.0 + hops_s)
    assert two_trees_s(8e9, 9e9, within, num_nodes) == pytest.approx(2.0 + hops_s)
    assert two_trees_s(8e9, 2e9, within, 2) == math.inf


def test_deltas_shorten_the_way_in_proportion():
    tenth = work(QWEN_14B, delta_density=0.1)
    assert least_s(tenth, PLACE, "a", "b") == pytest.approx(least_s(WORK, PLACE, "a", "b") / 10)


def test_weights_that_fit_beside_the_old_ones_block_a_moment_and_others_come_from_the_host():
    figures = Efficiencies(swap_s=0.2)
    half = weight_bytes(QWEN_14B) / 2
    assert swap_s(WORK, CARD, figures, 2, half) == 0.2
    assert swap_s(WORK, CARD, figures, 2, half - 1) == pytest.approx(0.2 + half / 1e10)


def test_a_node_alone_in_its_class_has_nobody_to_send_to():
    assert least_s(WORK, PLACE, "a", "a") == 0.0
    assert least_s(WORK, PLACE, "b", "b") > 0.0


def test_a_replica_that_gave_its_memory_away_loads_all_weights_whatever_is_trained():
    figures = Efficiencies(swap_s=0.2)
    for lora_rank in (0, 16):
        woken_s = wake_s(work(QWEN_14B, lora_rank=lora_rank), CARD, figures, 2)
        assert woken_s == pytest.approx(0.2 + weight_bytes(QWEN_14B) / 2 / 1e10)


def test_the_cards_of_a_node_publish_together():
    assert publish_s(WORK, machines("a", 1)) == pytest.approx(weight_bytes(QWEN_14B) / (8 * 1e10))
