"""Times to publish and to apply a version, compared with a copy in memory of the same bytes in the same run.

Publishing goes from tensors to durable pieces, manifest and whole file (`offbeat.weights.publish`). Applying goes from
pieces and the previous file to a verified, durable file (`offbeat.weights.assemble`). Both are then repeated in stages,
each stage for all parts, to show where the time goes.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from blake3 import blake3
from torch import Tensor

from benchmarks.weights.sequences import bfloat16, normal
from offbeat.weights.assemble import assemble
from offbeat.weights.codec import decode, encode, find_changes
from offbeat.weights.manifest import Anchoring, Manifest
from offbeat.weights.piece_store import FolderStore
from offbeat.weights.publish import Publisher
from offbeat.weights.safetensor_file import in_parallel, read_at, write_at
from offbeat.weights.signing import SigningKey, open_sealed
from offbeat.weights.version import FILE_NAME, PIECE_BYTES

HIDDEN, INNER, KV = 1536, 8960, 256
LAYER = {
    **{"q_proj": (HIDDEN, HIDDEN), "k_proj": (KV, HIDDEN), "v_proj": (KV, HIDDEN), "o_proj": (HIDDEN, HIDDEN)},
    **{"gate_proj": (INNER, HIDDEN), "up_proj": (INNER, HIDDEN), "down_proj": (HIDDEN, INNER), "norm": (HIDDEN,)},
}
"""Shapes of a layer's tensors, as in models with 1.5B parameters."""
DTYPE = "BF16"
STAGES = {
    "publish": ("read base", "compare", "encode", "hash", "write", "flush"),
    "apply": ("read base", "decode", "hash", "write", "flush"),
}


class Model:
    """Layers with the shapes of a 1.5B model; an update moves one weight in a hundred to a neighbouring value."""

    def __init__(self, num_layers: int, density: float):
        self.random, self.density = np.random.default_rng(0), density
        self.bits = {
            f"layers.{layer}.{name}": bfloat16(normal(self.random, int(np.prod(shape))) * np.float32(0.02))
            for layer in range(num_layers)
            for name, shape in LAYER.items()
        }

    @property
    def num_bytes(self) -> int:
        return sum(bits.nbytes for bits in self.bits.values())

    def update(self) -> None:
        for name, bits in self.bits.items():
            moved = bits.copy()
            count = round(self.density * bits.size)
            places = np.unique(self.random.integers(0, bits.size, count))
            steps = self.random.choice(np.array([1, 0xFFFF], "<u2"), places.size)
            steps[moved[places] & 0x7FFF == 0] = 1  # below zero there is no neighbour, but NaN
            moved[places] += steps
            self.bits[name] = moved

    def tensors(self) -> dict[str, Tensor]:
        return {name: torch.from_numpy(bits.view("<i2")).view(torch.bfloat16) for name, bits in self.bits.items()}

    def parts(self) -> list[np.ndarray]:
        raw = [bits.view(np.uint8) for bits in self.bits.values()]
        return [data[start : start + PIECE_BYTES] for data in raw for start in range(0, data.size, PIECE_BYTES)]


class Passes:
    """Publishes and applies one version after the other below a folder."""

    def __init__(self, model: Model, folder: Path):
        self.model, self.folder, self.store = model, folder, FolderStore(folder / "store")
        self.key = SigningKey.generate()
        self.publisher = Publisher(folder / "published", self.store, self.key, Anchoring(every=1000))
        self.number = 0
        self.publisher.write(0, 0, None, model.tensors())
        shutil.copytree(self.publisher.path(0), folder / "applied" / "0")
        self.copies = [np.empty_like(part) for part in model.parts()]

    def round(self) -> dict[str, float]:
        """Publishes and applies one more version; returns the seconds by operation."""
        parts_before = self.model.parts()
        self.model.update()
        self.number += 1
        seconds: dict[str, float] = {}
        with clocked(seconds, "memcpy"):
            for copy, part in zip(self.copies, parts_before, strict=True):
                np.copyto(copy, part)
        with clocked(seconds, "publish"):
            self.publisher.write(self.number, self.number, self.number - 1, self.model.tensors())
        with clocked(seconds, "apply"):
            assemble([self._manifest()], self._applied(-1), self.store.get, self._applied(0))
        self._stages(parts_before, seconds)
        shutil.rmtree(self.publisher.path(self.number - 1))
        shutil.rmtree(self._applied(-1))
        return seconds

    def _manifest(self) -> Manifest:
        digest = next(digest for number, digest in self.store.list_manifests() if number == self.number)
        return Manifest.decode(open_sealed(self.store.get_manifest(self.number, digest), [self.key.public]))

    def _applied(self, back: int) -> Path:
        return self.folder / "applied" / str(self.number + back)

    def _stages(self, before: list[np.ndarray], seconds: dict[str, float]) -> None:
        pairs = list(zip(self.model.parts(), before, strict=True))
        starts = np.cumsum([0, *(part.size for part in before[:-1])]).tolist()
        places = list(zip(starts, map(len, before), strict=True))
        with open(self._applied(-1) / FILE_NAME, "rb") as base:
            timed(seconds, "read base", lambda place: read_at(base, *place), places)
        changes = timed(seconds, "compare", lambda pair: find_changes(pair[0], pair[1], DTYPE), pairs)
        both = list(zip(pairs, changes, strict=True))
        codes = timed(seconds, "encode", lambda item: encode(item[0][0], item[0][1], DTYPE, item[1]), both)
        timed(seconds, "hash", lambda pair: blake3(pair[0]).digest(), pairs)
        coded = list(zip(codes, before, strict=True))
        timed(seconds, "decode", lambda item: decode(item[0][0], item[0][1], item[1], item[1].size, DTYPE), coded)
        with open(self.folder / "stages", "wb") as file:
            timed(seconds, "write", lambda item: write_at(file, item[0], item[1][0]), zip(starts, pairs, strict=True))
            with clocked(seconds, "flush"):
                os.fsync(file.fileno())


@contextmanager
def clocked(seconds: dict[str, float], name: str) -> Iterator[None]:
    start_s = time.perf_counter()
    yield
    seconds[name] = time.perf_counter() - start_s


def timed(seconds: dict[str, float], name: str, work: Callable[[Any], Any], items: Iterable[Any]) -> list[Any]:
    with clocked(seconds, name):
        return list(in_parallel(work, items))
