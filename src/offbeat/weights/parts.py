"""Codes the parts of a model's tensors against those of a base, and packs the codes into pieces.

A part is read once: compared with its base's, checked to hold numbers, hashed, coded and written to its place in the
whole file, all by one thread while it is in the cache. What equals its base is not hashed: its digest is known.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import BinaryIO, NamedTuple

import numpy as np
import torch
from blake3 import blake3
from torch import Tensor

from offbeat.weights import device_codec
from offbeat.weights.codec import Changes, encode, find_changes
from offbeat.weights.digest import DTYPES, PIECE_BYTES
from offbeat.weights.finite import is_finite
from offbeat.weights.manifest import ITEM_BYTES, Coding, Part, TensorEntry
from offbeat.weights.positioned import read_at, write_at
from offbeat.weights.safetensor_file import Stored
from offbeat.weights.verify import WeightsError

PACK_BYTES = 4 * 1024 * 1024
"""Of a piece, about: what is fetched, and handed on by relays, at a time."""
NAMES = {torch_name: name for name, torch_name in DTYPES.items()}


@dataclass(frozen=True)
class Old:
    """A tensor of the base, for one like it to be compared with."""

    file: BinaryIO
    start: int
    entry: TensorEntry


class Cut(NamedTuple):
    """A part of a tensor, as it is."""

    name: str
    dtype: str
    position: int
    """Which of the tensor's parts it is."""
    data: Tensor
    """Its raw bytes, where the tensor is."""
    place: int
    """Where they go in the whole file."""
    old: Old | None


class Coded(NamedTuple):
    """A part, as it travels."""

    name: str
    coding: Coding
    digest: str
    data: bytes
    num_items: int
    num_changed: int


def dtype_name(name: str, tensor: Tensor) -> str:
    """What a safetensors file calls a tensor's type."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in NAMES:
        raise WeightsError(f"tensor {name} has dtype {dtype}; known are {', '.join(NAMES)}")
    return NAMES[dtype]


def cut(tensors: Mapping[str, Tensor], places: Mapping[str, Stored], olds: Mapping[str, Old]) -> Iterator[Cut]:
    """All parts, by tensors' names and in order; nothing is copied unless a tensor's memory has gaps."""
    for name in sorted(tensors):
        data = tensors[name].detach().contiguous().reshape(-1).view(torch.uint8)
        for position, start in enumerate(range(0, max(len(data), 1), PIECE_BYTES)):
            part = data[start : start + PIECE_BYTES]
            yield Cut(name, places[name].dtype, position, part, places[name].start + start, olds.get(name))


class Coder:
    """Codes parts and writes them to the whole file, if there is one; any number of threads at once."""

    def __init__(self, file: BinaryIO | None, with_codes: bool):
        self.file, self.with_codes = file, with_codes

    def code(self, part: Cut) -> Coded:
        new = _on_host(part.data)
        num_items = new.size // ITEM_BYTES[part.dtype]
        if part.old is not None:
            return self._code_change(part, new, num_items, part.old)
        if not is_finite(new, part.dtype):
            raise not_finite(part.name)
        coding, data = encode(new, None, part.dtype) if self.with_codes else (Coding.DENSE, b"")
        if self.file is not None:
            write_at(self.file, part.place, new)
        return Coded(part.name, coding, blake3(new.data).hexdigest(), data, num_items, num_items)

    def _code_change(self, part: Cut, new: np.ndarray, num_items: int, base: Old) -> Coded:
        old = read_at(base.file, base.start + part.position * PIECE_BYTES, new.size)
        changes = _changes(part, new, old)
        coding, data = encode(new, old, part.dtype, changes)
        if self.file is not None:
            write_at(self.file, part.place, new)
        if coding is Coding.SAME:
            return Coded(part.name, coding, base.entry.parts[part.position].digest, data, num_items, 0)
        changed = _changed(new, old, part.dtype, changes)
        if not is_finite(changed.view(np.uint8), part.dtype):  # the others were numbers when the base was published
            raise not_finite(part.name)
        return Coded(part.name, coding, blake3(new.data).hexdigest(), data, num_items, changed.size)


def _on_host(data: Tensor) -> np.ndarray:
    """The bytes themselves, or a copy of those on a device."""
    if not data.is_cuda:
        return data.cpu().numpy()
    host = torch.empty(data.shape, dtype=torch.uint8, pin_memory=True)  # several times as fast as other memory
    return host.copy_(data).numpy()


def _changes(part: Cut, new: np.ndarray, old: np.ndarray) -> Changes | None:
    """None where the type has none; found on the device where the weights are."""
    if ITEM_BYTES[part.dtype] != 2:
        return None
    if part.data.is_cuda:
        beside = torch.from_numpy(old).to(part.data.device)
        return device_codec.find_changes(part.data.view(torch.int16), beside.view(torch.int16))
    return find_changes(new, old, part.dtype)


def _changed(new: np.ndarray, old: np.ndarray, dtype: str, changes: Changes | None) -> np.ndarray:
    """The bits of the elements that are not as they were."""
    items = new.view(f"<u{ITEM_BYTES[dtype]}")
    return items[items != old.view(items.dtype)] if changes is None else items.take(changes.positions)


def not_finite(name: str) -> WeightsError:
    return WeightsError(
        f"tensor {name} holds NaN or infinity; resume from the last checkpoint with a smaller optimizer.lr"
    )


class Packing:
    """Puts codes one after the other into pieces, and remembers which part lies where."""

    def __init__(self) -> None:
        self.parts: dict[str, list[Part]] = {}
        self.num_bytes: dict[Coding, int] = dict.fromkeys(Coding, 0)
        self.num_items = self.num_changed = 0

    def pack(self, coded: Iterable[Coded]) -> Iterator[bytes]:
        """The pieces, none over `PACK_BYTES` unless one code alone is."""
        num_pieces, codes, num_bytes = 0, list[bytes](), 0
        for part in coded:
            if codes and num_bytes + len(part.data) > PACK_BYTES:
                yield b"".join(codes)
                num_pieces, codes, num_bytes = num_pieces + 1, [], 0
            if part.coding is Coding.SAME:
                self._note(part, Part(Coding.SAME, part.digest))
                continue
            self._note(part, Part(part.coding, part.digest, num_pieces, num_bytes, len(part.data)))
            codes.append(part.data)
            num_bytes += len(part.data)
        if codes:
            yield b"".join(codes)

    def _note(self, coded: Coded, part: Part) -> None:
        self.parts.setdefault(coded.name, []).append(part)
        self.num_bytes[part.coding] += part.num_bytes
        self.num_items += coded.num_items
        self.num_changed += coded.num_changed
