"""A version that several ranks publish together is the one that a single rank would have published."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from offbeat.errors import OffbeatError
from offbeat.weights.divided import DividedTensors, Parts, like, owner_of, parts_of, serve_parts
from offbeat.weights.manifest import Anchoring, Kind, Manifest
from offbeat.weights.piece_store import FolderStore
from offbeat.weights.publish import Publisher
from offbeat.weights.signing import SigningKey, open_sealed
from offbeat.weights.version import PIECE_BYTES

SHAPES = {"large": (PIECE_BYTES + 12345,), "tall": (300, 70), "tiny": (3,), "none": (0, 4)}


def tensors_of(step: int) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    made = {name: torch.randn(shape, generator=random).bfloat16() for name, shape in SHAPES.items()}
    for i in range(step):
        made["large"][1000 * i : 1000 * i + 10] += 1
        made["tall"][i] *= 2
    return made


class Ranks:
    """Publishers of one folder: each rank but 0 is a thread that looks into the inbox."""

    def __init__(self, folder: Path, num_ranks: int, within_s: float = 30.0, missing: int | None = None):
        self.folder, self.num_ranks, self.within_s, self.missing = folder, num_ranks, within_s, missing
        self.store, self.key = FolderStore(folder), SigningKey.load_or_create(folder.with_suffix(".key"))
        self.publisher = Publisher(folder, self.store, self.key, Anchoring(every=3))
        self.threads: list[threading.Thread] = []

    def write(self, number: int, tensors: dict[str, torch.Tensor]):
        parts = {
            (name, position): tensor.reshape(-1).view(torch.uint8)[start:stop]
            for name, tensor in tensors.items()
            for position, start, stop in parts_of(tensor.nbytes)
        }
        inbox = self.folder / f".ranks-{number}"
        inbox.mkdir(parents=True)
        own = [
            Parts(iter(sorted((key, part) for key, part in parts.items() if owner_of(key, self.num_ranks) == rank)))
            for rank in range(self.num_ranks)
        ]
        for rank in range(1, self.num_ranks):
            if rank != self.missing:
                given = (own[rank], inbox, rank, FolderStore(self.folder), lambda: False)
                self.threads.append(threading.Thread(target=serve_parts, args=given, daemon=True))
                self.threads[-1].start()
        shapes = {name: like(tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
        divided = DividedTensors(shapes, own[0], inbox, self.num_ranks, self.within_s)
        return self.publisher.write(number, number, number - 1 if number else None, divided)

    def manifest(self, version) -> Manifest:
        sealed = self.store.get_manifest(version.number, version.manifest)
        return Manifest.decode(open_sealed(sealed, {self.key.public}))


@pytest.mark.parametrize(
    "num_ranks", [pytest.param(1, marks=pytest.mark.full), 2, pytest.param(3, marks=pytest.mark.full)]
)
def test_digest_file_and_size_are_those_of_one_publisher(tmp_path, num_ranks):
    ranks = Ranks(tmp_path / "ranks", num_ranks)
    alone = Publisher(
        tmp_path / "alone", FolderStore(tmp_path / "alone"), SigningKey.load_or_create(tmp_path / "key"), Anchoring(3)
    )
    kinds = []
    for number in range(4):
        found = ranks.write(number, tensors_of(number))
        wanted = alone.write(number, number, number - 1 if number else None, tensors_of(number))
        assert found.digest == wanted.digest
        files = [next(version.path.glob("*.safetensors")).read_bytes() for version in (found, wanted)]
        assert files[0] == files[1]
        kinds.append(ranks.manifest(found).kind)
        assert ranks.publisher.figures.coded_bytes == alone.figures.coded_bytes
        assert ranks.publisher.figures.density == alone.figures.density
    assert set(kinds) == {Kind.FULL, Kind.DELTA}
    for thread in ranks.threads:  # rank 0 has removed their inboxes
        thread.join(10)
        assert not thread.is_alive()


@pytest.mark.full
def test_a_rank_that_does_not_publish_its_part_is_named(tmp_path):
    ranks = Ranks(tmp_path / "ranks", 3, within_s=5, missing=2)
    with pytest.raises(OffbeatError, match=r"rank 2 has not published its part of the weights within 5 s"):
        ranks.write(0, tensors_of(0))
    assert not list((tmp_path / "ranks").glob("*.safetensors"))


def test_what_is_not_finite_on_any_rank_is_named_by_its_tensor(tmp_path):
    tensors = tensors_of(0)
    for name in ("large", "tall", "tiny"):
        broken = {**tensors, name: torch.full_like(tensors[name], torch.nan)}
        with pytest.raises(OffbeatError, match=f"tensor {name} holds NaN or infinity"):
            Ranks(tmp_path / name, 2).write(0, broken)


def test_every_part_keeps_its_owner_and_all_ranks_have_some():
    keys = [("layer", position) for position in range(200)]
    owners = [owner_of(key, 4) for key in keys]
    assert owners == [owner_of(key, 4) for key in keys]
    assert min(owners.count(rank) for rank in range(4)) > 25
