"""Products of a few rows are those of the model's own layers, and are used only where they are faster."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from offbeat.engines.embedded.attention import ALIGNED_BYTES, KeyValueSlots
from offbeat.engines.embedded.decode_forward import (
    BLOCK,
    MAX_BLOCKED_ROWS,
    MAX_ROWS,
    MIN_ROWS,
    DecodeForward,
    RecordedStep,
    product,
    use_few_rows,
)
from offbeat.engines.embedded.stepper import Stepper

needs_mkl = pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="torch has no MKL here")


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("num_outputs", [5 * BLOCK, 257])
@pytest.mark.parametrize(
    "num_rows", [1, MIN_ROWS - 1, MIN_ROWS, 7, MAX_BLOCKED_ROWS, MAX_BLOCKED_ROWS + 1, 17, MAX_ROWS, MAX_ROWS + 1]
)
def test_a_product_is_that_of_a_linear_layer_whatever_the_number_of_rows(num_rows, num_outputs, has_bias):
    torch.manual_seed(0)
    values, layer = torch.randn(num_rows, 1, 300), nn.Linear(300, num_outputs, bias=has_bias)
    with torch.inference_mode():
        found = product(values, layer.weight, layer.bias)
        assert found.is_contiguous()
        torch.testing.assert_close(found, layer(values), rtol=1e-5, atol=1e-5)


def test_rows_of_several_tokens_are_left_to_torch():
    values, weight = torch.randn(8, 3, 64), torch.randn(64, 64)
    assert torch.equal(product(values, weight, None), F.linear(values, weight))


def large_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    shape = {"hidden_size": 256, "intermediate_size": 320, "num_hidden_layers": 1, "vocab_size": 512}
    return LlamaForCausalLM(LlamaConfig(num_attention_heads=4, num_key_value_heads=2, **shape)).eval()


def changed_layers(model: nn.Module) -> list[str]:
    return [name for name, layer in model.named_modules() if "forward" in vars(layer)]


@needs_mkl
def test_only_large_float32_layers_are_changed():
    model = large_model()
    use_few_rows(model)
    changed = changed_layers(model)
    assert "model.layers.0.self_attn.q_proj" in changed
    assert "model.layers.0.self_attn.k_proj" not in changed  # 128 x 256 numbers: small
    half = large_model().bfloat16()
    use_few_rows(half)
    assert changed_layers(half) == []


@needs_mkl
def test_a_recorded_step_decides_anew_for_each_number_of_rows():
    model = large_model()
    with torch.inference_mode():
        stepper = Stepper(model, 16, 64, False, "worker", "fingerprint", 0)
        stepper.record()
        assert isinstance(stepper._forward, RecordedStep)
        assert changed_layers(model)
        direct = DecodeForward(model)
        for inputs in stepper._decode_inputs():  # 2 rows, 1 row, 8 rows
            assert torch.equal(stepper._forward(*inputs), direct(*inputs))


def test_exact_engines_keep_the_models_own_layers():
    model = large_model()
    with torch.inference_mode():
        Stepper(model, 16, 64, True, "worker", "fingerprint", 0)
    assert changed_layers(model) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_keys_and_values_are_aligned_zeros(dtype):
    slots = KeyValueSlots(3, 16)
    made = torch.ones(1, 2, 4, 8, dtype=dtype)
    slots.begin_prefill(torch.tensor([1]))
    slots.update(made, made, 0)
    for held in (slots.keys[0], slots.values[0]):
        assert held.shape == (3, 2, 16, 8)
        assert held.dtype is dtype
        assert held.data_ptr() % ALIGNED_BYTES == 0
        assert held.sum() == made.sum()
        assert held[1, :, :4].eq(1).all()
