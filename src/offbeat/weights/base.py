"""The version that the next one is coded against: its file, its manifest, and the chain that it ends.

Guarantees: the file is the one that the manifest describes, and stays it for as long as it is held, because it is held
open: whoever deletes or replaces the folder does not change what is compared.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import BinaryIO

from offbeat.control.chain import Anchoring
from offbeat.errors import OffbeatError
from offbeat.weights.digest import open_file_digest
from offbeat.weights.folder import FILE_NAME, WeightFolder
from offbeat.weights.manifest import Base, Kind, Manifest
from offbeat.weights.parts import Old
from offbeat.weights.pieces import PieceStore
from offbeat.weights.safetensor_file import Stored, file_layout
from offbeat.weights.signing import open_sealed

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Chain:
    """What somebody fetches who has nothing: an anchor and the deltas on it."""

    full_bytes: int
    num_deltas: int = 0
    delta_bytes: int = 0

    def is_long(self, anchoring: Anchoring) -> bool:
        """Whether the next version is to be an anchor."""
        return anchoring.is_full(self.num_deltas, self.delta_bytes, self.full_bytes)

    def and_one(self, num_bytes: int) -> Chain:
        return Chain(self.full_bytes, self.num_deltas + 1, self.delta_bytes + num_bytes)


@dataclass(frozen=True)
class BaseFile:
    manifest: Manifest
    file: BinaryIO
    places: Mapping[str, Stored]
    chain: Chain

    @property
    def name(self) -> Base:
        return Base(self.manifest.number, self.manifest.digest)

    def like(self, tensors: Mapping[str, Stored]) -> dict[str, Old]:
        """Its tensors that have the name, dtype and shape of a given one."""
        return {
            entry.name: Old(self.file, self.places[entry.name].start, entry)
            for entry in self.manifest.tensors
            if (given := tensors.get(entry.name)) and (given.dtype, given.shape) == (entry.dtype, entry.shape)
        }


def take_up(number: int, folder: WeightFolder, store: PieceStore, trusted: str) -> BaseFile | None:
    """A version that an earlier process published, where its file and its whole chain are there and are its own."""
    with ExitStack() as files:
        try:
            file = files.enter_context(open(folder.path(number) / FILE_NAME, "rb"))
            digest = open_file_digest(file)
            manifests = _Manifests(store, trusted)
            manifest = manifests.find(number, digest)
            found = BaseFile(manifest, file, file_layout(file), manifests.chain(manifest))
        except (OffbeatError, OSError, LookupError, ValueError, TypeError) as error:
            log.info("version %d is no base for the next one, which will be full: %s", number, error)
            return None
        files.pop_all()
        return found


def find_ground(number: int, digest: str, store: PieceStore, trusted: str) -> Base | None:
    """What the adapters up to a version stand on, where all of it is still in the store."""
    try:
        manifests = _Manifests(store, trusted)
        for manifest in manifests.of(number):
            ground = manifest.base if manifest.kind is Kind.ADAPTER else None
            if ground is None or ground.digest != digest or ground.manifest is None:
                continue
            pieces = set(store.list_pieces())
            if all(piece.digest in pieces for piece in manifests.find(ground.number, digest).pieces):
                return ground
    except (OffbeatError, LookupError) as error:
        log.info("what adapters stand on is published again: %s", error)
    return None


class _Manifests:
    """Those in a store that a key has signed."""

    def __init__(self, store: PieceStore, trusted: str):
        self._store, self._trusted, self._listed = store, trusted, store.list_manifests()

    def of(self, number: int) -> list[Manifest]:
        names = [name for listed_number, name in self._listed if listed_number == number]
        opened = [open_sealed(self._store.get_manifest(number, name), {self._trusted}) for name in names]
        return [Manifest.decode(data) for data in opened]

    def find(self, number: int, digest: str) -> Manifest:
        """By a version's number and digest; LookupError: there is none."""
        found = [manifest for manifest in self.of(number) if manifest.digest == digest]
        if found:
            return max(found, key=lambda manifest: manifest.kind is Kind.FULL)  # of an anchor, not its twin
        raise LookupError(f"no manifest of version {number} with digest {digest[:12]}")

    def chain(self, manifest: Manifest) -> Chain:
        sizes = []
        while manifest.base is not None:
            sizes.append(manifest.num_coded_bytes)
            manifest = self.find(manifest.base.number, manifest.base.digest)
        if manifest.kind is not Kind.FULL:
            raise LookupError(f"version {manifest.number} is {manifest.kind.value}")
        return Chain(manifest.num_coded_bytes, len(sizes), sum(sizes))
