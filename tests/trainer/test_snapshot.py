import logging

import torch

from offbeat.trainer import snapshot
from offbeat.trainer.snapshot import SAFE_SHARE, Snapshot, fits

TENSORS = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.tensor(7, dtype=torch.int16), "empty": torch.zeros(0)}


def test_a_snapshot_stays_as_it_is_when_the_tensors_change():
    tensors = {name: tensor.clone() for name, tensor in TENSORS.items()}
    taken = Snapshot("a test").take(tensors)
    tensors["a"].add_(1)
    assert taken.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert (torch.equal(taken[name], tensor), taken[name].dtype) == (True, tensor.dtype)


def test_the_next_snapshot_takes_the_same_memory_and_more_for_new_tensors_alone():
    kept = Snapshot("a test")
    first = kept.take({"a": TENSORS["a"]})
    second = kept.take({"a": TENSORS["a"] + 1, "b": TENSORS["b"]})
    assert second["a"].data_ptr() == first["a"].data_ptr()
    assert torch.equal(second["a"], TENSORS["a"] + 1)


def test_a_tensor_that_is_not_contiguous_is_copied_as_it_looks():
    taken = Snapshot("a test").take({"a": TENSORS["a"].T})
    assert torch.equal(taken["a"], TENSORS["a"].T)
    assert taken["a"].is_contiguous()


def test_without_room_there_is_no_snapshot_and_one_warning(monkeypatch, caplog):
    monkeypatch.setattr(snapshot, "host_memory", lambda: (10, 10))
    kept = Snapshot("a test")
    with caplog.at_level(logging.WARNING):
        assert kept.take(TENSORS) is None
        assert kept.take(TENSORS) is None
    assert len(caplog.records) == 1
    monkeypatch.setattr(snapshot, "host_memory", lambda: (10**9, 10**9))
    assert kept.take(TENSORS) is not None


def test_a_snapshot_leaves_a_part_of_the_free_memory_to_others():
    assert fits(int(100 * SAFE_SHARE), 100)
    assert not fits(100, 100)
