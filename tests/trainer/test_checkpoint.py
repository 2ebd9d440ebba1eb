import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from learning_models import tiny_model
from learning_samples import make_samples

from offbeat.errors import OffbeatError, UserError
from offbeat.trainer import checkpoint
from offbeat.trainer.checkpoint import Checkpoints
from offbeat.trainer.policy import AdamSettings, Policy
from offbeat.trainer.step import StepSettings, train_step
from offbeat.weights.version import Adapter


def trained_policy():
    policy = Policy(tiny_model("llama"), AdamSettings())
    train_step(policy, make_samples(np.random.default_rng(0), [(3, [4, 5])]), StepSettings(), lr=1e-2)
    return policy


def test_what_was_saved_comes_back_to_the_bit_with_the_random_state(tmp_path):
    policy, checkpoints = trained_policy(), Checkpoints(tmp_path)
    torch.manual_seed(7)
    checkpoints.save(3, 5, policy.state())
    drawn = torch.rand(4)
    manifest, state = checkpoints.load(3)
    assert (manifest.step, manifest.version) == (3, 5)
    assert torch.equal(torch.rand(4), drawn)
    assert state.keys() == policy.state().keys()
    assert all(torch.equal(state[name], tensor) for name, tensor in policy.state().items())


def test_its_files_are_flushed_to_the_disk_before_it_gets_its_name(tmp_path, monkeypatch):
    done, fsync, replace = [], os.fsync, checkpoint.replace_folder

    def noting(handle: int) -> None:
        done.append(Path(os.readlink(f"/proc/self/fd/{handle}")).name)
        fsync(handle)

    def renaming(draft: Path, final: Path) -> None:
        done.append("named")
        replace(draft, final)

    monkeypatch.setattr(os, "fsync", noting)
    monkeypatch.setattr(checkpoint, "replace_folder", renaming)
    Checkpoints(tmp_path).save(1, 1, trained_policy().state())
    assert {"rank0.safetensors", "manifest.json"} <= set(done[: done.index("named")])


def test_a_checkpoint_of_a_machine_with_more_devices_is_taken_up_here(tmp_path):
    policy, checkpoints = trained_policy(), Checkpoints(tmp_path)
    beyond = f"rng.cuda.{torch.cuda.device_count()}"
    checkpoints.save(1, 1, {**policy.state(), beyond: torch.get_rng_state()})
    assert checkpoints.load(1)[1].keys() == policy.state().keys()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_the_random_state_of_a_cuda_device_comes_back_too(tmp_path):
    policy, checkpoints = trained_policy(), Checkpoints(tmp_path)
    torch.cuda.manual_seed_all(7)
    checkpoints.save(3, 5, policy.state())
    drawn = torch.rand(4, device="cuda")
    checkpoints.load(3)
    assert torch.equal(torch.rand(4, device="cuda"), drawn)


def test_only_the_latest_are_kept(tmp_path):
    policy, checkpoints = trained_policy(), Checkpoints(tmp_path, keep=2)
    for step in (1, 2, 3):
        checkpoints.save(step, step, policy.state())
    assert checkpoints.steps() == [2, 3]


def test_a_damaged_file_is_refused_by_name(tmp_path):
    policy, checkpoints = trained_policy(), Checkpoints(tmp_path)
    file = checkpoints.save(1, 1, policy.state()) / "rank0.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(UserError, match=r"rank0\.safetensors is damaged; remove"):
        checkpoints.load(1)


def test_a_damaged_manifest_is_refused_by_name(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    folder = checkpoints.save(1, 1, trained_policy().state())
    for text in ("", "{", "[]", "{}"):
        (folder / "manifest.json").write_text(text)
        with pytest.raises(UserError, match=r"manifest\.json is damaged; remove .*00000001 to resume from"):
            checkpoints.load(1)


def test_a_draft_that_a_dead_process_left_is_no_checkpoint(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    (tmp_path / ".00000004.draft").mkdir()
    (tmp_path / "00000005").mkdir()
    assert checkpoints.steps() == []


def test_a_failed_write_leaves_the_earlier_checkpoint_and_says_so(tmp_path, monkeypatch):
    policy, checkpoints = trained_policy(), Checkpoints(tmp_path, keep=1)
    checkpoints.save(1, 1, policy.state())

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("offbeat.trainer.checkpoint.write_at", full)
    with pytest.raises(OffbeatError, match=r"step 2 .*No space left.*step 1 is intact"):
        checkpoints.save(2, 2, policy.state())
    assert checkpoints.steps() == [1]
    assert [p.name for p in tmp_path.iterdir()] == ["00000001"]


def adapter(base: str = "b" * 64, **config: object) -> Adapter:
    return Adapter(base, json.dumps({"r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]} | config), dict)


@pytest.mark.parametrize(
    ("saved", "now", "told"),
    [
        (
            None,
            adapter(),
            "the checkpoint holds all weights, but an adapter would be trained; set model.lora_rank back",
        ),
        (
            adapter(),
            None,
            "the checkpoint holds an adapter, but all weights would be trained; set model.lora_rank back",
        ),
        (adapter(), adapter(r=8), "the checkpoint has model.lora_rank = 4, but the run has 8; set it back"),
        (adapter(), adapter(lora_alpha=9), "the checkpoint has model.lora_alpha = 8, but the run has 9"),
        (adapter(), adapter(target_modules=["o"]), r"model.lora_targets = \['q_proj'\], but the run has \['o'\]"),
        (adapter(), adapter("c" * 64), "a model with digest bbbbbbbbbbbb, but model.path has cccccccccccc"),
        (adapter(), adapter(peft_type="X"), "differ in configuration; use the version of Offbeat that wrote"),
    ],
)
def test_a_checkpoint_of_other_parts_of_the_model_is_refused_with_what_to_set_back(saved, now, told, tmp_path):
    Checkpoints(tmp_path, adapter=saved).save(1, 1, {})
    Checkpoints(tmp_path, adapter=saved).load(1)
    with pytest.raises(UserError, match=told):
        Checkpoints(tmp_path, adapter=now).load(1)
