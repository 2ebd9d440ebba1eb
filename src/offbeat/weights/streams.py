"""Byte planes and streams: what every code of a part consists of.

Integers wider than a byte are laid out as planes, all first bytes before all second ones; each plane, and whatever else
is bytes, is a stream, compressed by zstd unless it is smaller as it is. A reader says how long each stream must be, and
never takes more memory than that, whatever the stream claims.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator

import numpy as np
import zstandard

from offbeat.errors import OffbeatError

HEADER = struct.Struct("<I")
"""Twice a stream's stored length, plus 1 where it is compressed."""
ZSTD_PARAMETERS = zstandard.ZstdCompressionParameters.from_level(1, hash_log=6)
"""The streams are noise with uneven odds: Huffman codes are all there is to gain. With the usual 2^13 hashes, chance
matches made the exponents of bf16 weights 8 % larger and took five times as long (measured on 8 MiB)."""
MAX_WINDOW_BYTES = 1 << 24


class CodecError(OffbeatError):
    """Bytes that are no code of a part, or a part that has no such code."""


def items_of(data: np.ndarray, item_bytes: int) -> np.ndarray:
    """Raw bytes as the integers that their elements' bits are."""
    return data.view(f"<u{item_bytes}")


def planes(items: np.ndarray) -> Iterator[np.ndarray]:
    rows = items.view(np.uint8).reshape(items.size, items.itemsize)
    return (np.ascontiguousarray(rows[:, byte]) for byte in range(items.itemsize))


def joined(parts: list[np.ndarray]) -> np.ndarray:
    """The integers that planes were made of."""
    rows = np.empty((parts[0].size, len(parts)), np.uint8)
    for byte, plane in enumerate(parts):
        rows[:, byte] = plane
    return rows.reshape(-1).view(f"<u{len(parts)}")


def zigzag(differences: np.ndarray) -> np.ndarray:
    """0, -1, 1, -2 ... as 0, 1, 2, 3 ...: small either way."""
    signed = differences.view(f"<i{differences.itemsize}")
    folded = signed >> (8 * differences.itemsize - 1)
    folded ^= signed << 1
    return folded.view(differences.dtype)


def unzigzag(folded: np.ndarray) -> np.ndarray:
    one = folded.dtype.type(1)
    return (folded >> one) ^ -(folded & one)


def write_streams(streams: Iterable[np.ndarray]) -> bytes:
    compressor = zstandard.ZstdCompressor(compression_params=ZSTD_PARAMETERS)
    found = []
    for stream in streams:
        packed = compressor.compress(stream.data) if stream.size else b""
        compressed = len(packed) < stream.size
        stored = packed if compressed else stream.data
        found += [HEADER.pack(2 * len(stored) + compressed), stored]
    return b"".join(found)


class Streams:
    """Reads what `write_streams` wrote."""

    def __init__(self, view: memoryview):
        self.view, self.decompressor = view, zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW_BYTES)

    def next(self, num_bytes: int) -> np.ndarray:
        if len(self.view) < HEADER.size:
            raise CodecError("a code that is cut short")
        (header,) = HEADER.unpack_from(self.view)
        length, compressed = divmod(header, 2)
        rest = self.view[HEADER.size :]
        if length > len(rest):
            raise CodecError("a code that is cut short")
        stored, self.view = rest[:length], rest[length:]
        data = self._unpacked(stored, num_bytes) if compressed else stored
        if len(data) != num_bytes:
            raise CodecError(f"a stream of {len(data)} bytes; it must have {num_bytes}")
        return np.frombuffer(data, np.uint8)

    def next_planes(self, num_items: int, item_bytes: int) -> np.ndarray:
        """As many streams as an integer has bytes, joined."""
        return joined([self.next(num_items) for _ in range(item_bytes)])

    def _unpacked(self, stored: memoryview, num_bytes: int) -> bytes:
        if len(stored) >= num_bytes:
            raise CodecError(f"a compressed stream of {len(stored)} bytes for {num_bytes}")
        try:
            if zstandard.frame_content_size(stored) != num_bytes:  # else zstd would allocate whatever is claimed
                raise CodecError(f"a compressed stream that does not say it has {num_bytes} bytes")
            return self.decompressor.decompress(stored, allow_extra_data=False)
        except zstandard.ZstdError as error:
            raise CodecError(f"a compressed stream is damaged: {error}") from error

    def end(self) -> None:
        if len(self.view):
            raise CodecError(f"{len(self.view)} bytes too many")
