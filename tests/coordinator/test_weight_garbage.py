"""What is deleted of a run's weights, and what is not, on real files."""

import asyncio

import torch

from offbeat.coordinator.maintenance import WeightGarbageCollector
from offbeat.weights.collect import EVERY
from offbeat.weights.manifest import Anchoring
from offbeat.weights.piece_store import FolderStore
from offbeat.weights.publish import Publisher
from offbeat.weights.signing import SigningKey
from offbeat.weights.version import WeightFolder


def published(folder, num_versions, key, every=3):
    """A run's weights after some versions; returns its store."""
    store = FolderStore(folder)
    publisher = Publisher(folder, store, key, Anchoring(every))
    weights = torch.randn(64, 64).bfloat16()
    for number in range(num_versions):
        weights = weights.clone()
        weights[number % 64, number % 64] += 1.0
        publisher.write(number, number, number - 1 if number else None, {"w": weights})
    return store


def numbers(store):
    return sorted({number for number, _ in store.list_manifests()})


def test_whole_files_are_kept_while_they_are_in_use(tmp_path):
    published(tmp_path, 4, SigningKey.generate())
    asyncio.run(WeightGarbageCollector(WeightFolder(tmp_path)).files([2, 3]))
    assert sorted(path.name for path in tmp_path.glob("0*")) == ["00000002", "00000003"]


def test_pieces_are_kept_of_what_is_needed_and_of_what_that_stands_on(tmp_path):
    key = SigningKey.generate()
    store = published(tmp_path, 8, key)  # 0, 3 and 6 are full
    clearing = WeightGarbageCollector(None, store)
    asyncio.run(clearing.pieces([5, 6, 7], [key.public]))
    assert numbers(store) == [3, 4, 5, 6, 7]
    asyncio.run(clearing.pieces([7], [key.public]))
    assert numbers(store) == [6, 7]
    assert [clearing.is_due(number) for number in (EVERY - 1, EVERY)] == [False, True]


def test_what_another_run_left_in_the_same_place_is_left_alone(tmp_path):
    store = published(tmp_path, 3, SigningKey.generate())
    asyncio.run(WeightGarbageCollector(None, store).pieces([], [SigningKey.generate().public]))
    assert numbers(store) == [0, 1, 2]


def test_a_store_that_cannot_be_reached_ends_nothing(tmp_path, caplog):
    key = SigningKey.generate()
    store = published(tmp_path / "store", 2, key)
    (tmp_path / "store" / "manifests").rename(tmp_path / "elsewhere")
    (tmp_path / "store" / "manifests").write_text("no folder")
    asyncio.run(WeightGarbageCollector(None, store).pieces([], [key.public]))
    assert "could not be deleted" in caplog.text
