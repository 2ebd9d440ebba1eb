"""A trainer's own disk, where the coordinator cannot delete: keeps what the next version needs, and no more."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from offbeat.control.chain import Anchoring
from offbeat.weights.adapter import Adapter
from offbeat.weights.collect import EVERY, collect
from offbeat.weights.manifest import Manifest
from offbeat.weights.pieces import PieceStore
from offbeat.weights.publish import Publisher
from offbeat.weights.signing import SigningKey, open_sealed
from offbeat.weights.version import Version


class AwayPublisher(Publisher):
    """The whole file of the newest version, and with `clears_store` its chain of pieces: all else has been sent, or
    will never be asked for, because what is not published is written anew."""

    def __init__(
        self,
        folder: Path,
        store: PieceStore,
        key: SigningKey,
        anchoring: Anchoring,
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
            collect(self.store, [number], self._opened)
        return version

    def _opened(self, sealed: bytes) -> Manifest:
        assert self.key is not None
        return Manifest.decode(open_sealed(sealed, [self.key.public]))
