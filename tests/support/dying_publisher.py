"""What the processes do that publish or assemble a version and are killed on the way.

They die as in a power cut, at the n-th thing that they ask of the file system; a write is done by half first.
"""

import os
import signal
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from offbeat.weights.assemble import assemble
from offbeat.weights.manifest import Manifest
from offbeat.weights.piece_store import FolderStore
from offbeat.weights.publish import Publisher
from offbeat.weights.signing import SigningKey, open_sealed
from offbeat.weights.version import Version

CALLS = ("fsync", "replace", "link", "mkdir", "unlink", "rmdir", "pwrite", "copy_file_range")


def tensors(number: int) -> dict[str, torch.Tensor]:
    """Those of a version: from one to the next a few elements of one move, one stays, one is new."""
    random = torch.Generator().manual_seed(0)
    weight = torch.randn(300, 400, generator=random).bfloat16()
    bits = weight.view(torch.int16).view(-1)
    for step in range(number):
        bits[torch.randint(bits.numel(), (500,), generator=random)] += 1
        bits[step] += 1
    return {"weight": weight, "same": torch.ones(2000), "count": torch.tensor(number)}


def store_of(folder: Path) -> FolderStore:
    return FolderStore(folder / "weights")


def key_of(folder: Path) -> SigningKey:
    return SigningKey.load_or_create(folder / "key")


def publish(folder: Path, number: int) -> Version:
    publisher = Publisher(folder / "weights", store_of(folder), key_of(folder))
    return publisher.write(number, number, number - 1 if number else None, tensors(number))


def manifests(folder: Path) -> dict[int, Manifest]:
    """All that are named; each has to be in order."""
    store, key = store_of(folder), key_of(folder)
    sealed = {number: store.get_manifest(number, digest) for number, digest in store.list_manifests()}
    return {number: Manifest.decode(open_sealed(data, {key.public})) for number, data in sealed.items()}


def follow(folder: Path, numbers: Iterable[int]) -> Path:
    """Puts the last of some versions together, out of those and the one before them, as a worker does."""
    known, numbers = manifests(folder), list(numbers)
    base = folder / "worker" / str(numbers[0] - 1) if numbers[0] else None
    final = folder / "worker" / str(numbers[-1])
    assemble([known[number] for number in numbers], base, store_of(folder).get, final)
    return final


def do(work: Callable[..., Any], words: tuple[Any, ...], die_at: int | None, begun: Any = None) -> None:
    """In a process of its own."""
    if die_at is not None:
        _die_at(die_at)
    if begun is not None:
        begun.set()
    work(*words)


def _die_at(count: int) -> None:
    lock, left = threading.Lock(), [count]

    def watched(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*words: Any, **options: Any) -> Any:
            with lock:
                if not left[0]:
                    if name == "pwrite":
                        descriptor, data, place = words
                        real(descriptor, data[: len(data) // 2], place)
                    os.kill(os.getpid(), signal.SIGKILL)
                left[0] -= 1
            return real(*words, **options)

        return call

    for name in CALLS:
        setattr(os, name, watched(name, getattr(os, name)))


def trace(work: Callable[..., Any], *words: Any) -> list[tuple[str, Path, Path]]:
    """What is made durable and what is named, in order: the call, the file or folder, and its name after the call."""
    done: list[tuple[str, Path, Path]] = []
    real = {name: getattr(os, name) for name in ("fsync", "replace", "link")}

    def fsync(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        real["fsync"](descriptor)
        done.append(("fsync", path, path))

    def named(name: str) -> Callable[..., None]:
        def call(source: Any, target: Any) -> None:
            real[name](source, target)
            done.append(("name", Path(source), Path(target)))

        return call

    try:
        os.fsync, os.replace, os.link = fsync, named("replace"), named("link")
        work(*words)
    finally:
        os.fsync, os.replace, os.link = real["fsync"], real["replace"], real["link"]
    return done
