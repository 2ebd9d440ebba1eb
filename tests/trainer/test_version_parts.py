"""The rows that ranks hold become the parts of a version, whatever training does meanwhile."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gangs import run_gang
from learning_models import tiny_model

from offbeat.trainer import snapshot, version_parts
from offbeat.trainer.policy import AdamSettings
from offbeat.trainer.sharded import ShardedPolicy
from offbeat.weights.divided import parts_of


def take(gang, has_memory, num_bucket_bytes):
    version_parts.BUCKET_BYTES = num_bucket_bytes
    if not has_memory and gang.rank == 1:
        snapshot.fits = lambda *_: False
    made = ShardedPolicy(tiny_model("llama").bfloat16(), AdamSettings(), gang=gang)
    whole = {name: tensor.view(torch.uint8).flatten().numpy() for name, tensor in made.published.items()}
    shapes, parts = made.own_parts()
    with torch.no_grad():  # the next step
        for master in made.masters:
            master.add_(1.0)
    return whole, list(shapes), [(key, data.numpy()) for key, data in parts], [key for key, _ in parts]


@pytest.mark.parametrize(
    "size, has_memory, num_bucket_bytes", [(2, True, 1000), pytest.param(3, False, 1 << 20, marks=pytest.mark.full)]
)
def test_parts_of_all_ranks_are_the_version_before_the_next_step(size, has_memory, num_bucket_bytes):
    told = run_gang(size, take, has_memory, num_bucket_bytes)
    whole = told[0][0]
    found = {key: data for _, _, parts, _ in told for key, data in parts}
    assert sum(len(parts) for _, _, parts, _ in told) == len(found), "each part belongs to one rank"
    for name, data in whole.items():
        for position, start, stop in parts_of(len(data)):
            assert np.array_equal(found[name, position], data[start:stop])
    for _, names, parts, again in told:
        assert names == list(whole)
        assert [key for key, _ in parts] == sorted(again), "in order, and there when they are read again"
