"""Publishes versions: each as a whole file and, where there is a store, as pieces and a signed manifest.

A version is coded against its parent in one pass over the parts, several at once: what is held in memory is a few parts
beyond the tensors themselves. After a restart the parent is taken up again if its file is there with the digest that
its manifest names. Without a parent to stand on a version is full; where `Anchoring` says so it is an anchor: full for
those who have nothing, with what changed beside it, in a manifest of its own, for those who follow. Adapters are small
and always whole; what they stand on goes into the store once, under the number of the first of them.

Guarantees: nothing is named before it is durable (pieces, whole file, manifest; the ledger's row is the caller's);
weights that hold NaN or infinity are refused, with the tensor's name; a process killed at any point leaves every
earlier version as it was, and the same call again publishes the same. Two who publish the same number never mix: each
has its own manifest, the whole file is one of theirs, and the ledger decides.
"""

from __future__ import annotations

import os
import secrets
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from blake3 import blake3
from torch import Tensor

from offbeat.control.chain import Anchoring
from offbeat.errors import DiskError, OffbeatError
from offbeat.files import fsync_file, remedy
from offbeat.weights.adapter import Adapter
from offbeat.weights.base import BaseFile, Chain, find_ground, take_up
from offbeat.weights.digest import adapter_digest
from offbeat.weights.folder import ADAPTER_CONFIG, ADAPTER_FILE, FILE_NAME, WeightFolder, put_in_place
from offbeat.weights.manifest import (
    Base,
    Coding,
    Kind,
    Manifest,
    PieceEntry,
    TensorEntry,
    manifest_digest,
    tensors_digest,
)
from offbeat.weights.parallel import in_parallel
from offbeat.weights.parts import Coder, Packing, cut, dtype_name
from offbeat.weights.pieces import PieceStore
from offbeat.weights.positioned import write_at
from offbeat.weights.safetensor_file import Stored, lay_out
from offbeat.weights.signing import SigningKey, seal
from offbeat.weights.verify import WeightsError
from offbeat.weights.version import Version


@dataclass(frozen=True)
class Figures:
    """What publishing one version took."""

    number: int
    kind: Kind
    num_bytes: int
    """Of a whole copy."""
    coded_bytes: Mapping[Coding, int]
    """To be fetched by those who have the version before, by how they are coded; none without a store."""
    density: float | None
    """The share of elements that are not the base's; None: there was none to compare with."""
    encode_s: float
    """Comparing, hashing, coding and handing over to the disk and the store, all at once."""
    flush_s: float
    """Until all of it was durable and named."""


class CannotPublish(WeightsError, DiskError):
    """A version cannot be written."""


class Publisher(WeightFolder):
    """Writes versions below one folder and into one store."""

    def __init__(
        self,
        folder: Path,
        store: PieceStore | None = None,
        key: SigningKey | None = None,
        anchoring: Anchoring | None = None,
        adapter: Adapter | None = None,
    ):
        """With `adapter`, what is written are the tensors of adapters alone."""
        super().__init__(folder)
        assert (store is None) == (key is None), "a store takes signed manifests"
        self.store, self.key, self.anchoring, self.adapter = store, key, anchoring or Anchoring(), adapter
        self.figures: Figures | None = None
        """Of the version written last."""
        self._base: BaseFile | None = None
        self._ground: Base | None = None
        """What adapters stand on, once it is in the store."""

    def write(self, number: int, step: int, parent: int | None, tensors: Mapping[str, Tensor]) -> Version:
        """Makes a version durable; nobody knows of it until its row stands in the ledger."""
        final = self.path(number)
        try:
            return self._write(number, step, parent, tensors)
        except OSError as error:
            reason = " ".join(str(error).split())
            raise CannotPublish(
                f"cannot write the weights of step {step} to {final}: {reason}; {remedy(error)}, then --resume the run"
            ) from error
        except OffbeatError as error:
            raise WeightsError(f"cannot write the weights of step {step}: {error}") from error

    def _write(self, number: int, step: int, parent: int | None, tensors: Mapping[str, Tensor]) -> Version:
        started_s = time.monotonic()
        if self.adapter is not None:
            return self._write_adapter(number, step, parent, tensors, self.adapter)
        head, places = _laid_out(tensors)
        base = self._base_of(parent)
        is_anchor = base is not None and base.chain.is_long(self.anchoring)

        def described(packing: Packing, pieces: list[PieceEntry], base: BaseFile | None, twin: str | None) -> Manifest:
            entries = _entries(places, packing)
            return Manifest(
                number=number,
                step=step,
                parent=parent,
                digest=tensors_digest(entries),
                kind=Kind.FULL if base is None else Kind.DELTA,
                base=None if base is None else base.name,
                delta=twin,
                tensors=entries,
                pieces=pieces,
            )

        with self._drafting(number, FILE_NAME) as (draft, file):
            _begin(file, head, places)
            packing, pieces = self._code(tensors, places, base, file)
            manifest = described(packing, pieces, base, None)
            whole = self._code(tensors, places, None, None) if is_anchor else None
            encoded_s = time.monotonic()
            self._settle(draft, file, self.path(number))
            name = self._publish(manifest)
            if whole is not None:
                manifest = described(*whole, None, name)
                name = self._publish(manifest)
        self._stand_on(manifest, file, places, None if is_anchor else base)
        self._note(manifest, packing, started_s, encoded_s, is_compared=base is not None)
        return Version(number, step, parent, manifest.digest, self.path(number), name)

    def _write_adapter(
        self, number: int, step: int, parent: int | None, tensors: Mapping[str, Tensor], adapter: Adapter
    ) -> Version:
        ground = self._ground_of(adapter, number, step, parent)
        started_s = time.monotonic()
        head, places = _laid_out(tensors, adapter.metadata)
        with self._drafting(number, ADAPTER_FILE) as (draft, file), file:
            _begin(file, head, places)
            packing, pieces = self._code(tensors, places, None, file)
            (draft / ADAPTER_CONFIG).write_text(adapter.config, encoding="utf-8")
            fsync_file(draft / ADAPTER_CONFIG)
            entries = _entries(places, packing)
            manifest = Manifest(
                number=number,
                step=step,
                parent=parent,
                digest=adapter_digest(adapter.base, tensors_digest(entries), adapter.config),
                kind=Kind.ADAPTER,
                base=ground,
                tensors=entries,
                pieces=pieces,
                adapter=adapter.config,
            )
            encoded_s = time.monotonic()
            self._settle(draft, file, self.path(number))
            name = self._publish(manifest)
        self._note(manifest, packing, started_s, encoded_s, is_compared=False)
        return Version(number, step, parent, manifest.digest, self.path(number), name)

    def _ground_of(self, adapter: Adapter, number: int, step: int, parent: int | None) -> Base:
        """What adapters stand on; into the store, where there is one, it goes once."""
        if self.store is None or self.key is None:
            return Base(number, adapter.base)
        if self._ground is None and parent is not None:
            self._ground = find_ground(parent, adapter.base, self.store, self.key.public)
        if self._ground is None:
            tensors = adapter.base_tensors()
            _, places = _laid_out(tensors)
            packing, pieces = self._code(tensors, places, None, None)
            entries = _entries(places, packing)
            digest = tensors_digest(entries)
            assert digest == adapter.base, "the weights under the adapters have changed"
            manifest = Manifest(
                number=number, step=step, parent=None, digest=digest, kind=Kind.FULL, tensors=entries, pieces=pieces
            )
            self.store.sync()
            self._ground = Base(number, digest, self._publish(manifest))
        return self._ground

    def _note(
        self, manifest: Manifest, packing: Packing, started_s: float, encoded_s: float, *, is_compared: bool
    ) -> None:
        self.figures = Figures(
            number=manifest.number,
            kind=manifest.kind,
            num_bytes=manifest.num_bytes,
            coded_bytes={} if self.store is None else packing.num_bytes,
            density=packing.num_changed / max(packing.num_items, 1) if is_compared else None,
            encode_s=encoded_s - started_s,
            flush_s=time.monotonic() - encoded_s,
        )

    def _base_of(self, parent: int | None) -> BaseFile | None:
        """What the next version is coded against; None: there is nothing, and it is full."""
        if self.store is None or self.key is None or parent is None:
            return None
        if self._base is None or self._base.manifest.number != parent:
            self._replace_base(take_up(parent, self, self.store, self.key.public))
        return self._base

    @contextmanager
    def _drafting(self, number: int, name: str) -> Iterator[tuple[Path, BinaryIO]]:
        """A new folder with an open file, which are gone again if something fails."""
        for left in self.folder.glob(f".{number:08d}.*.draft"):  # by a writer that died, or that raced us and loses
            shutil.rmtree(left, ignore_errors=True)
        draft = self.folder / f".{number:08d}.{secrets.token_hex(4)}.draft"
        draft.mkdir(parents=True)
        with ExitStack() as undo:
            undo.callback(shutil.rmtree, draft, ignore_errors=True)
            yield draft, undo.enter_context(open(draft / name, "w+b", buffering=0))
            undo.pop_all()

    def _code(
        self, tensors: Mapping[str, Tensor], places: Mapping[str, Stored], base: BaseFile | None, file: BinaryIO | None
    ) -> tuple[Packing, list[PieceEntry]]:
        """One pass over all parts; when it returns, all are written, and all pieces put."""
        packing, coder = Packing(), Coder(file, with_codes=self.store is not None)
        parts = cut(tensors, places, {} if base is None else base.like(places))
        with closing(in_parallel(coder.code, parts)) as coded:
            packed = packing.pack(coded)
            if self.store is None:
                for _ in packed:
                    pass
                return packing, []
            with closing(in_parallel(self._put, packed)) as pieces:
                return packing, list(pieces)

    def _put(self, piece: bytes) -> PieceEntry:
        assert self.store is not None
        digest = blake3(piece).hexdigest()
        self.store.put(digest, piece)
        return PieceEntry(digest, len(piece))

    def _settle(self, draft: Path, file: BinaryIO, final: Path) -> None:
        """Makes pieces and whole file durable, and gives the file its place."""
        os.fsync(file.fileno())
        if self.store is not None:
            self.store.sync()
        put_in_place(draft, final)  # instead of what a writer left that died before its row was written

    def _publish(self, manifest: Manifest) -> str:
        """Signs a manifest and puts it into the store, which makes it durable; its digest."""
        if self.store is None or self.key is None:
            return ""
        data = manifest.encode()
        digest = manifest_digest(data)
        self.store.put_manifest(manifest.number, digest, seal(data, self.key))
        return digest

    def _stand_on(
        self, manifest: Manifest, file: BinaryIO, places: Mapping[str, Stored], base: BaseFile | None
    ) -> None:
        """Takes a version that was just published as the next one's base."""
        if self.store is None:
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


def _begin(file: BinaryIO, head: bytes, places: Mapping[str, Stored]) -> None:
    """Gives a new file its length and its header."""
    file.truncate(max([len(head), *(place.stop for place in places.values())]))
    write_at(file, 0, head)


def _entries(places: Mapping[str, Stored], packing: Packing) -> list[TensorEntry]:
    return [TensorEntry(name, *places[name][:2], packing.parts[name]) for name in sorted(places)]
