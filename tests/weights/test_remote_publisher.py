import torch

from offbeat.tools.export import read
from offbeat.weights.manifest import Anchoring
from offbeat.weights.piece_store import FolderStore
from offbeat.weights.publish import RemotePublisher
from offbeat.weights.signing import SigningKey


def test_a_trainer_elsewhere_keeps_the_newest_version_and_its_chain_alone(tmp_path):
    store, weights = FolderStore(tmp_path), torch.randn(32, 32).bfloat16()
    publisher = RemotePublisher(tmp_path, store, SigningKey.generate(), Anchoring(every=4), clears_store=True)
    for number in range(11):
        weights = weights.clone()
        weights[number] += 1.0
        version = publisher.write(number, number, number - 1 if number else None, {"w": weights})
        assert torch.equal(read(version)["w"], weights)
        assert [path.name for path in tmp_path.glob("0*")] == [f"{number:08d}"]
    assert sorted({number for number, _ in store.list_manifests()}) == [8, 9, 10]


def test_a_store_that_all_machines_share_is_the_coordinators_to_clear(tmp_path):
    store = FolderStore(tmp_path / "shared")
    publisher = RemotePublisher(tmp_path, store, SigningKey.generate(), Anchoring(every=4), clears_store=False)
    for number in range(11):
        publisher.write(number, number, number - 1 if number else None, {"w": torch.full((4,), float(number))})
    assert len({number for number, _ in store.list_manifests()}) == 11
