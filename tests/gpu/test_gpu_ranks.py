"""Ranks on a GPU: FSDP2 on one rank gives the bits of the plain policy, and so do two ranks that share the card.

Two ranks on one card exchange data through host memory, because NCCL refuses them.
"""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch
from gangs import run_gang
from learning_models import tiny_model
from learning_samples import make_samples

from offbeat.model.devices import be_deterministic
from offbeat.trainer.advantages import GaeSettings
from offbeat.trainer.policy import AdamSettings, Policy
from offbeat.trainer.sharded import ShardedPolicy
from offbeat.trainer.step import StepSettings, train_step

pytestmark = pytest.mark.gpu
GROUPS = [(5, [3, 9, 1, 4]), (2, [20, 4]), (7, [6, 2, 8]), (3, [5, 5])]
MIN_SPEED = 0.97
"""Least speed of FSDP2 on one rank, as a share of the plain policy's."""


def train(gang, dtype: torch.dtype, *, exact: bool, gae: bool = False, kind: str = "llama"):
    device = torch.device("cuda", 0)
    if exact:
        be_deterministic(device)
    model, options = tiny_model(kind).to(dtype), {"has_value_head": gae, "exact": exact}
    if gang is None:
        made = Policy(model.to(device), AdamSettings(), **options)
    else:
        made = ShardedPolicy(model, AdamSettings(), **options, gang=gang)
    settings = StepSettings(tokens_per_microbatch=24, gae=GaeSettings() if gae else None)
    for seed in range(4):
        train_step(made, make_samples(np.random.default_rng(seed), GROUPS), settings, 1e-2)
    return {name: tensor.float().cpu().numpy() for name, tensor in made.published.items()}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("gae", [False, True], ids=["full", "value head"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_one_rank_and_two_on_one_card_end_in_the_bits_of_the_plain_policy(dtype, gae):
    wanted = run_gang(1, train, dtype, exact=True, gae=gae, alone=True, device="cuda:0")[0]
    for size in (1, 2):
        found = run_gang(size, train, dtype, exact=True, gae=gae, device="cuda:0")[0]
        different = [name for name in wanted if not np.array_equal(found[name], wanted[name])]
        assert not different, f"{size} ranks: {different}"


@pytest.mark.timeout(600)
def test_one_rank_without_exact_ends_in_the_bits_of_the_plain_policy_too():
    wanted = run_gang(1, train, torch.bfloat16, exact=False, alone=True, device="cuda:0")[0]
    found = run_gang(1, train, torch.bfloat16, exact=False, device="cuda:0")[0]
    assert all(np.array_equal(found[name], wanted[name]) for name in wanted)


def time_steps(gang, num_steps: int = 5) -> float:
    """Seconds of the fastest step of a model of 0.3 billion parameters in bfloat16."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    device = torch.device("cuda", 0)
    config = Qwen2Config(
        vocab_size=32000,
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=16,
        num_attention_heads=16,
        num_key_value_heads=4,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(config).to(torch.bfloat16).eval()
    made = Policy(model.to(device), AdamSettings()) if gang is None else ShardedPolicy(model, AdamSettings(), gang=gang)
    rng, seconds = np.random.default_rng(0), []
    for _ in range(num_steps):
        samples = make_samples(rng, [(128, [512] * 8) for _ in range(8)])
        torch.cuda.synchronize(device)
        began_s = time.perf_counter()
        train_step(made, samples, StepSettings(tokens_per_microbatch=8192), 1e-5)
        torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - began_s)
    return min(seconds)


@pytest.mark.timeout(600)
def test_one_rank_trains_about_as_fast_as_the_plain_policy():
    plain_s = min(run_gang(1, time_steps, alone=True, device="cuda:0")[0] for _ in range(2))
    ranked_s = min(run_gang(1, time_steps, device="cuda:0")[0] for _ in range(2))
    assert plain_s / ranked_s >= MIN_SPEED, f"{plain_s:.3f} s alone, {ranked_s:.3f} s with FSDP2"
