"""Ranks on a GPU: FSDP2 on one rank gives the bits of the plain policy, and so do two ranks that share the card.

Two ranks on one card exchange data through host memory, because NCCL refuses them.
"""

from __future__ import annotations

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
