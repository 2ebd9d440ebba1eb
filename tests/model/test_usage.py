"""What a model can be used for is asked of the model itself."""

import copy

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.architectures.tiny import WINDOW_TOKENS, tiny_model
from offbeat.model.usage import attending, distance, probe_tokens, usage, window_of

MIXES = "has layers beside attention that mix tokens"
PATTERN = "has attention that is neither causal nor causal within a window"
OWN = "does not let its attention be replaced"


@pytest.mark.parametrize(
    "name, obstacle",
    [
        ("llama", None),
        ("deepseek_v3", None),
        ("lfm2", MIXES),
        pytest.param("recurrent_gemma", MIXES, marks=pytest.mark.full),
        pytest.param("granitemoehybrid", MIXES, marks=pytest.mark.full),
        pytest.param("minimax", MIXES, marks=pytest.mark.full),
        pytest.param("zaya", MIXES, marks=pytest.mark.full),
        pytest.param("llama4_text", PATTERN, marks=pytest.mark.full),
        ("doge", PATTERN),
        ("falcon", OWN),
        ("mamba", "does not take position_ids"),
        ("deepseek_v32", "asks for indices in its attention"),
    ],
)
def test_attention_is_replaced_only_where_tokens_meet_nowhere_else(name, obstacle):
    found = usage(tiny_model(name))
    assert found.obstacle == obstacle
    assert (found.packs, found.has_slots) == (obstacle is None, obstacle is None)


def test_a_window_is_read_off_the_mask_even_where_attention_is_not_told_of_it():
    model = tiny_model("phimoe")
    usage(model)
    assert [window_of(layer.self_attn) for layer in model.model.layers] == [WINDOW_TOKENS, WINDOW_TOKENS]


def test_each_layer_has_its_own_window():
    model = tiny_model("qwen2")
    usage(model)
    assert [window_of(layer.self_attn) for layer in model.model.layers] == [None, WINDOW_TOKENS]


def test_a_copy_of_a_probed_model_is_not_probed_again():
    model = tiny_model("qwen2")
    found, twin, passes = usage(model), copy.deepcopy(model), []
    twin.register_forward_pre_hook(lambda *given: passes.append(given))
    assert usage(twin) == found
    assert not passes
    assert [window_of(layer.self_attn) for layer in twin.model.layers] == [None, WINDOW_TOKENS]


def test_a_model_that_keeps_a_calls_options_from_its_attention_has_slots_and_is_not_packed():
    found = usage(tiny_model("nemotron"))
    assert (found.packs, found.has_slots) == (False, True)


def llama(**changes) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=64, **changes)).eval()


@pytest.mark.parametrize("where", ["mlp", "self_attn.k_proj"])
def test_a_part_that_looks_at_the_token_before_is_found_wherever_it_is(where):
    class LooksBack(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, states):
            return self.inner(states + 0.5 * torch.nn.functional.pad(states, (0, 0, 1, 0))[:, :-1])

    model = llama()
    parent, _, name = f"model.layers.1.{where}".rpartition(".")
    setattr(model.get_submodule(parent), name, LooksBack(model.get_submodule(f"{parent}.{name}")))
    assert usage(model).obstacle == MIXES


def test_asking_leaves_a_models_attention_and_the_random_numbers_as_they_were():
    model, before = tiny_model("gemma2"), torch.get_rng_state()
    implementation = model.config._attn_implementation
    usage(model)
    assert model.config._attn_implementation == implementation
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.full
def test_parts_of_a_model_that_attend_in_different_ways_do_so_again():
    model = tiny_model("gemma3")
    model.model.vision_tower.config._attn_implementation = "eager"
    model.model.language_model.config._attn_implementation = "sdpa"
    with attending(model, "eager"):
        assert model.model.language_model.config._attn_implementation == "eager"
    assert model.model.vision_tower.config._attn_implementation == "eager"
    assert model.model.language_model.config._attn_implementation == "sdpa"


def test_special_tokens_are_not_used_to_ask_however_they_are_written_down():
    assert probe_tokens(llama(eos_token_id=[3, 5], bos_token_id=4), 3) == [6, 7, 8]


def test_distance_is_a_share_of_the_spread_and_says_nothing_of_a_model_that_is_broken():
    own = torch.randn(5, 40, generator=torch.Generator().manual_seed(0))
    assert distance(own + 3.0, own) == pytest.approx(0, abs=1e-6)  # the same log-probs
    assert distance(own[:, torch.arange(39, -1, -1)], own) > 1
    assert distance(own, torch.full((5, 40), torch.nan)) is None
    assert distance(torch.zeros(5, 40), torch.zeros(5, 40)) == 0


def test_only_the_logits_that_are_needed_are_computed_where_a_model_can_choose():
    class Whole(LlamaForCausalLM):
        def forward(self, input_ids, position_ids=None, use_cache=None, **options):
            return super().forward(input_ids, position_ids=position_ids, use_cache=use_cache, **options)

    model = tiny_model("llama")
    assert usage(model).picks_logits
    assert not usage(Whole(model.config).eval()).picks_logits
