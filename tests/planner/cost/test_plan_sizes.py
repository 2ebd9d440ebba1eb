import pytest
from plan_shapes import QWEN3_4B, QWEN3_30B_A3B, QWEN_1_5B, QWEN_7B, QWEN_14B, work

from offbeat.planner.cost.sizes import mean_context_tokens, sum_square_tokens, touched_parameters, update_bytes
from offbeat.planner.inputs.model_shapes import (
    active_body_parameters,
    active_matmul_parameters,
    kv_bytes_per_token,
    num_parameters,
    weight_bytes,
)
from offbeat.planner.inputs.workload import ModelShape


@pytest.mark.parametrize(
    "model, billions, kv_bytes",
    [
        (QWEN_1_5B, 1.544, 28_672),
        (QWEN_7B, 7.616, 57_344),
        (QWEN_14B, 14.770, 196_608),
        (QWEN3_4B, 4.022, 147_456),
        (QWEN3_30B_A3B, 30.5, 98_304),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_published_shapes_have_their_published_sizes(model, billions, kv_bytes):
    assert num_parameters(model) == pytest.approx(billions * 1e9, rel=2e-3)
    assert kv_bytes_per_token(model) == kv_bytes


def test_the_head_counts_for_arithmetic_whether_tied_or_not_and_the_embedding_never():
    one = ModelShape("one", 1, 2, 1, 1, 2, 3, 10)
    body = 2 * 2 * (1 + 2 * 1) + 2 * 2 * 1 + 3 * 2 * 3
    assert active_body_parameters(one) == body
    assert active_matmul_parameters(one) == body + 10 * 2
    norms = 3 * 2
    assert num_parameters(one) == body + norms + 2 * 10 * 2


def test_an_update_of_an_untied_model_sends_embedding_and_head():
    tied = ModelShape("tied", 1, 2, 1, 1, 2, 3, 10, is_tied=True)
    untied = ModelShape("untied", 1, 2, 1, 1, 2, 3, 10)
    assert update_bytes(work(untied)) - update_bytes(work(tied)) == 10 * 2 * 2
    assert update_bytes(work(untied, delta_density=0.25)) == weight_bytes(untied) / 4


def test_an_update_under_lora_sends_the_adapters_alone():
    one = ModelShape("one", 1, 2, 1, 1, 2, 3, 10)
    assert update_bytes(work(one, lora_rank=1)) == 2 * (4 * (2 + 2) + 3 * (2 + 3))


@pytest.mark.parametrize("rows, share", [(1, 0.0625), (8, 0.4033), (32, 0.8732), (64, 0.9839)])
def test_rows_touch_more_and_more_experts(rows, share):
    model = QWEN3_30B_A3B
    experts = 48 * 128 * 3 * 2048 * 768
    none = touched_parameters(model, 0)
    assert (touched_parameters(model, rows) - none) / experts == pytest.approx(share, abs=1e-3)


def test_active_parameters_of_experts_are_those_of_one_token():
    assert active_matmul_parameters(QWEN3_30B_A3B) == pytest.approx(3.0e9, rel=0.05)
    assert touched_parameters(QWEN3_30B_A3B, 1) == pytest.approx(active_matmul_parameters(QWEN3_30B_A3B))


def test_lengths_count_by_their_squares():
    # at a random moment of an exponential answer its length so far is its mean: 2e6 / (2 * 1000)
    assert mean_context_tokens(work()) == 100 + 1000
    assert sum_square_tokens(work()) == 32 * (10_000 + 2 * 100 * 1000 + 2e6)
