from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_shapes import CARD, QWEN3_30B_A3B, QWEN_1_5B, QWEN_7B, work

from offbeat.planner.cost.constants import Efficiencies
from offbeat.planner.cost.memory import rollout_bytes, training_bytes
from offbeat.planner.cost.rollout_time import (
    allreduce_s,
    attention_s,
    decode_step_s,
    matmul_s,
    prefill_flop,
    prefill_s,
)
from offbeat.planner.cost.sizes import update_bytes
from offbeat.planner.inputs.hardware import accelerator
from offbeat.planner.inputs.model_shapes import active_matmul_parameters, known_model

PEAK = Efficiencies(
    gemm_share=1,
    weight_read_share=1,
    kv_read_share=1,
    link_share=1,
    allreduce_latency_s=0,
    step_overhead_s=0,
    row_overhead_s=0,
)


def test_few_rows_take_the_reading_of_the_weights_and_many_their_arithmetic():
    card = replace(CARD, flops=100e12)  # compute-bound from 100 rows on: 1e14 FLOP/s over 1e12 B/s
    parameters = active_matmul_parameters(QWEN_7B)
    assert matmul_s(QWEN_7B, card, PEAK, 1, 10) == pytest.approx(2 * parameters / 1e12)
    assert matmul_s(QWEN_7B, card, PEAK, 1, 200) == pytest.approx(2 * parameters * 200 / 100e12)
    assert matmul_s(QWEN_7B, card, PEAK, 1, 100) == matmul_s(QWEN_7B, card, PEAK, 1, 50)


def test_keys_and_values_are_not_split_beyond_their_heads():
    # 10 rows x 1000 tokens x 28,672 B at 1 TB/s; the 1.5B has two KV heads
    times = [attention_s(QWEN_1_5B, CARD, PEAK, tp, 10, 1000) for tp in (1, 2, 4)]
    assert times == pytest.approx([286.72e-6, 143.36e-6, 143.36e-6])


def test_an_allreduce_sends_twice_all_but_its_own_part():
    assert allreduce_s(4e9, CARD, PEAK, 1) == 0
    assert allreduce_s(4e9, CARD, PEAK, 4) == pytest.approx(2 * 3 / 4 * 4e9 / 1e11)
    assert allreduce_s(0, CARD, replace(PEAK, allreduce_latency_s=9e-6), 2) == 9e-6


def test_a_step_is_the_sum_of_its_parts_with_two_allreduces_a_layer():
    figures = replace(PEAK, step_overhead_s=1e-3, allreduce_latency_s=1e-5, row_overhead_s=1e-4)
    step_s = decode_step_s(QWEN_7B, CARD, figures, 2, 16, 2000)
    parts = matmul_s(QWEN_7B, CARD, figures, 2, 16) + attention_s(QWEN_7B, CARD, figures, 2, 16, 2000)
    exchange_s = 2 * 28 * (2 * 16 * 3584 / 1e11 + 1e-5)
    assert step_s == pytest.approx(parts + exchange_s + 1e-3 + 16e-4)


def test_with_the_defaults_a_step_of_vllm_on_an_h200_is_within_a_third():
    h200 = accelerator("h200")
    step_s = decode_step_s(known_model("qwen2.5-1.5b"), h200, Efficiencies(), 1, 256, 64 + 256)
    assert step_s == pytest.approx(256 / 21_308, rel=1 / 3)  # benchmarks/results/engines-h200.md, in process


def test_few_rows_of_experts_read_few_experts():
    card = replace(CARD, flops=1e18)
    one, many = (matmul_s(QWEN3_30B_A3B, card, PEAK, 1, rows) for rows in (1, 512))
    assert many / one > 8


@settings(max_examples=40, deadline=None)
@given(
    tp=st.sampled_from([1, 2, 4]),
    rows=st.floats(1, 500),
    context=st.floats(100, 30_000),
    more=st.floats(1.01, 3),
)
def test_more_rows_generate_more_and_wait_longer_and_context_only_costs(tp, rows, context, more):
    def step_s(rows, context):
        return decode_step_s(QWEN_7B, CARD, Efficiencies(), tp, rows, context)

    assert step_s(rows * more, context) >= step_s(rows, context)
    assert rows * more / step_s(rows * more, context) >= rows / step_s(rows, context) * (1 - 1e-9)
    assert step_s(rows, context * more) > step_s(rows, context)


def test_8_bit_weights_are_read_in_half_the_time_and_computed_with_at_the_cards_own_rate():
    fp8 = replace(QWEN_7B, bytes_per_weight=1)
    card = replace(CARD, fp8_flops=2 * CARD.flops)
    figures = Efficiencies()
    few, many = 1, 4096  # bound by reading, and by computing
    for rows in (few, many):
        assert matmul_s(fp8, card, figures, 1, rows) == pytest.approx(matmul_s(QWEN_7B, card, figures, 1, rows) / 2)
    assert matmul_s(fp8, CARD, figures, 1, many) == matmul_s(QWEN_7B, CARD, figures, 1, many)
    flop = prefill_flop(fp8, 1000, 1e6)
    assert prefill_s(flop, fp8, card, figures, 1) == prefill_s(flop, QWEN_7B, card, figures, 1) / 2


def test_8_bit_engines_leave_training_and_versions_in_16_bits():
    usual, fp8 = (work(replace(QWEN_7B, bytes_per_weight=width)) for width in (2, 1))
    assert update_bytes(fp8) == update_bytes(usual)
    assert training_bytes(fp8, 1, 1, 8, 2, recompute=True) == training_bytes(usual, 1, 1, 8, 2, recompute=True)
    assert rollout_bytes(fp8, Efficiencies(), 1) < rollout_bytes(usual, Efficiencies(), 1)
