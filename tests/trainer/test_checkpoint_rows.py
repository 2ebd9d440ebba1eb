"""Checkpoints by rows: what some ranks have saved, any number of ranks loads, and learns on to the same bits."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from gangs import run_gang
from learning_models import tiny_model
from learning_samples import make_samples

from offbeat.errors import DeadlineError, DiskError, UserError
from offbeat.trainer.advantages import GaeSettings
from offbeat.trainer.checkpoint import Checkpoints
from offbeat.trainer.gang import Rank
from offbeat.trainer.microbatch_size import MicrobatchSize
from offbeat.trainer.policy import AdamSettings, Policy
from offbeat.trainer.sharded import ShardedPolicy
from offbeat.trainer.step import StepSettings, train_step
from offbeat.trainer.trainer import OneRank

GROUPS = [(5, [3, 9, 1, 4]), (2, [20, 4]), (7, [6, 2, 8])]
SETTINGS = StepSettings(tokens_per_microbatch=24, gae=GaeSettings())


def learn(gang, folder: Path, first: int, last: int) -> str:
    """Takes up step `first`, if there is one, trains up to step `last`, and saves; returns the bits of the weights."""
    model, options = tiny_model("llama"), {"has_value_head": True, "exact": True}
    if gang is None:
        made: Policy = Policy(model, AdamSettings(), **options)
        rank = OneRank(made, None, SETTINGS, MicrobatchSize(24), Checkpoints(folder))
    else:
        made = ShardedPolicy(model, AdamSettings(), **options, gang=gang)
        rank = Rank(gang, made, None, SETTINGS, MicrobatchSize(24), Checkpoints(folder))
    if first:
        assert (rank.load(first) if gang is None else rank.load_rows(first)).step == first
    for step in range(first, last):
        train_step(made, make_samples(np.random.default_rng(step), GROUPS), SETTINGS, 1e-2)
    if gang is None:
        rank.begin_save(last, last)[0]()
    else:
        draft = Path(
            gang.gather(str(rank.checkpoints.begin_rows(last)).encode() if gang.rank == 0 else b"")[0].decode()
        )
        rank.save_rows(draft)
        if gang.rank == 0:
            rank.checkpoints.finish_rows(draft, last, last, gang.size, 60.0)
        gang.gather(b"")
    return str({name: tensor.tolist() for name, tensor in made.published.items()}) + str(torch.rand(2).tolist())


@pytest.mark.full
def test_resuming_on_other_numbers_of_ranks_ends_in_the_same_bits(tmp_path):
    wanted = run_gang(1, learn, tmp_path / "whole", 0, 4, alone=True)[0]
    for step, size in enumerate((2, 1, 3, 2)):
        found = run_gang(size, learn, tmp_path / "changing", step, step + 1, alone=size == 1)[0]
    assert found == wanted
    manifests = [json.loads(file.read_text()) for file in sorted((tmp_path / "changing").glob("*/manifest.json"))]
    assert [(manifest["format"], len(manifest["files"])) for manifest in manifests] == [(2, 3), (2, 2)]


def save_two(folder: Path) -> tuple[Checkpoints, Path]:
    checkpoints = Checkpoints(folder)
    draft = checkpoints.begin_rows(1)
    checkpoints.save_rows(draft, 0, {"rng.cpu": torch.get_rng_state(), "master.a": torch.ones(3, 2)}, {"master.a": 0})
    checkpoints.save_rows(draft, 1, {"master.a": torch.zeros(2, 2)}, {"master.a": 3})
    return checkpoints, draft


def test_a_reader_gets_only_the_rows_that_it_asks_for(tmp_path):
    checkpoints, draft = save_two(tmp_path)
    checkpoints.finish_rows(draft, 1, 1, 2, 1.0)
    manifest = checkpoints.read_manifest(1)
    found = checkpoints.read(1, manifest, lambda name: (2, 2) if name == "master.a" else None)
    assert found["master.a"].tolist() == [[1, 1], [0, 0]]
    assert checkpoints.load(1)[1]["master.a"].sum() == 6


def test_a_damaged_part_is_named(tmp_path):
    checkpoints, draft = save_two(tmp_path)
    file = checkpoints.finish_rows(draft, 1, 1, 2, 1.0) / "rank1.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    with pytest.raises(UserError, match=r"rank1\.safetensors is damaged"):
        checkpoints.load(1)


def test_a_rank_that_does_not_write_its_part_is_named_and_leaves_no_checkpoint(tmp_path):
    checkpoints, draft = save_two(tmp_path)
    with pytest.raises(DeadlineError, match="rank 2 has not written its part of the checkpoint of step 1"):
        checkpoints.finish_rows(draft, 1, 1, 3, 0.1)
    assert checkpoints.steps() == []


def test_a_rank_whose_disk_is_full_is_named_and_earlier_checkpoints_stay(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, 1, {})
    draft = checkpoints.begin_rows(2)
    checkpoints.save_rows(draft, 0, {}, {})
    (draft / "rank1.safetensors").mkdir()  # where no file can be written
    checkpoints.save_rows(draft, 1, {}, {})
    with pytest.raises(DiskError, match=r"rank 1: .*the checkpoint of step 1 is intact"):
        checkpoints.finish_rows(draft, 2, 2, 2, 1.0)
    assert checkpoints.steps() == [1]
    assert not draft.exists()
