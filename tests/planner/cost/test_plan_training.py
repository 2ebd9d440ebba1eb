from dataclasses import replace

import pytest
from plan_shapes import QWEN_7B, work

from offbeat.planner.cost.constants import Efficiencies
from offbeat.planner.cost.training_time import (
    GangFabric,
    allreduce_s,
    boundary_s,
    bubble,
    compute_s,
    dp_s,
    num_microbatches,
    step_flop,
    tp_s,
)
from offbeat.planner.inputs.model_shapes import active_matmul_parameters, num_parameters
from offbeat.planner.inputs.workload import LengthStatistics

PEAK = Efficiencies(link_share=1, tp_exposed_share=1, dp_exposed_share=1)
FABRIC = GangFabric(card_bytes_per_s=1e11, node_bytes_per_s=8e9, per_node=8)
N = active_matmul_parameters(QWEN_7B)
TOKENS = 32 * 1100
ATTENTION = 2 * 28 * 28 * 128 * 32 * (10_000 + 200_000 + 2e6)


@pytest.mark.parametrize(
    "changes, recompute, matmul_passes, attention_passes",
    [
        ({"recomputes_logprobs": False}, False, 3, 3),
        ({}, False, 4, 4),
        ({}, True, 5, 5),
        ({"has_reference": True}, False, 5, 5),
        ({"has_critic": True}, False, 8, 8),
        ({"lora_rank": 8, "recomputes_logprobs": False}, False, 2, 3),
    ],
)
def test_a_step_is_six_flop_a_parameter_and_two_for_every_further_pass(
    changes, recompute, matmul_passes, attention_passes
):
    expected = 2 * N * TOKENS * matmul_passes + ATTENTION * attention_passes
    assert step_flop(work(**changes), recompute=recompute) == pytest.approx(expected)
    assert compute_s(work(**changes), 1e15, recompute=recompute) == pytest.approx(expected / 1e15)


def test_a_long_tail_costs_more_than_equal_lengths_of_the_same_mean():
    equal = work(answer=LengthStatistics(1000, 1e6, 1000, 0, 1000))
    spread = work(answer=LengthStatistics(1000, 4e6, 8000, 0.02, 8000))
    attention = 4 * 2 * 28 * 28 * 128
    difference = step_flop(spread, recompute=False) - step_flop(equal, recompute=False)
    assert difference == pytest.approx(attention * 32 * 3e6)


def test_a_pipeline_idles_once_an_update():
    long = work(groups_per_step=400)
    count = num_microbatches(long, 2)
    assert count == pytest.approx(400 * 8 * 1100 / 2 / 8100)  # the longest trajectory
    assert bubble(long, 4, 2) == pytest.approx(1 + 3 / count)
    assert bubble(work(groups_per_step=400, updates_per_step=4), 4, 2) == pytest.approx(1 + 3 / (count / 4))
    assert bubble(long, 1, 2) == 1


def test_tensor_parallelism_exchanges_four_times_a_layer():
    assert tp_s(work(), PEAK, FABRIC, 1, 1, 1) == 0
    sent = 4 * 28 * 2 * 3 / 4 * TOKENS / 2 * 2 * 3584
    assert tp_s(work(), PEAK, FABRIC, 4, 1, 2) == pytest.approx(sent / 1e11)
    assert tp_s(work(), replace(PEAK, tp_exposed_share=0.25), FABRIC, 4, 1, 2) == pytest.approx(sent / 4e11)


def test_replicas_reduce_inside_nodes_first_and_the_cards_of_a_node_share_its_link():
    # 4 replicas of tp 2 in a node, 3 nodes: 2*3/4 inside, then a quarter of it each over an eighth of the link
    expected = 2 * 3 / 4 * 1e9 / 1e11 + 2 * 2 / 3 * (1e9 / 4) / (8e9 / 8)
    assert allreduce_s(1e9, PEAK, FABRIC, 2, 12) == pytest.approx(expected)
    assert allreduce_s(1e9, PEAK, FABRIC, 2, 4) == pytest.approx(2 * 3 / 4 * 1e9 / 1e11)
    # a fifth replica stands on a second node, which has to hear of everything
    alone = 2 * 3 / 4 * 1e9 / 1e11 + 2 * 1 / 2 * (1e9 / 4) / (8e9 / 8)
    assert allreduce_s(1e9, PEAK, FABRIC, 2, 5) == pytest.approx(alone)


def test_gradients_go_once_an_update_and_zero_three_moves_three_times_the_weights():
    gradients = num_parameters(QWEN_7B) * 2 / 2
    assert dp_s(work(), PEAK, FABRIC, 2, 1, 1, 1) == 0
    once = dp_s(work(), PEAK, FABRIC, 2, 1, 4, 1)
    assert once == pytest.approx(allreduce_s(gradients, PEAK, FABRIC, 2, 4))
    assert dp_s(work(), PEAK, FABRIC, 2, 1, 4, 2) == once
    assert dp_s(work(updates_per_step=4), PEAK, FABRIC, 2, 1, 4, 1) == pytest.approx(4 * once)
    assert num_microbatches(work(), 8) == 1
    per_allreduce = allreduce_s(gradients, PEAK, FABRIC, 1, 8)
    assert dp_s(work(), PEAK, FABRIC, 1, 2, 8, 3) == pytest.approx(1.5 * per_allreduce)


def test_a_boundary_between_stages_carries_activations_both_ways():
    assert boundary_s(work(), 1e9, 2) == pytest.approx(2 * TOKENS * 2 * 3584 / 2e9)
