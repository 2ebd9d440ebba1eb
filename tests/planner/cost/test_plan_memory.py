from dataclasses import replace

import pytest
from plan_shapes import CARD, QWEN_1_5B, QWEN_7B, work

from offbeat.planner.cost.constants import Efficiencies
from offbeat.planner.cost.memory import (
    activation_bytes,
    kept_bytes,
    kv_bytes_per_row,
    max_rows,
    rollout_bytes,
    spare_bytes,
    state_bytes,
    training_bytes,
)
from offbeat.planner.inputs.model_shapes import num_parameters, weight_bytes

FIGURES = Efficiencies()
N = num_parameters(QWEN_7B)


def test_rows_fill_what_the_weights_leave_with_a_quarter_to_spare():
    row = 1.25 * 1100 * 57_344
    assert kv_bytes_per_row(work(), 1) == row
    assert max_rows(work(), CARD, FIGURES, 1) == int((0.88 * 80e9 - weight_bytes(QWEN_7B)) / row)
    assert max_rows(work(), replace(CARD, memory_bytes=16e9), FIGURES, 1) == 0


def test_cards_beyond_the_kv_heads_hold_copies():
    assert kv_bytes_per_row(work(QWEN_1_5B), 4) == kv_bytes_per_row(work(QWEN_1_5B), 2)


def test_the_least_memory_lets_one_answer_run_and_a_little_less_does_not():
    least = rollout_bytes(work(), FIGURES, 2)
    assert max_rows(work(), replace(CARD, memory_bytes=least * 1.0001), FIGURES, 2) == 1
    assert max_rows(work(), replace(CARD, memory_bytes=least * 0.9999), FIGURES, 2) == 0


def test_spare_memory_is_what_weights_and_answers_leave():
    assert spare_bytes(work(), CARD, FIGURES, 2, 10) == pytest.approx(
        0.88 * 80e9 - weight_bytes(QWEN_7B) / 2 - 10 * kv_bytes_per_row(work(), 2)
    )


@pytest.mark.parametrize("zero, bytes_per_parameter", [(1, 4 + 12 / 8), (2, 2 + 14 / 8), (3, 16 / 8)])
def test_zero_shards_optimizer_then_gradients_then_weights(zero, bytes_per_parameter):
    assert state_bytes(work(), 2, 2, 8, zero) == pytest.approx(N / 4 * bytes_per_parameter)


@pytest.mark.parametrize("zero, bytes_per_parameter", [(1, 2 + 12 / 8), (2, 2 + 12 / 8), (3, 14 / 8)])
def test_between_two_steps_no_gradients_are_kept(zero, bytes_per_parameter):
    assert kept_bytes(work(), 2, 2, 8, zero) == pytest.approx(N / 4 * bytes_per_parameter)
    assert kept_bytes(work(has_critic=True), 2, 2, 8, zero) == pytest.approx(2 * N / 4 * bytes_per_parameter)


def test_a_critic_is_a_second_model_and_a_reference_weights_alone():
    plain = state_bytes(work(), 1, 1, 4, 1)
    assert state_bytes(work(has_critic=True), 1, 1, 4, 1) == pytest.approx(2 * plain)
    assert state_bytes(work(has_reference=True), 1, 1, 4, 1) == pytest.approx(plain + 2 * N)


def test_lora_keeps_no_state_of_the_frozen_weights():
    assert (
        state_bytes(work(lora_rank=16), 1, 1, 1, 1) < 2.2 * N < 16 * N == pytest.approx(state_bytes(work(), 1, 1, 1, 1))
    )


def test_logits_are_held_for_a_chunk_and_not_for_all_tokens():
    whole = 4 * 152_064 * 8100
    kept = 2 * 3584 * 8100 * 28 + 34 * 3584 * 8100
    logits = activation_bytes(work(), 1, 1, 28, recompute=True) - kept
    assert logits == pytest.approx(8 * 152_064 * 1024)
    assert logits < whole / 3


def test_recomputing_and_sharding_only_save():
    for zero in (1, 2, 3):
        full, less = (training_bytes(work(), 2, 1, 4, zero, recompute=one) for one in (False, True))
        assert less < full
    sizes = [training_bytes(work(), 2, 1, 4, zero, recompute=True) for zero in (1, 2, 3)]
    assert sizes == sorted(sizes, reverse=True)
