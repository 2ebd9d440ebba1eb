"""Manifests: a document for each published version that lists its content, signed by its trainer.

A tensor's bytes are cut into parts of at most 16 MiB. Each part is coded by itself, either whole or as changes since
the same part of an older version, the base (`offbeat.weights.codec`). The coded parts are packed into pieces, named by
the blake3 digest of their bytes. So a receiver with a trusted manifest can check everything else, whatever its
source.

Guarantees: `encode` is canonical, so equal manifests have equal bytes and one digest. `decode` refuses bytes that are
not canonical, and contradictions, such as a part that does not fit its tensor or piece, a digest that does not match
the tensors, or a delta without a base.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Literal

import msgspec
from blake3 import blake3
from msgspec import Meta

from offbeat.errors import OffbeatError
from offbeat.weights.version import DTYPES, PIECE_BYTES, adapter_digest, whole_digest

ITEM_BYTES = {
    **{"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "BOOL": 1},
    **{"I8": 1, "U8": 1, "I16": 2, "U16": 2, "I32": 4, "U32": 4, "I64": 8, "U64": 8},
}
"""Bytes per element, by the safetensors name of the type."""

Count = Annotated[int, Meta(ge=0, le=2**53)]
Digest = Annotated[str, Meta(pattern="^[0-9a-f]{64}$", max_length=64)]  # the pattern alone allows a final newline
MAX_PIECE_BYTES = 2 * PIECE_BYTES
"""Size limit of a piece, because receivers hold whole pieces in memory. A part that cannot be compressed takes a little
more than its own 16 MiB."""


class ManifestError(OffbeatError):
    """A manifest is malformed, contradicts itself, or is not the requested one."""


class Kind(StrEnum):
    FULL = "full"
    """All tensors, without a base."""
    DELTA = "delta"
    """The changes since a base."""
    ADAPTER = "adapter"
    """All tensors of an adapter; a receiver also needs the adapter's base."""


class Coding(StrEnum):
    SAME = "same"
    """The part equals the base's and takes no bytes."""
    SPARSE = "sparse"
    """Positions of the elements that differ from the base's part, and their differences."""
    SHIFT = "shift"
    """Difference of every element from the base's part."""
    DENSE = "dense"
    """All elements, without a base."""


class Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    coding: Coding
    digest: Digest
    """Digest of the decoded bytes."""
    piece: Count = 0
    """Index in the manifest's `pieces` of the piece that holds the part. `start` is the part's offset there in bytes,
    `num_bytes` its coded length. All are 0 if the part is the same as the base's."""
    start: Count = 0
    num_bytes: Count = 0


class TensorEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: Annotated[str, Meta(min_length=1, max_length=1024)]
    dtype: str
    """Name of the type, as in safetensors files."""
    shape: Annotated[list[Count], Meta(max_length=16)]
    parts: list[Part]
    """Parts in order; each but the last decodes to 16 MiB. An empty tensor has one part of 0 bytes."""

    @property
    def num_bytes(self) -> int:
        return ITEM_BYTES[self.dtype] * math.prod(self.shape)

    @property
    def digest(self) -> str:
        pieces = blake3()
        for part in self.parts:
            pieces.update(bytes.fromhex(part.digest))
        return pieces.hexdigest()

    def part_bytes(self, index: int) -> int:
        """Returns the decoded size in bytes of part `index`."""
        return min(PIECE_BYTES, self.num_bytes - index * PIECE_BYTES)


class PieceEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    digest: Digest
    num_bytes: Count


class Base(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    number: Count
    """Version number of the base. The base of adapters is no version of its own; it has the first adapter's number."""
    digest: Digest
    manifest: Digest | None = None
    """For the base of adapters that is in the store: digest of the base's manifest; else None."""


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    format: Literal[1] = 1
    number: Count
    step: Count
    parent: Count | None
    digest: Digest
    """Digest of the version: of its tensors or, for an adapter, of base, tensors and configuration."""
    kind: Kind
    base: Base | None = None
    delta: Digest | None = None
    """Digest of an anchor's second manifest, which describes the same version as changes to the version before; None:
    there is no second manifest."""
    tensors: list[TensorEntry]
    """Tensors, sorted by name."""
    pieces: list[PieceEntry]
    adapter: Annotated[str, Meta(max_length=65536)] | msgspec.UnsetType = msgspec.UNSET
    """Content of an adapter's configuration file."""

    @property
    def num_bytes(self) -> int:
        """Size in bytes of all tensors before coding."""
        return sum(tensor.num_bytes for tensor in self.tensors)

    @property
    def num_coded_bytes(self) -> int:
        """Size in bytes of all pieces, which a receiver has to fetch."""
        return sum(piece.num_bytes for piece in self.pieces)

    def encode(self) -> bytes:
        return msgspec.json.encode(self, order="sorted")

    @staticmethod
    def decode(data: bytes) -> Manifest:
        try:
            found = msgspec.json.decode(data, type=Manifest)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ManifestError(f"the bytes of a manifest cannot be decoded: {error}") from error
        if problem := _problem(found):
            raise ManifestError(f"manifest of version {found.number}: {problem}")
        if found.encode() != data:
            raise ManifestError(f"manifest of version {found.number}: its bytes are not in canonical form")
        return found


def manifest_digest(data: bytes) -> str:
    """Returns the digest of an encoded manifest, by which the ledger names it."""
    return blake3(data).hexdigest()


def tensors_digest(tensors: list[TensorEntry]) -> str:
    return whole_digest({tensor.name: (DTYPES[tensor.dtype], list(tensor.shape), tensor.digest) for tensor in tensors})


def _problem(manifest: Manifest) -> str | None:
    if (manifest.kind is Kind.FULL) != (manifest.base is None):
        return f"a version of kind {manifest.kind.value} must {'not ' if manifest.base else ''}have a base"
    if manifest.delta is not None and manifest.kind is not Kind.FULL:
        return f"a version of kind {manifest.kind.value} must not name a delta manifest; only a full one may"
    if (manifest.kind is Kind.ADAPTER) != (manifest.adapter is not msgspec.UNSET):
        must = "must" if manifest.kind is Kind.ADAPTER else "must not"
        return f"a version of kind {manifest.kind.value} {must} have an adapter's configuration"
    if manifest.base is not None and manifest.base.number >= manifest.number + (manifest.kind is Kind.ADAPTER):
        return f"its base is version {manifest.base.number}; a base must be an older version"
    if manifest.parent is not None and manifest.parent >= manifest.number:
        return f"its parent is version {manifest.parent}; a parent must be an older version"
    names = [tensor.name for tensor in manifest.tensors]
    if names != sorted(set(names)):
        return "its tensors are not sorted by name, or one is listed twice"
    for index, piece in enumerate(manifest.pieces):
        if piece.num_bytes > MAX_PIECE_BYTES:
            return f"piece {index} has {piece.num_bytes} bytes; at most {MAX_PIECE_BYTES} are allowed"
    for tensor in manifest.tensors:
        if problem := _tensor_problem(tensor, manifest):
            return f"tensor {tensor.name!r}: {problem}"
    digest = tensors_digest(manifest.tensors)
    if manifest.base is not None and isinstance(manifest.adapter, str):
        digest = adapter_digest(manifest.base.digest, digest, manifest.adapter)
    if digest != manifest.digest:
        return f"it states digest {manifest.digest[:12]}, but its content has digest {digest[:12]}"
    return None


def _tensor_problem(tensor: TensorEntry, manifest: Manifest) -> str | None:
    if tensor.name == "__metadata__" or "\0" in tensor.name or "\n" in tensor.name:  # reserved by files and digests
        return "this name is reserved, or contains a line break or a zero byte"
    if tensor.dtype not in ITEM_BYTES:
        return f"its dtype is {tensor.dtype!r}; it must be one of {', '.join(ITEM_BYTES)}"
    num_parts = max(1, -(-tensor.num_bytes // PIECE_BYTES))
    if len(tensor.parts) != num_parts:
        return f"it is listed with {len(tensor.parts)} parts; a tensor of {tensor.num_bytes} bytes has {num_parts}"
    for part in tensor.parts:
        if part.coding is Coding.SAME:
            if (part.piece, part.start, part.num_bytes) != (0, 0, 0):
                return "a part with coding same must have piece, start and num_bytes 0"
        elif part.piece >= len(manifest.pieces):
            return f"a part lies in piece {part.piece}, but there are only {len(manifest.pieces)} pieces"
        elif part.start + part.num_bytes > manifest.pieces[part.piece].num_bytes:
            return f"a part lies beyond the end of piece {part.piece}"
        if part.coding is not Coding.DENSE and manifest.kind is not Kind.DELTA:
            return f"a part has coding {part.coding.value}, which needs a base; kind {manifest.kind.value} has none"
    return None


@dataclass(frozen=True)
class Anchoring:
    """Rule for which versions are anchors. An anchor is published twice: in full, for workers that join late, and as
    changes, for workers that have the version before."""

    every: int = 10
    """Versions from one anchor to the next. 1: each version is an anchor; 0: each is full, without deltas."""
    max_share: float = 0.5
    """Share of a full version's bytes. If the deltas since the last anchor take more, the next version is an anchor."""
