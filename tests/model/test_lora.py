"""Adapters in a model: they begin as nothing, leave its own weights alone, and are what peft makes of their files."""

import json
import sys

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, PreTrainedModel

from offbeat.errors import UserError
from offbeat.model.loading import state_tensors
from offbeat.model.lora import (
    AdapterDisabled,
    Lora,
    adapter_tensors,
    attach,
    base_tensors,
    describe,
    find_layers,
    load_adapted,
    merge,
    published_tensors,
)
from offbeat.trainer import attention
from offbeat.trainer.packing import Sample, pack
from offbeat.trainer.policy import AdamSettings, Policy
from offbeat.weights.publish import Publisher
from offbeat.weights.version import Adapter, weights_digest

peft = pytest.importorskip("peft")
CPU = torch.device("cpu")
LORA = Lora(rank=4, alpha=8.0)
TOKENS = torch.arange(3, 20)[None]
NUM_LLAMA_LAYERS = 2 * 7


def make(kind: str = "llama", **changes) -> PreTrainedModel:
    torch.manual_seed(0)
    if kind == "gpt2":  # its layers keep their weights the other way round
        config = GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=64, **changes)
        config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    else:
        sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
        config = LlamaConfig(vocab_size=64, max_position_embeddings=64, **sizes, **changes)
    return AutoModelForCausalLM.from_config(config).eval()


def adapted(
    kind: str = "llama", dtype: torch.dtype = torch.float32, *, lora: Lora = LORA, **changes
) -> PreTrainedModel:
    """With adapters that do something."""
    model = make(kind, **changes).to(dtype)
    attach(model, lora, seed=1)
    random = torch.Generator().manual_seed(2)
    for name, tensor in adapter_tensors(model).items():
        if ".lora_B." in name:
            tensor.copy_(torch.randn(tensor.shape, generator=random) * 0.2)
    return model


@torch.no_grad()
def logits(model: PreTrainedModel) -> torch.Tensor:
    return model(TOKENS).logits


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_model_with_new_adapters_is_the_model_without_to_the_bit(kind):
    plain, model = make(kind), make(kind)
    attach(model, LORA)
    assert torch.equal(logits(model), logits(plain))
    assert weights_digest(base_tensors(model)) == weights_digest(state_tensors(plain))


def test_adapters_begin_as_the_seed_says_whatever_was_drawn_before():
    def first(seed: int, num_drawn: int) -> str:
        model = make()
        torch.rand(num_drawn)
        state = torch.get_rng_state()
        attach(model, LORA, seed)
        assert torch.equal(torch.get_rng_state(), state), "others' random numbers are left alone"
        return weights_digest(adapter_tensors(model))

    assert first(1, 0) == first(1, 5) != first(2, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_adapter_has_the_dtype_of_the_model_and_is_all_that_a_version_holds(dtype):
    model = make().to(dtype)
    assert published_tensors(model).keys() == state_tensors(model).keys()
    attach(model, LORA)
    found = published_tensors(model)
    assert {tensor.dtype for tensor in found.values()} == {dtype}
    assert len(found) == 2 * NUM_LLAMA_LAYERS
    assert all(name.startswith("base_model.model.model.layers.") for name in found)
    assert not found.keys() & state_tensors(make()).keys()


def test_all_linear_layers_but_the_output_get_an_adapter_unless_some_are_named():
    model = make()
    assert len(find_layers(model, ())) == NUM_LLAMA_LAYERS
    assert find_layers(model, ("q_proj",)) == [f"model.layers.{i}.self_attn.q_proj" for i in range(2)]
    assert find_layers(model, ("layers.1.mlp.up_proj",)) == ["model.layers.1.mlp.up_proj"]
    assert find_layers(model, ("lm_head",)) == ["lm_head"]


@pytest.mark.parametrize(
    "target, told",
    [("qproj", "did you mean 'q_proj'"), ("mlp", "there are down_proj, gate_proj"), ("proj", "no linear layer")],
)
def test_a_target_that_does_not_exist_is_refused_with_the_nearest(target, told):
    with pytest.raises(UserError, match=f"model.lora_targets = '{target}': .*{told}"):
        find_layers(make(), (target,))


def test_a_target_that_does_not_exist_is_told_before_the_weights_are_read(tmp_path):
    make().save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(UserError, match=r"model\.lora_targets"):
        load_adapted(tmp_path, torch.float32, CPU, Lora(4, 8.0, ("q",)), seed=0)


def test_a_missing_peft_is_told_in_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(UserError, match=r"model\.lora_rank needs the package peft .*pip install 'offbeat\[lora\]'"):
        load_adapted("offbeat-tiny", torch.float32, CPU, LORA, seed=0)


def test_an_output_layer_that_shares_its_weights_cannot_have_one():
    with pytest.raises(UserError, match="shares the input layer's weights"):
        find_layers(make(tie_word_embeddings=True), ("lm_head",))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_training_moves_the_adapter_and_no_bit_of_the_rest(dtype):
    model = make().to(dtype)
    attach(model, LORA)
    before, base = weights_digest(adapter_tensors(model)), weights_digest(base_tensors(model))
    policy = Policy(model, AdamSettings())
    batch = pack([_sample()], [0], CPU)
    for _ in range(2):
        policy.forward_backward(batch, lambda found: -found.logprobs.sum())
        policy.update(1e-2)
    assert weights_digest(base_tensors(model)) == base
    assert weights_digest(adapter_tensors(model)) != before
    state = policy.state()
    assert all(".lora_" in name for name in state)
    assert {tensor.dtype for tensor in state.values()} == {torch.float32}


def test_without_its_adapters_a_model_is_what_it_was_and_then_has_them_again():
    plain, model = make(), adapted()
    for each in (plain, model):
        attention.use_packed_attention(each)
    policy, batch = Policy(model, AdamSettings()), pack([_sample()], [0], CPU)
    with_adapters = policy.logprobs(batch)
    expected = Policy(plain, AdamSettings()).logprobs(batch)
    assert torch.equal(policy.logprobs(batch, AdapterDisabled(model)), expected)
    assert not torch.allclose(with_adapters, expected)
    assert torch.equal(policy.logprobs(batch), with_adapters)
    policy.forward_backward(batch, lambda found: -found.logprobs.sum())
    assert all(parameter.grad is not None for parameter in policy.parameters)


@pytest.mark.parametrize("lora", [LORA, Lora(3, 1.5, ("q_proj", "down_proj"))], ids=["all", "some"])
def test_peft_reads_what_is_published(tmp_path, lora):
    model = adapted(lora=lora)
    adapter = Adapter(weights_digest(base_tensors(model)), describe(model, lora), lambda: {})
    version = Publisher(tmp_path, adapter=adapter).write(0, 0, None, adapter_tensors(model))
    theirs = peft.PeftModel.from_pretrained(make(), version.path)
    assert torch.equal(logits(theirs), logits(model))
    assert not torch.allclose(logits(make()), logits(model), atol=1e-2)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_merged_model_computes_the_same(kind):
    model, plain = adapted(kind), make(kind)
    merge(plain, adapter_tensors(model), json.loads(describe(model, LORA)))
    assert torch.allclose(logits(plain), logits(model), atol=1e-5)
    assert not torch.allclose(logits(make(kind)), logits(model), atol=1e-2)


def _sample() -> Sample:
    response = np.arange(5, 14)
    ones = np.ones(len(response))
    return Sample(0, np.arange(1, 6), response, -ones.astype(np.float32), ones.astype(bool), reward=1.0)
