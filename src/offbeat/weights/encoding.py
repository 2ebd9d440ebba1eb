"""Codes parts of tensors and packs the codes into pieces.

A part has up to 16 MiB and is read once. It is coded as its change since the same part of a base (an older version), or
without a base. While the part is in the processor's cache, one thread compares it with the base's part, checks it for
NaN and infinity, hashes it, codes it and writes it to the whole file. A part equal to the base's is not hashed, because
its digest is known.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import BinaryIO, NamedTuple

import numpy as np
import torch
from blake3 import blake3
from torch import Tensor

from offbeat.errors import OffbeatError
from offbeat.weights.codec import SparseChanges, encode, find_changes
from offbeat.weights.manifest import ITEM_BYTES, Anchoring, Base, Coding, Kind, Manifest, Part, PieceEntry, TensorEntry
from offbeat.weights.piece_store import PieceStore
from offbeat.weights.safetensor_file import Stored, begin_flush, file_layout, read_at, write_at
from offbeat.weights.signing import open_sealed
from offbeat.weights.version import DTYPES, FILE_NAME, PIECE_BYTES, WeightFolder, WeightsError, open_file_digest

DEVICE_BLOCK_ITEMS = 1 << 26
"""Elements compared at a time, so that the result of the comparison takes at most 64 MiB of device memory."""


@torch.no_grad()
def find_changes_on_device(new: Tensor, old: Tensor) -> SparseChanges:
    """Finds the changes between two tensors of the same shape and two-byte type on their device; the result equals that
    of `offbeat.weights.codec.find_changes` bit by bit."""
    assert (new.dtype, new.shape, new.element_size()) == (old.dtype, old.shape, 2)
    new_bits, old_bits = _bits(new), _bits(old)
    found = [_find(new_bits, old_bits, start) for start in range(0, new_bits.numel(), DEVICE_BLOCK_ITEMS)]
    positions = [positions for positions, _ in found] or [np.empty(0, np.int64)]
    differences = [differences for _, differences in found] or [np.empty(0, np.uint16)]
    return SparseChanges(np.concatenate(positions), np.concatenate(differences))


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.int16)


def _find(new: Tensor, old: Tensor, start: int) -> SparseChanges:
    new_block, old_block = new[start : start + DEVICE_BLOCK_ITEMS], old[start : start + DEVICE_BLOCK_ITEMS]
    positions = torch.nonzero(new_block != old_block).reshape(-1)
    differences = new_block[positions] - old_block[positions]  # wraps as unsigned integers would
    return SparseChanges((positions + start).cpu().numpy(), differences.cpu().numpy().view(np.uint16))


DOUBLED_LIMITS = {
    **{"BF16": 0xFF00, "F16": 0xF800, "F32": 0xFF00_0000, "F64": 0xFFE0 << 48},
    **{"F8_E5M2": 0xF8, "F8_E4M3": 0xFE},
}
"""For each safetensors type, the bits of infinity (of NaN if the type has no infinity), shifted left by one to drop the
sign. The bits of every finite value, shifted likewise, are smaller."""
BLOCK_ITEMS = 1 << 16
"""Elements checked at a time: few enough for intermediate results to stay in the cache."""


def is_finite(data: np.ndarray, dtype: str) -> bool:
    """Returns whether all elements are finite; `data` holds their raw bytes, `dtype` is their safetensors type."""
    limit = DOUBLED_LIMITS.get(dtype)
    if limit is None:
        return True
    items = data.view(f"<u{ITEM_BYTES[dtype]}")
    return all(
        int(np.left_shift(items[start : start + BLOCK_ITEMS], 1).max()) < limit
        for start in range(0, items.size, BLOCK_ITEMS)
    )


PACK_BYTES = 4 * 1024 * 1024
"""Approximate size of a piece, the unit that workers fetch and relay."""
NAMES = {torch_name: name for name, torch_name in DTYPES.items()}


@dataclass(frozen=True)
class BaseTensor:
    """A tensor of the base (the older version): the open file, the tensor's offset there and its manifest entry."""

    file: BinaryIO
    start: int
    entry: TensorEntry


class RawPart(NamedTuple):
    """A part (up to 16 MiB) of a tensor before coding."""

    name: str
    dtype: str
    position: int
    """Index of the part in its tensor."""
    data: Tensor
    """Raw bytes of the part, on the tensor's device."""
    target: int
    """Offset of the part's first byte in the whole file."""
    old: BaseTensor | None
    """The same tensor in the base; None: code the part without a base."""


class EncodedPart(NamedTuple):
    """A part (up to 16 MiB) of a tensor after coding."""

    name: str
    coding: Coding
    digest: str
    data: bytes
    num_items: int
    num_changed: int


def dtype_name(name: str, tensor: Tensor) -> str:
    """Returns the safetensors name of a tensor's type; `name` is the tensor's, for errors."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in NAMES:
        raise WeightsError(
            f"tensor {name} has dtype {dtype}, which cannot be published; it must be one of {', '.join(NAMES)}"
        )
    return NAMES[dtype]


def cut(
    tensors: Mapping[str, Tensor], places: Mapping[str, Stored], olds: Mapping[str, BaseTensor]
) -> Iterator[RawPart]:
    """Yields the parts (up to 16 MiB each) of all tensors, sorted by tensor name; copies only tensors that are not
    contiguous. `places` is the layout of the new file; `olds` are the base's tensors, by name."""
    for name in sorted(tensors):
        data = tensors[name].detach().contiguous().reshape(-1).view(torch.uint8)
        for position, start in enumerate(range(0, max(len(data), 1), PIECE_BYTES)):
            part = data[start : start + PIECE_BYTES]
            yield RawPart(name, places[name].dtype, position, part, places[name].start + start, olds.get(name))


class Coder:
    """Codes parts of tensors, and writes their raw bytes to `file` unless it is None. Parts that have a base are always
    coded, parts without a base only if `with_codes` is set. Thread-safe."""

    def __init__(self, file: BinaryIO | None, with_codes: bool):
        self.file, self.with_codes = file, with_codes

    def code(self, part: RawPart) -> EncodedPart:
        new, base, coding, data = _on_host(part.data), part.old, Coding.DENSE, b""
        num_items, changed = new.size // ITEM_BYTES[part.dtype], new
        if base is not None:
            old = read_at(base.file, base.start + part.position * PIECE_BYTES, new.size)
            changes = _changes(part, new, old)
            coding, data = encode(new, old, part.dtype, changes)
            changed = new[:0] if coding is Coding.SAME else _changed(new, old, part.dtype, changes)
        elif self.with_codes:
            coding, data = encode(new, None, part.dtype)
        if self.file is not None:
            write_at(self.file, part.target, new)
            begin_flush(self.file, part.target, new.size)
        if base is not None and coding is Coding.SAME:
            return EncodedPart(part.name, coding, base.entry.parts[part.position].digest, data, num_items, 0)
        if not is_finite(changed, part.dtype):  # the others were finite in the base
            raise WeightsError(
                f"tensor {part.name} holds NaN or infinity; resume from the last checkpoint with a smaller optimizer.lr"
            )
        num_changed = changed.size // ITEM_BYTES[part.dtype]
        return EncodedPart(part.name, coding, blake3(new.data).hexdigest(), data, num_items, num_changed)


def _on_host(data: Tensor) -> np.ndarray:
    """Returns the bytes of `data` as an array: without a copy if they are in host memory, else as a copy."""
    if not data.is_cuda:
        return data.cpu().numpy()
    host = torch.empty(data.shape, dtype=torch.uint8, pin_memory=True)  # faster than pageable memory
    return host.copy_(data).numpy()


def _changes(part: RawPart, new: np.ndarray, old: np.ndarray) -> SparseChanges | None:
    """Finds on the part's device which elements of `new` differ from `old`. Returns None if the type's elements do not
    have two bytes."""
    if ITEM_BYTES[part.dtype] != 2:
        return None
    if part.data.is_cuda:
        beside = torch.from_numpy(old).to(part.data.device)
        return find_changes_on_device(part.data.view(torch.int16), beside.view(torch.int16))
    return find_changes(new, old, part.dtype)


def _changed(new: np.ndarray, old: np.ndarray, dtype: str, changes: SparseChanges | None) -> np.ndarray:
    """Returns the raw bytes of the elements of `new` that differ from `old`. `changes` lists them, if known."""
    items = new.view(f"<u{ITEM_BYTES[dtype]}")
    found = items[items != old.view(items.dtype)] if changes is None else items.take(changes.positions)
    return found.view(np.uint8)


class Packing:
    """Packs the codes of parts one after the other into pieces, and records where each part lies."""

    def __init__(self) -> None:
        self.parts: dict[str, list[Part]] = {}
        self.pieces: list[PieceEntry] = []
        """Digests and sizes of the packed pieces, in order; set by the caller, who stores the pieces."""
        self.num_bytes: dict[Coding, int] = dict.fromkeys(Coding, 0)
        self.num_items = self.num_changed = 0

    def pack(self, coded: Iterable[EncodedPart]) -> Iterator[bytes]:
        """Yields the bytes of each piece: at most `PACK_BYTES`, unless the piece holds a single larger code."""
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

    def _note(self, coded: EncodedPart, part: Part) -> None:
        self.parts.setdefault(coded.name, []).append(part)
        self.num_bytes[part.coding] += part.num_bytes
        self.num_items += coded.num_items
        self.num_changed += coded.num_changed


log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Chain:
    """Size of what a late worker has to fetch for one version: the last full version, and the deltas since then."""

    full_bytes: int
    num_deltas: int = 0
    delta_bytes: int = 0

    def is_long(self, anchoring: Anchoring) -> bool:
        """Returns whether the deltas are so many or so large that the next version should be an anchor (in full)."""
        is_large = self.delta_bytes > anchoring.max_share * self.full_bytes
        return is_large or self.num_deltas + 1 >= anchoring.every

    def and_one(self, num_bytes: int) -> Chain:
        return Chain(self.full_bytes, self.num_deltas + 1, self.delta_bytes + num_bytes)


@dataclass(frozen=True)
class BaseFile:
    """A version against which the next one is coded. Its file is held open, so that its content stays readable even if
    the version's folder is deleted or replaced."""

    manifest: Manifest
    file: BinaryIO
    places: Mapping[str, Stored]
    chain: Chain

    @property
    def name(self) -> Base:
        return Base(self.manifest.number, self.manifest.digest)

    def like(self, tensors: Mapping[str, Stored]) -> dict[str, BaseTensor]:
        """Returns, by name, the base's tensors that have the same dtype and shape in `tensors`."""
        return {
            entry.name: BaseTensor(self.file, self.places[entry.name].start, entry)
            for entry in self.manifest.tensors
            if (given := tensors.get(entry.name)) and (given.dtype, given.shape) == (entry.dtype, entry.shape)
        }


def resume_from(number: int, folder: WeightFolder, store: PieceStore, trusted: str) -> BaseFile | None:
    """Opens version `number`, published by an earlier process, as a base; None if its file or its manifests are
    unusable. `trusted` is the public key that must have signed the manifests."""
    with ExitStack() as files:
        try:
            file = files.enter_context(open(folder.path(number) / FILE_NAME, "rb"))
            digest = open_file_digest(file)
            manifests = _Manifests(store, trusted)
            manifest = manifests.find(number, digest)
            found = BaseFile(manifest, file, file_layout(file), manifests.chain(manifest))
        except (OffbeatError, OSError, LookupError, ValueError, TypeError) as error:
            log.info("the next version is published in full, because version %d cannot be its base: %s", number, error)
            return None
        files.pop_all()
        return found


def find_adapter_base(number: int, digest: str, store: PieceStore, trusted: str) -> Base | None:
    """Returns the record of the base weights of adapter version `number`; None if they cannot be used. They must have
    `digest`, a manifest signed by the key `trusted`, and all pieces in the store."""
    try:
        manifests = _Manifests(store, trusted)
        for manifest in manifests.of(number):
            base = manifest.base if manifest.kind is Kind.ADAPTER else None
            if base is None or base.digest != digest or base.manifest is None:
                continue
            pieces = set(store.list_pieces())
            if all(piece.digest in pieces for piece in manifests.find(base.number, digest).pieces):
                return base
    except (OffbeatError, LookupError) as error:
        log.info("the adapters' base weights are published again, as the stored ones cannot be used: %s", error)
    return None


class _Manifests:
    """Reads manifests from a store; refuses manifests that the key `trusted` has not signed."""

    def __init__(self, store: PieceStore, trusted: str):
        self._store, self._trusted, self._listed = store, trusted, store.list_manifests()

    def of(self, number: int) -> list[Manifest]:
        names = [name for listed_number, name in self._listed if listed_number == number]
        opened = [open_sealed(self._store.get_manifest(number, name), {self._trusted}) for name in names]
        return [Manifest.decode(data) for data in opened]

    def find(self, number: int, digest: str) -> Manifest:
        """Returns the manifest of version `number` whose weights have `digest`; raises LookupError if there is none."""
        found = [manifest for manifest in self.of(number) if manifest.digest == digest]
        if found:
            return max(found, key=lambda manifest: manifest.kind is Kind.FULL)  # an anchor before its delta
        raise LookupError(f"the store has no manifest of version {number} with digest {digest[:12]}")

    def chain(self, manifest: Manifest) -> Chain:
        sizes = []
        while manifest.base is not None:
            sizes.append(manifest.num_coded_bytes)
            manifest = self.find(manifest.base.number, manifest.base.digest)
        if manifest.kind is not Kind.FULL:
            raise LookupError(f"version {manifest.number} begins a chain of deltas, but is not full")
        return Chain(manifest.num_coded_bytes, len(sizes), sum(sizes))
