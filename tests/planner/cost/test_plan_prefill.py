from dataclasses import replace

import pytest
from plan_shapes import CARD, QWEN_7B, work

from offbeat.planner.cost.constants import Efficiencies
from offbeat.planner.cost.rollout_time import drain_s, prefill_flop, prompt_s, refill_s, update_s
from offbeat.planner.inputs.model_shapes import active_body_parameters
from offbeat.planner.inputs.workload import KvPolicy, LengthStatistics

PEAK = Efficiencies(prefill_share=1)


def test_prefill_counts_the_body_and_the_square_of_the_length_but_no_head():
    body = 28 * (3584 * 128 * (28 + 8) + 3584 * 128 * 28 + 3 * 3584 * 18_944)
    assert active_body_parameters(QWEN_7B) == body
    assert prefill_flop(QWEN_7B, 1000, 1e6) == 2 * body * 1000 + 2 * 28 * 28 * 128 * 1e6


def test_a_group_shares_the_prefill_of_its_prompt():
    alone, shared = (prompt_s(work(group_size=size), CARD, PEAK, 1) for size in (1, 8))
    assert alone == pytest.approx(8 * shared)


def test_refilling_a_7b_with_128_answers_of_4k_takes_over_a_minute_on_an_h20():
    contexts = {
        "prompt": LengthStatistics(0, 0, 0, 0, 0),
        "answer": LengthStatistics(4096, 2 * 4096**2, 16_000, 0.02, 20_000),
    }
    h20 = replace(CARD, flops=148e12)
    seconds = refill_s(work(**contexts), h20, Efficiencies(prefill_share=0.6), 1, 128)
    assert seconds == pytest.approx(80, rel=0.1)


def test_what_an_update_costs_is_the_kv_policys_affair():
    def cost_s(kv):
        return update_s(work(kv=kv), CARD, PEAK, 1, 10, 0.01)

    assert cost_s(KvPolicy.STALE) == 0
    assert cost_s(KvPolicy.REFILL) == refill_s(work(), CARD, PEAK, 1, 10)
    assert cost_s(KvPolicy.FINISH) == drain_s(work(), 0.01) == pytest.approx(0.01 * (4000 - 1000))
