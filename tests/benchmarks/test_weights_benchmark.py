"""Recorded and made-up updates are what they say they are."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from benchmarks.weights import recording
from benchmarks.weights.passes import STAGES, Model, Passes
from benchmarks.weights.record import Recorder
from benchmarks.weights.sequences import MadeUp, Recorded, read_sequences
from benchmarks.weights.sizes import entropy_bits
from offbeat.errors import UserError
from offbeat.weights.codec import find_changes


def versions(count: int) -> list[dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    found = [{"a": torch.randn(300, 70).bfloat16(), "b": torch.randn(900).bfloat16()}]
    while len(found) < count:
        before = found[-1]
        found.append({name: (tensor + (torch.rand(tensor.shape) < 0.02)).bfloat16() for name, tensor in before.items()})
    return found


def recorded(made: list[dict[str, torch.Tensor]]) -> recording.Recording:
    recorder = Recorder(made[0])
    for tensors in made[1:]:
        recorder.add(tensors, mean_reward=0.5)
    return recorder.recording(lr=1e-6)


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def test_a_recording_gives_back_every_step_to_the_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    made = versions(4)
    monkeypatch.setattr(recording, "FILE_BYTES", 500)
    save_file(made[0], tmp_path / "model.safetensors")
    assert len(recording.write(recorded(made), tmp_path)) > 2
    (sequence,) = read_sequences(tmp_path, tmp_path)
    assert isinstance(sequence, Recorded)
    assert (sequence.lr, sequence.is_real, sequence.name) == (1e-6, True, "recorded, lr 1e-06")
    for name, part in zip(("a", "b"), sequence.parts(), strict=True):
        pairs = [(update.step, update.new.tobytes(), update.old.tobytes()) for update in part()]
        assert pairs == [(step, raw(made[step][name]), raw(made[step - 1][name])) for step in (1, 2, 3)]
    counted = [step.num_changed for step in sequence.recording.header.steps]
    wanted = [sum(int((after[n] != before[n]).sum()) for n in after) for before, after in pairwise(made)]
    assert counted == wanted


def test_a_sample_keeps_whole_parts_within_its_room(tmp_path: Path):
    whole = recorded(versions(3))
    some = recording.sample(whole, whole.num_bytes - 1)
    assert [part.tensor for part in some.header.parts] in (["a"], ["b"])
    assert some.num_bytes < whole.num_bytes
    save_file(versions(1)[0], tmp_path / "model.safetensors")
    recording.write(some, tmp_path)
    (sequence,) = read_sequences(tmp_path, tmp_path)
    assert "of the parts" in sequence.name


def test_a_recording_on_other_weights_or_without_a_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    made = versions(4)
    monkeypatch.setattr(recording, "FILE_BYTES", 500)
    files = recording.write(recorded(made), tmp_path)
    save_file(made[1], tmp_path / "model.safetensors")
    with pytest.raises(UserError, match="not the weights that"):
        read_sequences(tmp_path, tmp_path)
    files[-1].unlink()
    with pytest.raises(UserError, match="copy them all"):
        read_sequences(tmp_path, tmp_path)


def test_consecutive_files_are_steps(tmp_path: Path):
    made = versions(3)
    for number, tensors in enumerate(made):
        save_file(tensors, tmp_path / f"{number}.safetensors")
    (sequence,) = read_sequences(tmp_path, None)
    found = [(update.step, update.new.tobytes()) for part in sequence.parts() for update in part()]
    assert sorted(found) == sorted((step, raw(made[step][name])) for step in (1, 2) for name in ("a", "b"))
    (tmp_path / "0.safetensors").unlink()
    (tmp_path / "1.safetensors").unlink()
    with pytest.raises(UserError, match="at least two"):
        read_sequences(tmp_path, None)


def test_a_made_up_update_changes_more_at_a_larger_rate_and_less_than_all():
    def density(lr: float) -> float:
        (part,) = MadeUp("test", {"w": (300, 300)}, lr, num_steps=5).parts()
        return float(np.mean([find_changes(new, old, "BF16").positions.size / 90_000 for _, new, old in part()]))

    assert 0.005 < density(1e-6) < density(3e-6) < density(1e-5) < 0.3


def test_the_entropy_of_half_and_half_is_two_bits_a_change_and_a_bit_for_its_sign():
    assert entropy_bits(1000, 500) == pytest.approx(1000 + 500)
    assert entropy_bits(1024, 1) == pytest.approx(math.log2(1024) + 1023 * math.log2(1024 / 1023) + 1)
    assert entropy_bits(10, 10) == pytest.approx(10)


def test_what_is_applied_is_what_was_published(tmp_path: Path):
    model = Model(1, density=0.01)
    model.bits = {name: bits[:5000] for name, bits in model.bits.items()}
    run = Passes(model, tmp_path)
    for _ in range(2):
        seconds = run.round()
    assert set(seconds) >= {"memcpy", "publish", "apply", *STAGES["publish"], *STAGES["apply"]}
    published, applied = run.publisher.path(2) / "model.safetensors", tmp_path / "applied" / "2" / "model.safetensors"
    assert published.read_bytes() == applied.read_bytes()
