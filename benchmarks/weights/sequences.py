"""Sequences of updates: recorded from training, read from consecutive files, or made up.

All are read part by part, each part through all of its steps, so that only one part is in memory at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from benchmarks.weights import recording, smollm2
from benchmarks.weights.recording import PartCodes
from offbeat.errors import UserError
from offbeat.weights.codec import decode
from offbeat.weights.safetensor_file import Stored, file_layout
from offbeat.weights.version import FILE_NAME, PIECE_BYTES, file_digest

DTYPE = "BF16"
STD = 0.02
BETA1, BETA2, EPS = 0.9, 0.999, 1e-8
DRIFT = 0.65
"""Mean of a made-up gradient over its noise. With this value, Adam's updates have a root mean square of 0.58 times lr,
as measured on real ones."""


class Update(NamedTuple):
    """A part's raw bytes before and after a step."""

    step: int
    new: np.ndarray
    old: np.ndarray


class UpdatesOfPart(Protocol):
    def __call__(self) -> Iterator[Update]: ...


class Updates(Protocol):
    """A sequence of updates, whose parts are independent, so that threads can share them."""

    name: str

    @property
    def lr(self) -> float | None: ...

    @property
    def is_real(self) -> bool: ...

    def parts(self) -> Iterator[UpdatesOfPart]: ...


class Weights:
    """A memory-mapped safetensors file."""

    def __init__(self, path: Path):
        with open(path, "rb") as file:
            self.layout: dict[str, Stored] = file_layout(file)
        self.data = np.memmap(path, np.uint8, "r")

    def part(self, tensor: str, start: int, num_bytes: int) -> np.ndarray:
        begin = self.layout[tensor].start + start
        return np.asarray(self.data[begin : begin + num_bytes])


class Recorded:
    """Updates recorded by `benchmarks.weights.record`, applied to the weights that its run began with."""

    is_real = True

    def __init__(self, first: Path, model: Path):
        self.recording = recording.read(first)
        header = self.recording.header
        if file_digest(model) != header.base_digest:
            raise UserError(f"--model {model}: not the weights that {first} was recorded from; give those")
        self.base, self.lr = Weights(model), header.lr
        kept = sum(part.num_bytes for part in header.parts) / (2 * header.num_items)
        self.name = f"recorded, lr {header.lr:g}" + (f", {kept:.0%} of the parts" if kept < 1 else "")

    def parts(self) -> Iterator[UpdatesOfPart]:
        for part, codes in zip(self.recording.header.parts, self.recording.data, strict=True):
            yield lambda part=part, codes=codes: self._updates(part, codes)

    def _updates(self, part: PartCodes, codes: Sequence[bytes]) -> Iterator[Update]:
        old = self.base.part(part.tensor, part.start, part.num_bytes)
        for step, ((coding, _), data) in enumerate(zip(part.codes, codes, strict=True), 1):
            new = decode(coding, data, old, part.num_bytes, part.dtype)
            yield Update(step, new, old)
            old = new


class Consecutive:
    """Updates between consecutive files of one model, in the order of their names."""

    is_real, lr = True, None

    def __init__(self, folder: Path):
        self.name = folder.name
        self.files = [Weights(path) for path in sorted(folder.glob("*.safetensors"))]
        if len(self.files) < 2 or any(_kinds(file) != _kinds(self.files[0]) for file in self.files):
            raise UserError(f"--sequence {folder}: wants at least two safetensors files with the same tensors")

    def parts(self) -> Iterator[UpdatesOfPart]:
        for tensor, stored in self.files[0].layout.items():
            for start in range(0, (stored.stop - stored.start) * (stored.dtype == DTYPE), PIECE_BYTES):
                size = min(PIECE_BYTES, stored.stop - stored.start - start)
                yield lambda place=(tensor, start, size): self._updates(*place)

    def _updates(self, tensor: str, start: int, num_bytes: int) -> Iterator[Update]:
        parts = [file.part(tensor, start, num_bytes) for file in self.files]
        return (Update(step, parts[step], parts[step - 1]) for step in range(1, len(parts)))


def _kinds(file: Weights) -> dict[str, tuple[str, list[int]]]:
    return {name: (stored.dtype, stored.shape) for name, stored in file.layout.items()}


class MadeUp:
    """Made-up updates: AdamW on float32 masters that begin as normally distributed bf16 values, with gradients of a
    constant direction and noise."""

    is_real = False

    def __init__(self, name: str, shapes: Mapping[str, tuple[int, ...]], lr: float, num_steps: int):
        self.name, self.lr, self.num_steps = f"{name}, lr {lr:g}", lr, num_steps
        sizes = [2 * int(np.prod(shape)) for shape in shapes.values()]
        self.sizes = [min(PIECE_BYTES, size - start) // 2 for size in sizes for start in range(0, size, PIECE_BYTES)]

    def parts(self) -> Iterator[UpdatesOfPart]:
        for seed, num_items in enumerate(self.sizes):
            yield lambda place=(seed, num_items): self._updates(*place)

    def _updates(self, seed: int, num_items: int) -> Iterator[Update]:
        rng = np.random.default_rng(seed)
        old = bfloat16(normal(rng, num_items) * np.float32(STD))
        masters = (old.astype(np.uint32) << 16).view(np.float32)
        drift = normal(rng, num_items) * np.float32(DRIFT)
        mean, square = np.zeros(num_items, np.float32), np.zeros(num_items, np.float32)
        for step in range(1, self.num_steps + 1):
            gradient = normal(rng, num_items)
            gradient += drift
            mean += np.float32(1 - BETA1) * (gradient - mean)
            gradient *= gradient
            square += np.float32(1 - BETA2) * (gradient - square)
            spread = np.sqrt(square / np.float32(1 - BETA2**step)) + np.float32(EPS)
            masters -= np.float32(self.lr / (1 - BETA1**step)) * mean / spread
            new = bfloat16(masters)
            yield Update(step, new.view(np.uint8), old.view(np.uint8))
            old = new


def normal(rng: np.random.Generator, num_items: int) -> np.ndarray:
    return rng.standard_normal(num_items, dtype=np.float32)


def bfloat16(values: np.ndarray) -> np.ndarray:
    """Returns the bits of float32 values rounded to the nearest bf16, ties to even."""
    bits = values.view(np.uint32)
    return ((bits + np.uint32(0x7FFF) + ((bits >> 16) & np.uint32(1))) >> 16).astype("<u2")


def read_sequences(folder: Path, model: Path | None) -> list[Updates]:
    """Returns all recordings in a folder, or its consecutive safetensors files."""
    firsts = sorted(folder.glob("*.0"))
    if not firsts:
        return [Consecutive(folder)]
    file = smollm2.folder(model) / FILE_NAME
    return [Recorded(first, file) for first in firsts]
