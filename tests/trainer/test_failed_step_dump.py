"""A batch that a step broke on comes back from its file as it was, with the weights beside it."""

import os

import numpy as np
import pytest
from faulty_disk import no_file_over

from offbeat.errors import UserError
from offbeat.ledger.records import Batch, BatchGroup, Member
from offbeat.trainer import not_finite
from offbeat.trainer.not_finite import FORMAT, FailedStepDump, NotFinite, read, save, weights_of
from offbeat.trainer.packing import samples_of
from offbeat.trajectory import End, Origin, Reward, Segment, Trajectory


def member(task, num_tokens):
    trajectory = Trajectory(task, np.arange(1, 4), max_new_tokens=9)
    logprobs = -np.linspace(0.1, 1, num_tokens, dtype=np.float32)
    trajectory.append(Segment(0, np.arange(num_tokens), Origin.SAMPLED, logprobs, 3, 3, "w", "e", {"x": logprobs * 2}))
    trajectory.append(Segment(num_tokens, np.array([7]), Origin.GIVEN), End.STOP)
    ages = np.array([*range(num_tokens), -1], np.int32)
    return Member(task, task % 2, trajectory, (Reward(0.5, "right", -1, 2.0), Reward(1.0)), 2.0, ages)


BATCH = Batch(
    12, None, (BatchGroup(5, 4, "sums", (member(40, 2), member(41, 3))), BatchGroup(6, 5, "", (member(44, 1),)))
)


def kept(**how):
    return FailedStepDump(
        FORMAT, BATCH, 13, 1e-4, "the loss", 2, 0, 0, {"model": {"path": "x"}, "task": [{"level": 1}]}, **how
    )


@pytest.fixture
def weights(tmp_path):
    folder = tmp_path / "weights" / "00000013"
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(b"weights" * 1000)
    return folder


def test_everything_comes_back_as_it_was(tmp_path, weights):
    file = save(tmp_path / "broken", kept(), weights)
    assert file.name == "step-00000013.batch"
    found = read(file)
    assert (found.version, found.lr, found.tensor, found.sample, found.token) == (13, 1e-4, "the loss", 2, 0)
    assert found.config == kept().config
    assert found.batch.step == 12
    assert [m.trajectory for m in found.members] == [m.trajectory for m in kept().members]
    assert [m.rewards for m in found.members] == [m.rewards for m in kept().members]
    for new, old in zip(samples_of(found.batch), samples_of(BATCH), strict=True):
        for name in ("prompt", "response", "logprobs", "mask", "staleness"):
            np.testing.assert_array_equal(getattr(new, name), getattr(old, name))
        assert (new.group, new.reward, new.rewards) == (old.group, old.reward, old.rewards)


def test_weights_stay_when_their_version_goes_and_take_no_room_of_their_own(tmp_path, weights):
    beside = weights_of(save(tmp_path / "broken", kept(), weights)) / "model.safetensors"
    assert beside.samefile(weights / "model.safetensors")
    (weights / "model.safetensors").unlink()
    assert beside.read_bytes() == b"weights" * 1000


def test_on_a_disk_that_knows_no_links_weights_are_copied(tmp_path, weights, monkeypatch):
    def refuse(*_):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    beside = weights_of(save(tmp_path / "broken", kept(), weights)) / "model.safetensors"
    assert beside.read_bytes() == b"weights" * 1000
    assert not beside.samefile(weights / "model.safetensors")


def test_weights_that_are_gone_cost_nothing_but_themselves(tmp_path):
    file = save(tmp_path / "broken", kept(), tmp_path / "nowhere")
    assert read(file).version == 13


def test_a_second_break_at_the_same_step_takes_the_place_of_the_first(tmp_path, weights):
    save(tmp_path / "broken", kept(), weights)
    assert read(save(tmp_path / "broken", kept(), weights)).version == 13


def test_a_full_disk_leaves_no_half_file(tmp_path, weights):
    with no_file_over(10), pytest.raises(OSError, match=r"large|space"):
        save(tmp_path / "broken", kept(), weights)
    assert list((tmp_path / "broken").glob("*.batch")) == []
    assert list((tmp_path / "broken").glob(".*")) == []


def test_what_is_no_saved_batch_is_told(tmp_path, weights):
    file = save(tmp_path / "broken", kept(), weights)
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match=r"is damaged or not a saved batch"):
        read(file)
    with pytest.raises(UserError, match="cannot be read: No such file"):
        read(tmp_path / "nothing.batch")


def test_a_file_of_another_format_is_told(tmp_path, weights, monkeypatch):
    file = save(tmp_path / "broken", kept(), weights)
    monkeypatch.setattr(not_finite, "FORMAT", 2)
    with pytest.raises(UserError, match="format 1, this Offbeat reads format 2; use the version"):
        read(file)


def test_a_place_is_told_by_its_task():
    assert not_finite.locate(NotFinite("x"), BATCH) == (None, "")
    assert not_finite.locate(NotFinite("x", 1), BATCH) == (41, "task 41")
    assert not_finite.locate(NotFinite("x", 2, 0), BATCH) == (44, "task 44, token 0")
