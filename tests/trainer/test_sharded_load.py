"""Ranks that read only their rows of a model's files begin with the weights of one that loads it whole."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gangs import run_gang
from learning_models import KINDS, tiny_model
from learning_samples import make_samples

from offbeat.model.loading import load_model, load_without_weights
from offbeat.trainer.policy import AdamSettings, Policy
from offbeat.trainer.sharded import ShardedPolicy
from offbeat.trainer.step import StepSettings, train_step

GROUPS = [(5, [3, 9, 1, 4]), (2, [20, 4])]


def load_and_train(gang, path: str, dtype: torch.dtype):
    if gang is None:
        made = Policy(load_model(path, dtype, torch.device("cpu")), AdamSettings(), exact=True)
    else:
        model = load_without_weights(path, dtype) or load_model(path, dtype, torch.device("cpu"))
        made = ShardedPolicy(model, AdamSettings(), exact=True, gang=gang, path=path)
    begun = {name: tensor.float().numpy().copy() for name, tensor in made.published.items()}
    samples = make_samples(np.random.default_rng(0), GROUPS)
    train_step(made, samples, StepSettings(tokens_per_microbatch=24), 1e-2)
    return begun, {name: tensor.float().numpy() for name, tensor in made.published.items()}


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_of_the_files_are_those_of_the_whole_model(tmp_path, kind, dtype):
    tiny_model(kind).save_pretrained(tmp_path)
    wanted = run_gang(1, load_and_train, str(tmp_path), dtype, alone=True)[0]
    found = run_gang(3, load_and_train, str(tmp_path), dtype)[0]
    for one, other in zip(found, wanted, strict=True):
        assert one.keys() == other.keys()
        assert all(np.array_equal(one[name], other[name]) for name in other)


def test_buffers_and_ties_are_those_of_the_loaded_model(tmp_path):
    tiny_model("llama").save_pretrained(tmp_path)
    empty = load_without_weights(str(tmp_path), torch.bfloat16)
    whole = load_model(str(tmp_path), torch.bfloat16, torch.device("cpu"))
    assert all(parameter.is_meta for parameter in empty.parameters())
    assert empty.lm_head.weight is empty.model.embed_tokens.weight
    assert {name: buffer.tolist() for name, buffer in empty.named_buffers()} == {
        name: buffer.tolist() for name, buffer in whole.named_buffers()
    }
    assert [(name, p.dtype) for name, p in empty.named_parameters()] == [
        (name, p.dtype) for name, p in whole.named_parameters()
    ]


def test_a_model_whose_files_have_other_names_is_loaded_whole(tmp_path):
    from safetensors.torch import load_file, save_file

    tiny_model("qwen2").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["other.name"] = tensors.pop("model.norm.weight")
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    assert load_without_weights(str(tmp_path), torch.float32) is None
