"""Other ways to code the same update, with the libraries' own default levels."""

from __future__ import annotations

import zlib
from collections.abc import Callable

import numpy as np
import zstandard

from offbeat.weights.codec import SparseChanges

Rival = Callable[[np.ndarray, np.ndarray, SparseChanges], bytes]


def xor_zstd(new: np.ndarray, old: np.ndarray, changes: SparseChanges) -> bytes:
    return zstandard.ZstdCompressor().compress(new ^ old)


def index_value_zstd(new: np.ndarray, old: np.ndarray, changes: SparseChanges) -> bytes:
    """An int32 index and the new value of each change."""
    values = new.view("<u2").take(changes.positions)
    return zstandard.ZstdCompressor().compress(changes.positions.astype("<i4").tobytes() + values.tobytes())


def xor_zlib(new: np.ndarray, old: np.ndarray, changes: SparseChanges) -> bytes:
    return zlib.compress(new ^ old)


RIVALS: dict[str, Rival] = {
    "XOR + zstd": xor_zstd,
    "int32 index + value + zstd": index_value_zstd,
    "XOR + zlib": xor_zlib,
}
