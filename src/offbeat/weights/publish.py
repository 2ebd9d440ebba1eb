"""Publishes versions, each as a whole file and, if there is a store, as pieces with a signed manifest.

A version is coded against its parent in one pass, even after a restart, if the parent's file has the digest that the
parent's manifest names. Some versions are anchors (see `Anchoring`) with two manifests: one in full, for workers that
join late, and one with only the changes, for workers that have the version before. Adapters are small and always whole;
their base goes into the store once, under the number of the first adapter.

Guarantees: pieces, whole file and manifest become durable in this order; only then does the caller write the ledger's
row that names the version. Weights with NaN or infinity are refused with an error that names the tensor. A process
killed at any point leaves every earlier version unchanged, and a repeated call publishes the same version. If two
trainers publish the same number, their versions never mix: each has its own manifest, and the ledger decides.
"""

from __future__ import annotations

import os
import secrets
import shutil
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from blake3 import blake3
from torch import Tensor

from offbeat.errors import DiskError, OffbeatError
from offbeat.files import fsync_file, remedy
from offbeat.weights.collect import EVERY, collect
from offbeat.weights.divided import DividedTensors
from offbeat.weights.encoding import BaseFile, Chain, Coder, Packing, cut, dtype_name, find_adapter_base, resume_from
from offbeat.weights.manifest import (
    Anchoring,
    Base,
    Coding,
    Kind,
    Manifest,
    PieceEntry,
    TensorEntry,
    manifest_digest,
    tensors_digest,
)
from offbeat.weights.piece_store import PieceStore
from offbeat.weights.safetensor_file import Stored, in_parallel, lay_out, write_at
from offbeat.weights.signing import SigningKey, open_sealed, seal
from offbeat.weights.version import (
    ADAPTER_CONFIG,
    ADAPTER_FILE,
    FILE_NAME,
    Adapter,
    Version,
    WeightFolder,
    WeightsError,
    adapter_digest,
    put_in_place,
)


@dataclass(frozen=True)
class PublishFigures:
    """Cost of publishing one version."""

    number: int
    kind: Kind
    num_bytes: int
    """Size in bytes of all tensors before coding."""
    coded_bytes: Mapping[Coding, int]
    """Coded bytes, by coding, that a receiver with the parent version has to fetch; empty without a store."""
    density: float | None
    """Share of tensor elements that differ from the parent version; None for a version that is coded in full."""
    encode_s: float
    """Seconds to compare, hash, code and write, which happen together."""
    flush_s: float
    """Further seconds until files and manifest were durable."""


class CannotPublish(WeightsError, DiskError):
    """A version cannot be written to the disk."""


class Publisher(WeightFolder):
    """Writes each version as a whole file below one folder and, if there is a store, as pieces into the store."""

    def __init__(
        self,
        folder: Path,
        store: PieceStore | None = None,
        key: SigningKey | None = None,
        anchoring: Anchoring | None = None,
        adapter: Adapter | None = None,
    ):
        """With `adapter`, versions hold only the tensors of adapters. A `store` needs a `key` to sign manifests."""
        super().__init__(folder)
        assert (store is None) == (key is None), "this is a bug: a store needs a signing key, and a key needs a store"
        self.store, self.key, self.anchoring, self.adapter = store, key, anchoring or Anchoring(), adapter
        self._has_deltas = adapter is None and self.anchoring.every > 0
        self.figures: PublishFigures | None = None
        """Cost of the latest version; None before the first."""
        self._base: BaseFile | None = None
        self._adapter_base: Base | None = None
        """Number and digests of the adapters' base weights; None until these are in the store."""

    def write(self, number: int, step: int, parent: int | None, tensors: Mapping[str, Tensor]) -> Version:
        """Writes a version and makes it durable; nobody else uses it until the caller adds its row to the ledger."""
        final = self.path(number)
        try:
            return self._write(number, step, parent, tensors)
        except OSError as error:
            reason = " ".join(str(error).split())
            raise CannotPublish(
                f"cannot write the weights of step {step} to {final}: {reason}; {remedy(error)}, then resume the run"
            ) from error
        except OffbeatError as error:
            raise WeightsError(f"cannot write the weights of step {step}: {error}") from error
        finally:
            if isinstance(tensors, DividedTensors):
                tensors.close()

    def _write(self, number: int, step: int, parent: int | None, tensors: Mapping[str, Tensor]) -> Version:
        adapter, numbers = self.adapter, {"number": number, "step": step, "parent": parent}
        adapter_base = None if adapter is None else self._adapter_base_of(adapter, number, step, parent)
        started_s = time.monotonic()
        head, places = _laid_out(tensors, None if adapter is None else adapter.metadata)
        base = self._base_of(parent)
        is_anchor = base is not None and base.chain.is_long(self.anchoring)
        with self._drafting(number, FILE_NAME if adapter is None else ADAPTER_FILE) as (draft, file):
            file.truncate(max([len(head), *(place.stop for place in places.values())]))
            write_at(file, 0, head)
            packing = self._code(tensors, places, base, file)
            if adapter is not None:
                (draft / ADAPTER_CONFIG).write_text(adapter.config, encoding="utf-8")
                fsync_file(draft / ADAPTER_CONFIG)
                more: dict[str, Any] = {"kind": Kind.ADAPTER, "base": adapter_base, "adapter": adapter.config}
            else:
                more = {"kind": Kind.FULL} if base is None else {"kind": Kind.DELTA, "base": base.name}
            manifest = _described(places, packing, **numbers, **more)
            whole = self._code(tensors, places, None, None) if is_anchor else None
            encoded_s = time.monotonic()
            self._put_in_place(draft, file, self.path(number))
            name = self._put_manifest(manifest)
            if whole is not None:
                manifest = _described(places, whole, **numbers, kind=Kind.FULL, delta=name)
                name = self._put_manifest(manifest)
        self._keep_as_base(manifest, file, places, None if is_anchor else base)
        self.figures = PublishFigures(
            number=number,
            kind=manifest.kind,
            num_bytes=manifest.num_bytes,
            coded_bytes={} if self.store is None else packing.num_bytes,
            density=None if base is None else packing.num_changed / max(packing.num_items, 1),
            encode_s=encoded_s - started_s,
            flush_s=time.monotonic() - encoded_s,
        )
        return Version(number, step, parent, manifest.digest, self.path(number), name)

    def _adapter_base_of(self, adapter: Adapter, number: int, step: int, parent: int | None) -> Base:
        """Returns the record of the adapters' base weights. If there is a store without these weights, puts them there
        first."""
        if self.store is None or self.key is None:
            return Base(number, adapter.base)
        if self._adapter_base is None and parent is not None:
            self._adapter_base = find_adapter_base(parent, adapter.base, self.store, self.key.public)
        if self._adapter_base is None:
            tensors = adapter.base_tensors()
            _, places = _laid_out(tensors)
            packing = self._code(tensors, places, None, None)
            manifest = _described(places, packing, number=number, step=step, parent=None, kind=Kind.FULL)
            assert manifest.digest == adapter.base, "this is a bug: the base weights of the adapters have changed"
            self.store.sync()
            self._adapter_base = Base(number, adapter.base, self._put_manifest(manifest))
        return self._adapter_base

    def _base_of(self, parent: int | None) -> BaseFile | None:
        """Returns version `parent`, opened as the next version's base; None if the next version must be full."""
        if self.store is None or self.key is None or parent is None or not self._has_deltas:
            return None
        if self._base is None or self._base.manifest.number != parent:
            self._replace_base(resume_from(parent, self, self.store, self.key.public))
        return self._base

    @contextmanager
    def _drafting(self, number: int, name: str) -> Iterator[tuple[Path, BinaryIO]]:
        """Yields a new draft folder for version `number` and an open file in it; deletes both on failure."""
        for left in self.folder.glob(f".{number:08d}.*.draft"):  # of a dead writer, or of one that races us and loses
            shutil.rmtree(left, ignore_errors=True)
        draft = self.folder / f".{number:08d}.{secrets.token_hex(4)}.draft"
        draft.mkdir(parents=True)
        with ExitStack() as undo:
            undo.callback(shutil.rmtree, draft, ignore_errors=True)
            yield draft, undo.enter_context(open(draft / name, "w+b", buffering=0))
            undo.pop_all()

    def _code(
        self, tensors: Mapping[str, Tensor], places: Mapping[str, Stored], base: BaseFile | None, file: BinaryIO | None
    ) -> Packing:
        """Codes all tensors in one pass, as changes since `base` (None: in full). Writes their bytes to `file` (None:
        nowhere) and, if there is a store, puts the pieces there."""
        if isinstance(tensors, DividedTensors):
            old = None if base is None else (base, self.path(base.manifest.number) / FILE_NAME)
            return tensors.code(places, old, file, self.store)
        packing, coder = Packing(), Coder(file, with_codes=self.store is not None)
        parts = cut(tensors, places, {} if base is None else base.like(places))
        with closing(in_parallel(coder.code, parts)) as coded:
            if self.store is None:
                deque(packing.pack(coded), maxlen=0)
            else:
                with closing(in_parallel(self._put, packing.pack(coded))) as pieces:
                    packing.pieces = list(pieces)
        return packing

    def _put(self, piece: bytes) -> PieceEntry:
        assert self.store is not None
        digest = blake3(piece).hexdigest()
        self.store.put(digest, piece)
        return PieceEntry(digest, len(piece))

    def _put_in_place(self, draft: Path, file: BinaryIO, final: Path) -> None:
        """Makes stored pieces and the whole file durable, then renames the draft folder to `final`."""
        os.fsync(file.fileno())
        if self.store is not None:
            self.store.sync()
        put_in_place(draft, final)  # replaces the folder of a writer that died before it wrote its row

    def _put_manifest(self, manifest: Manifest) -> str:
        """Signs a manifest and makes it durable in the store; returns the manifest's digest, "" without a store."""
        if self.store is None or self.key is None:
            return ""
        data = manifest.encode()
        digest = manifest_digest(data)
        self.store.put_manifest(manifest.number, digest, seal(data, self.key))
        return digest

    def _keep_as_base(
        self, manifest: Manifest, file: BinaryIO, places: Mapping[str, Stored], base: BaseFile | None
    ) -> None:
        """Keeps the new version (`manifest`, `file`, `places`) as the next version's base. `base` is the new version's
        own base; None if the new version is full."""
        if self.store is None or not self._has_deltas:
            file.close()
            return
        num_bytes = manifest.num_coded_bytes
        chain = Chain(num_bytes) if base is None else base.chain.and_one(num_bytes)
        self._replace_base(BaseFile(manifest, file, places, chain))

    def _replace_base(self, base: BaseFile | None) -> None:
        if self._base is not None:
            self._base.file.close()
        self._base = base


def _laid_out(
    tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> tuple[bytes, dict[str, Stored]]:
    sizes = (
        (name, dtype_name(name, tensor), list(tensor.shape), tensor.numel() * tensor.element_size())
        for name, tensor in tensors.items()
    )
    return lay_out(sizes, metadata)


def _described(places: Mapping[str, Stored], packing: Packing, **fields: Any) -> Manifest:
    """Returns a version's manifest: digest, tensors and pieces from `places` and `packing`, all else from `fields`."""
    tensors = [TensorEntry(name, *places[name][:2], packing.parts[name]) for name in sorted(places)]
    digest = tensors_digest(tensors)
    if fields["kind"] is Kind.ADAPTER:
        digest = adapter_digest(fields["base"].digest, digest, fields["adapter"])
    return Manifest(digest=digest, tensors=tensors, pieces=packing.pieces, **fields)


class RemotePublisher(Publisher):
    """Publishes on the disk of a remote trainer, where the coordinator cannot delete old versions.

    Keeps only the whole file of the newest version. With `clears_store`, also deletes, every few versions, stored
    pieces that the newest version does not need. Everything deleted has been sent already, or will be written again.
    """

    def __init__(
        self,
        folder: Path,
        store: PieceStore,
        key: SigningKey,
        anchoring: Anchoring | None = None,
        adapter: Adapter | None = None,
        *,
        clears_store: bool,
    ):
        super().__init__(folder, store, key, anchoring, adapter)
        self._clears_store = clears_store

    def write(self, number: int, step: int, parent: int | None, tensors: Mapping[str, Tensor]) -> Version:
        version = super().write(number, step, parent, tensors)
        self.keep([number])
        if self._clears_store and number % EVERY == 0:
            assert self.store is not None
            assert self.key is not None
            trusted = [self.key.public]
            collect(self.store, [number], lambda sealed: Manifest.decode(open_sealed(sealed, trusted)))
        return version
