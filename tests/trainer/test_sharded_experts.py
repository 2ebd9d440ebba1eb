"""Models of experts on several ranks learn what one rank learns, and plain transformers loads what they publish."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gangs import run_gang
from learning_samples import make_samples
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from offbeat.model.devices import spare
from offbeat.model.loading import load_model, load_state
from offbeat.trainer.policy import AdamSettings, Policy
from offbeat.trainer.sharded import ShardedPolicy
from offbeat.trainer.step import StepSettings, train_step

SMALL = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
SMALL |= {"num_attention_heads": 2, "num_key_value_heads": 1, "eos_token_id": 0, "bos_token_id": 0}
KINDS = {
    "qwen3_moe": {"head_dim": 16, "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
}


def made(kind):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SMALL, **KINDS[kind])).eval()
    model.config.use_cache = False
    return model


def train(gang, kind):
    model = spare(made(kind))
    policy = Policy(model, AdamSettings(), exact=True) if gang is None else None
    policy = policy or ShardedPolicy(model, AdamSettings(), exact=True, gang=gang)
    for step in range(3):
        samples = make_samples(np.random.default_rng(step), [(5, [3, 9, 1, 4]), (2, [20, 4]), (7, [6, 2])])
        train_step(policy, samples, StepSettings(tokens_per_microbatch=24), 1e-2)
    return {name: tensor.numpy().copy() for name, tensor in policy.published.items()}


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
def test_experts_learn_the_same_bits_on_ranks_and_transformers_loads_their_version(kind, tmp_path):
    alone = run_gang(1, train, kind, alone=True)[0]
    for size in (2, 3):
        found = run_gang(size, train, kind)[0]
        assert found.keys() == alone.keys()
        assert all(np.array_equal(found[name], alone[name]) for name in alone), f"{size} ranks"
    begun = {name: tensor.detach().numpy() for name, tensor in made(kind).named_parameters()}
    assert any(not np.array_equal(alone[name], begun[name]) for name in begun if "experts" in name), "experts learn"

    ours = made(kind)
    load_state(ours, {name: torch.from_numpy(array) for name, array in alone.items()})  # as the embedded engine does
    ours.save_pretrained(tmp_path)  # as `offbeat export` does
    stored = load_file(tmp_path / "model.safetensors")
    assert any(".experts.3." in name for name in stored), "names are those of the model's own files"
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    tokens = torch.arange(12)[None]
    with torch.no_grad():
        assert torch.equal(theirs(input_ids=tokens).logits, ours(input_ids=tokens).logits)
    again = load_model(str(tmp_path), torch.float32, torch.device("cpu"))
    assert all(np.array_equal(tensor.detach().numpy(), alone[name]) for name, tensor in again.named_parameters())
