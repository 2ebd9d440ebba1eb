"""A run that publishes small versions, what it published, and ways to damage what lies on a disk."""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file

from offbeat.errors import OffbeatError
from offbeat.weights.download import StoreSources
from offbeat.weights.manifest import Anchoring
from offbeat.weights.piece_store import FolderStore
from offbeat.weights.publish import Publisher
from offbeat.weights.receive import Receiver
from offbeat.weights.signing import SigningKey
from offbeat.weights.version import Version

SHAPES = {"embed": [128, 96], "layer": [96, 64], "norm": [96], "none": [0, 3]}


class Run:
    """Publishes versions in which a few elements change from one to the next; each `every`th is full."""

    def __init__(self, folder: Path, every: int = 4):
        self.folder, self.key = folder, SigningKey.generate()
        self.store = FolderStore(folder / "store")
        self.publisher = Publisher(folder / "published", self.store, self.key, Anchoring(every=every, max_share=10.0))
        self.versions: list[Version] = []
        self.tensors: dict[str, dict[str, torch.Tensor]] = {}

    def publish(self, num_changed: int = 50, seed: int = 0) -> Version:
        """The next version, with so many elements of its first tensors moved a little."""
        number = len(self.versions)
        random = torch.Generator().manual_seed(1000 * seed + number)
        if self.versions:
            tensors = {name: tensor.clone() for name, tensor in self.tensors[self.versions[-1].digest].items()}
            for name in ("embed", "layer"):
                flat = tensors[name].view(-1)
                where = torch.randint(flat.numel(), (num_changed,), generator=random)
                flat[where] += torch.randn(num_changed, generator=random).bfloat16()
        else:
            tensors = {name: torch.randn(shape, generator=random).bfloat16() for name, shape in SHAPES.items()}
            tensors["scale"] = torch.randn(7, generator=random)
        version = self.publisher.write(number, number, number - 1 if number else None, tensors)
        self.versions.append(version)
        self.tensors[version.digest] = tensors
        return version

    def receiver(self, name: str = "worker", sources: object = None, **options: object) -> Receiver:
        return Receiver(self.folder / name, sources or StoreSources(self.store), [self.key.public], **options)

    def store_files(self) -> list[Path]:
        return [path for path in (self.folder / "store").rglob("*") if path.is_file()]

    async def copy(self, number: int, into: Path) -> None:
        """A version's files, from the folder of published ones."""
        (into / "model.safetensors").write_bytes((self.publisher.path(number) / "model.safetensors").read_bytes())

    def check(self, fetched: Version, wanted: Version) -> None:
        """That a version here is bit by bit the published one."""
        assert replace(fetched, path=wanted.path) == wanted
        found, published = load_file(fetched.path / "model.safetensors"), self.tensors[wanted.digest]
        assert found.keys() == published.keys()
        for name, tensor in published.items():
            assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
            assert bits(found[name]) == bits(tensor), name


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


class Faulty:
    """A store's sources, except that things happen to what they send; it keeps a list of what was asked for."""

    def __init__(self, store: FolderStore, harm: Callable[[str, Path], None] = lambda digest, path: None):
        self._inner, self.harm = StoreSources(store), harm
        self.asked: list[tuple[object, int]] = []
        """Numbers of manifests and digests of pieces, with the bytes that were there when they were asked for."""

    async def manifest(self, number: int, digest: str) -> bytes:
        self.asked.append((number, 0))
        return await self._inner.manifest(number, digest)

    async def piece(self, digest: str, num_bytes: int, into: Path) -> None:
        self.asked.append((digest, into.stat().st_size if into.exists() else 0))
        await self._inner.piece(digest, num_bytes, into)
        self.harm(digest, into)


class Unreachable:
    """Sources that nobody answers at."""

    async def manifest(self, number: int, digest: str) -> bytes:
        raise OffbeatError("nobody answers")

    async def piece(self, digest: str, num_bytes: int, into: Path) -> None:
        raise OffbeatError("nobody answers")


def flip(path: Path, position: int = -1, *, keep_time: bool = False) -> None:
    """Turns a bit of a file over; with `keep_time`, as a disk would, without anybody having written to it."""
    found = path.stat()
    data = bytearray(path.read_bytes())
    data[position % len(data)] ^= 0x10
    os.chmod(path, 0o644)
    path.write_bytes(data)
    if keep_time:
        os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))


def pieces_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("pieces/??/*") if len(path.name) == 64)
