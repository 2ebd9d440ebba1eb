import math

import pytest
from plan_shapes import CARD, QWEN_14B, cluster, machines, work

from offbeat.planner.cost.constants import Efficiencies
from offbeat.planner.cost.sizes import update_bytes
from offbeat.planner.cost.sync_time import CHUNK_BYTES, publish_s, relay_s, swap_s, two_trees_s, wake_s
from offbeat.planner.inputs.hardware import Link
from offbeat.planner.inputs.model_shapes import weight_bytes

PLACE = cluster(machines("a", 1), machines("b", 6))
WORK = work(QWEN_14B)


def test_a_relay_crosses_the_slow_link_once():
    one_copy_s = weight_bytes(QWEN_14B) / 1.5e9
    assert one_copy_s == pytest.approx(19.7, abs=0.05)
    relayed_s = relay_s(WORK, PLACE, "a", "b", 6)
    # 1.5 GB/s arrive and 5 leave: each of 6 nodes passes pieces on to 2, so the last is 2 hops away
    assert relayed_s == pytest.approx(one_copy_s + 2 * CHUNK_BYTES / (5e9 / 2))


def test_a_relay_is_no_faster_than_its_slowest_link():
    place = cluster(machines("a", 1), machines("b", 2), same=1e9, between=1.5e9)
    assert relay_s(WORK, place, "a", "b", 2) >= update_bytes(WORK) / 1e9
    assert relay_s(WORK, place, "a", "b", 1) == pytest.approx(update_bytes(WORK) / 1.5e9)


def test_a_large_class_is_spread_by_a_tree_and_not_along_a_line():
    one, large = (relay_s(WORK, PLACE, "a", "b", num_nodes) for num_nodes in (1, 400))
    assert large - one == pytest.approx(8 * CHUNK_BYTES / (5e9 / 2))  # 1 + 2 + 4 + ... + 256 nodes: 8 hops, not 399
    tight = cluster(machines("a", 1), machines("b", 400), same=1.5e9, between=1.5e9)
    assert relay_s(WORK, tight, "a", "b", 400) > large  # no port is left to divide


@pytest.mark.parametrize(("num_nodes", "depth"), [(3, 2), (4, 2), (5, 3), (9, 4)])
def test_two_trees_use_the_whole_port_and_are_as_deep_as_one(num_nodes, depth):
    within = Link(4e9, 1e-3)
    hops_s = depth * (CHUNK_BYTES / 2e9 + 1e-3)
    assert two_trees_s(8e9, 2e9, within, num_nodes) == pytest.approx(4.0 + hops_s)
    assert two_trees_s(8e9, 9e9, within, num_nodes) == pytest.approx(2.0 + hops_s)
    assert two_trees_s(8e9, 2e9, within, 2) == math.inf


def test_deltas_shorten_the_way_in_proportion():
    tenth = work(QWEN_14B, delta_density=0.1)
    assert relay_s(tenth, PLACE, "a", "b", 1) == pytest.approx(relay_s(WORK, PLACE, "a", "b", 1) / 10)


def test_weights_that_fit_beside_the_old_ones_block_a_moment_and_others_come_from_the_host():
    figures = Efficiencies(swap_s=0.2)
    half = weight_bytes(QWEN_14B) / 2
    assert swap_s(WORK, CARD, figures, 2, half) == 0.2
    assert swap_s(WORK, CARD, figures, 2, half - 1) == pytest.approx(0.2 + half / 1e10)


def test_a_node_alone_in_its_class_has_nobody_to_send_to():
    assert relay_s(WORK, PLACE, "a", "a", 1) == 0.0
    assert relay_s(WORK, PLACE, "b", "b", 6) > 0.0


def test_a_replica_that_gave_its_memory_away_loads_all_weights_whatever_is_trained():
    figures = Efficiencies(swap_s=0.2)
    for lora_rank in (0, 16):
        woken_s = wake_s(work(QWEN_14B, lora_rank=lora_rank), CARD, figures, 2)
        assert woken_s == pytest.approx(0.2 + weight_bytes(QWEN_14B) / 2 / 1e10)


def test_the_cards_of_a_node_publish_together():
    assert publish_s(WORK, machines("a", 1)) == pytest.approx(weight_bytes(QWEN_14B) / (8 * 1e10))
