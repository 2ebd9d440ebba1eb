"""Codes a part (up to 16 MiB) of a tensor, if possible as its changes since the base, an older version of the weights.

A training step changes about one weight in a hundred, nearly always to a neighbouring value of its type. So elements
are treated as integers, made of their bits. There are four codings, and `encode` chooses the one that is probably
smallest. `same` stores nothing: the part equals the base's. `sparse` (types of two bytes) stores the positions of
changed elements, and the differences. `shift` (types of two and four bytes) stores the difference of every element,
modulo the type's range. `dense` stores the elements themselves, and needs no base.

Guarantees: decoding is integer arithmetic, so NaN, -0 and sign flips are restored bit by bit. `decode` takes memory and
time in proportion to `num_bytes`, whatever the coded bytes claim. It raises `CodecError` if these contradict themselves
or do not fit the part. It cannot detect a wrong base or a wrong but well-formed code: the caller must check the digest.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import zstandard

from offbeat.errors import OffbeatError
from offbeat.weights.manifest import ITEM_BYTES, Coding

# Integers wider than a byte are stored as planes: all first bytes, then all second bytes, and so on. Each plane, like
# any other run of bytes, is a stream, compressed by zstd if that makes it smaller.

HEADER = struct.Struct("<I")
"""Header of a stream (a run of bytes): twice its stored length in bytes, plus 1 if it is compressed."""
ZSTD_PARAMETERS = zstandard.ZstdCompressionParameters.from_level(1, hash_log=6)
"""Compression with a tiny hash table, because in the noise of the streams only Huffman codes help. With the usual 2^13
entries, chance matches made the compressed exponents of bf16 weights 8 % larger, and 8 MiB took five times as long."""
MAX_WINDOW_BYTES = 1 << 24


class CodecError(OffbeatError):
    """Raised for bytes that are not a valid code, or for a part that cannot be coded as requested."""


def items_of(data: np.ndarray, item_bytes: int) -> np.ndarray:
    """Views raw bytes as unsigned integers of `item_bytes` each."""
    return data.view(f"<u{item_bytes}")


def planes(items: np.ndarray) -> Iterator[np.ndarray]:
    rows = items.view(np.uint8).reshape(items.size, items.itemsize)
    return (np.ascontiguousarray(rows[:, byte]) for byte in range(items.itemsize))


def joined(parts: list[np.ndarray]) -> np.ndarray:
    """Rebuilds integers from their planes: `parts[0]` holds the lowest byte of each, `parts[1]` the next, and so on."""
    rows = np.empty((parts[0].size, len(parts)), np.uint8)
    for byte, plane in enumerate(parts):
        rows[:, byte] = plane
    return rows.reshape(-1).view(f"<u{len(parts)}")


def zigzag(differences: np.ndarray) -> np.ndarray:
    """Maps 0, -1, 1, -2 ... to 0, 1, 2, 3 ..., so that small differences of either sign are small integers."""
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
    """Reads, one after the other, the streams (runs of bytes, some compressed) that `write_streams` wrote."""

    def __init__(self, view: memoryview):
        self.view, self.decompressor = view, zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW_BYTES)

    def next(self, num_bytes: int) -> np.ndarray:
        if len(self.view) < HEADER.size:
            raise CodecError(
                f"the encoded tensor is cut short: {len(self.view)} bytes remain, but the header of its next stream "
                f"has {HEADER.size}"
            )
        (header,) = HEADER.unpack_from(self.view)
        length, compressed = divmod(header, 2)
        rest = self.view[HEADER.size :]
        if length > len(rest):
            raise CodecError(f"the code is cut short: {len(rest)} bytes remain, but its next stream has {length}")
        stored, self.view = rest[:length], rest[length:]
        data = self._unpacked(stored, num_bytes) if compressed else stored
        if len(data) != num_bytes:
            raise CodecError(f"a stream of the encoded tensor has {len(data)} bytes; it must have {num_bytes}")
        return np.frombuffer(data, np.uint8)

    def next_planes(self, num_items: int, item_bytes: int) -> np.ndarray:
        """Reads `num_items` integers of `item_bytes` each, stored as one stream per byte position (planes)."""
        return joined([self.next(num_items) for _ in range(item_bytes)])

    def _unpacked(self, stored: memoryview, num_bytes: int) -> bytes:
        if len(stored) >= num_bytes:
            raise CodecError(f"a compressed stream has {len(stored)} bytes; it must have fewer than {num_bytes}")
        try:
            size = zstandard.frame_content_size(stored)  # -1 if the frame does not declare it
            if size != num_bytes:  # else zstd allocates whatever is claimed
                declared = "no content size" if size < 0 else f"a content of {size} bytes"
                raise CodecError(f"a compressed stream declares {declared}; it must declare {num_bytes} bytes")
            return self.decompressor.decompress(stored, allow_extra_data=False)
        except zstandard.ZstdError as error:
            raise CodecError(f"a compressed stream is damaged: {error}") from error

    def end(self) -> None:
        if len(self.view):
            raise CodecError(f"the encoded tensor has {len(self.view)} bytes after its last stream, where it must end")


# The sparse code: positions of changed elements of two bytes, and their differences.
#
# Positions rise, so they are coded as gaps. The low bits of a gap are noise and are stored separately, as many as it
# takes for most gaps to fit into a byte; bytes compress well. A difference is a sign bit, a bit for "larger than one",
# and, for the few larger ones, the size. Near zero, floating-point values are so dense that an update moves every
# element by many values. If there are many such elements, the code sets a limit: all elements whose base lies below it
# are stored, without positions.

SPARSE_HEADER = struct.Struct("<IIH")
"""Header of a sparse code: number of changes with a position, number of bytes of their gaps, limit (see `_limit`)."""
MEAN_GAP_BITS = 6
"""Number of bits that remain of an average gap between changes after the low bits of all gaps are split off and stored
separately."""
FILLER = 255
"""Byte of a coded gap that stands for 255, to which the next byte is added; gaps of 255 or more need it."""
MANY_LARGER = 0.25
"""A limit (see `_limit`) is considered only if at least this share of all changes is large, that is, by more than 1 as
integers. In normally distributed weights the share is smaller. It is larger in quantised weights and with small
learning rates, and then most of the large changes are near zero."""
NEAR_QUANTILE = 0.75
"""`_limit` sets the limit just above this quantile of the old bits, without the sign, of the elements that changed by
more than 1."""
MIN_NEAR_CHANGED = 0.6
"""Smallest share of changed elements among those below the limit (see `_limit`); with less, no limit is used."""
SIZE_BITS = 0x7FFF
"""Mask for all bits of a two-byte element but its sign."""


class SparseChanges(NamedTuple):
    """Positions and differences of the elements that changed in a part of a tensor; only for types of two bytes."""

    positions: np.ndarray
    """Indices of the changed elements in rising order, int64."""
    differences: np.ndarray
    """New bits minus old bits of each changed element, modulo 65536 and never 0, uint16."""


def encode_sparse(changes: SparseChanges, new: np.ndarray, old: np.ndarray) -> bytes:
    """Returns the code that turns raw bytes `old` into `new`; `changes`, not empty, lists the elements that differ."""
    new_items, old_items = items_of(new, 2), items_of(old, 2)
    sizes = np.abs(changes.differences.view("<i2")).view("<u2")  # right for -32768 too, whose abs() overflows to itself
    limit = _limit(changes, sizes, old_items)
    near = _near(old_items, limit)
    if limit:
        far = np.flatnonzero(old_items.take(changes.positions) & SIZE_BITS >= limit)
        if MIN_NEAR_CHANGED * near.size > changes.positions.size - far.size:
            limit, near = 0, near[:0]
        else:
            changes, sizes = SparseChanges(*(array.take(far) for array in changes)), sizes.take(far)
    num_low_bits = _num_low_bits(changes.positions.size, new_items.size)
    gaps = _gaps(changes.positions)
    high = _with_fillers(gaps >> num_low_bits)
    larger = sizes > 1
    streams = [
        high,
        _pack_low_bits(gaps, num_low_bits),
        np.packbits(changes.differences >= 0x8000),
        np.packbits(larger),
        *planes(sizes[larger] - np.uint16(2)),
        *planes(zigzag(new_items.take(near) - old_items.take(near))),
    ]
    return SPARSE_HEADER.pack(changes.positions.size, high.size, limit) + write_streams(streams)


def decode_sparse(view: memoryview, old: np.ndarray) -> np.ndarray:
    old_items = items_of(old, 2)
    num_items = old_items.size
    if len(view) < SPARSE_HEADER.size:
        raise CodecError(f"a sparse code has {len(view)} bytes; its header alone has {SPARSE_HEADER.size}")
    count, num_high, limit = SPARSE_HEADER.unpack_from(view)
    if count > num_items or not count <= num_high <= count + num_items // FILLER or not (count or limit):
        raise CodecError(f"a sparse code of {num_items} elements cannot have {count} changes in {num_high} bytes")
    num_low_bits, num_bit_bytes = _num_low_bits(count, num_items), -(-count // 8)
    near = _near(old_items, limit)
    streams = Streams(view[SPARSE_HEADER.size :])
    high = streams.next(num_high)
    low = streams.next(-(-count * num_low_bits // 8))
    negative = np.unpackbits(streams.next(num_bit_bytes), count=count).astype("<u2")
    larger = np.flatnonzero(np.unpackbits(streams.next(num_bit_bytes), count=count).view(bool))
    rest = streams.next_planes(larger.size, 2)
    near_differences = unzigzag(streams.next_planes(near.size, 2))
    streams.end()

    positions = _positions(high, low, num_low_bits, count)
    if count and positions[-1] >= num_items:
        raise CodecError(f"a sparse code changes element {positions[-1]} of a part with {num_items} elements")
    differences = np.ones(count, "<u2")
    differences[larger] = rest + np.uint16(2)
    differences ^= -negative  # -negative is all ones for a negative difference: xor, then adding 1, negates it
    differences += negative
    new = old.copy()
    items = items_of(new, 2)
    items[positions] = items.take(positions) + differences
    items[near] += near_differences
    return new


def _limit(changes: SparseChanges, sizes: np.ndarray, old_items: np.ndarray) -> int:
    """Returns the limit of a sparse code; 0: none. The code stores the difference of every element whose old bits,
    without the sign, are below the limit, even if the element did not change. So these elements need no positions."""
    larger = changes.positions[sizes > 1]
    if larger.size < MANY_LARGER * sizes.size:
        return 0
    bases = old_items.take(larger) & SIZE_BITS
    middle = int(NEAR_QUANTILE * (bases.size - 1))
    return int(np.partition(bases, middle)[middle]) + 1


def _near(old_items: np.ndarray, limit: int) -> np.ndarray:
    """Returns the indices of the elements whose old bits, without sign, are below `limit`; none if `limit` is 0."""
    return np.flatnonzero(old_items & SIZE_BITS < limit) if limit else np.empty(0, np.int64)


def _num_low_bits(count: int, num_items: int) -> int:
    """Returns how many low bits of each gap are stored separately, so that the rest of most gaps fits into a byte.
    `count` is the number of changes, `num_items` that of all elements."""
    return max(0, (num_items // max(count, 1)).bit_length() - MEAN_GAP_BITS)


def _gaps(positions: np.ndarray) -> np.ndarray:
    """Returns the number of elements between each position and the one before it."""
    gaps = np.empty(positions.size, np.int32)
    gaps[:1] = positions[:1]
    np.subtract(positions[1:], positions[:-1], out=gaps[1:], casting="same_kind")
    gaps[1:] -= 1
    return gaps


def _positions(high: np.ndarray, low: np.ndarray, num_low_bits: int, count: int) -> np.ndarray:
    found = _without_fillers(high, count) << num_low_bits
    found += np.arange(count)
    if num_low_bits:
        found += np.cumsum(_unpack_low_bits(low, num_low_bits, count), dtype=np.int64)
    return found


def _with_fillers(gaps: np.ndarray) -> np.ndarray:
    """Codes gaps as bytes: each gap as `gap // 255` bytes `FILLER` (255), followed by the byte `gap % 255`."""
    wide = np.flatnonzero(gaps >= FILLER)
    if not wide.size:
        return gaps.astype(np.uint8)
    num_fillers = gaps[wide] // FILLER
    before = np.zeros(gaps.size, np.int32)
    before[wide] = num_fillers
    ends = np.cumsum(before, dtype=np.int32)
    ends += np.arange(gaps.size, dtype=np.int32)
    found = np.full(int(ends[-1]) + 1, FILLER, np.uint8)
    last = gaps.copy()
    last[wide] -= num_fillers * FILLER
    found[ends] = last
    return found


def _without_fillers(high: np.ndarray, count: int) -> np.ndarray:
    """Reverses `_with_fillers`: returns the running sums of the `count` gaps that are coded in the bytes `high`."""
    sums = np.cumsum(high, dtype=np.int64)
    ends = high != FILLER
    if np.count_nonzero(ends) != count or not ends[-1:].all():
        raise CodecError(f"a sparse code announces {count} changes, but holds another number of positions")
    return sums if count == high.size else sums[ends]


def _pack_low_bits(gaps: np.ndarray, num_low_bits: int) -> np.ndarray:
    """Packs the low bits of all gaps: every gap's lowest bit, then every gap's second lowest, and so on."""
    return np.packbits(np.concatenate([(gaps >> bit) & 1 for bit in range(num_low_bits)] or [gaps[:0]]).astype(bool))


def _unpack_low_bits(packed: np.ndarray, num_low_bits: int, count: int) -> np.ndarray:
    bits = np.unpackbits(packed, count=count * num_low_bits).reshape(num_low_bits, count)
    low = np.zeros(count, np.int32)
    for bit in range(num_low_bits):
        low |= bits[bit].astype(np.int32) << bit
    return low


SPARSE_BELOW = 0.5
"""Largest share of changed elements for which `sparse` is tried: above it, `shift` is faster and, with normally spread
updates, no larger."""
SURE_SHARE = 0.25
"""A sparse code of at most this share of the raw bytes is used without a trial of other codings, which are larger."""
BLOCK_ITEMS = 1 << 17
"""Elements compared at a time: few enough to stay in a core's cache until their changes are read."""
SAMPLE_ITEMS, NUM_SAMPLES = 8192, 4
RAW, PLANES = b"\0", b"\1"
"""First byte of a dense code: raw bytes follow, or planes (one stream per byte position of the elements)."""


def find_changes(new: np.ndarray, old: np.ndarray, dtype: str) -> SparseChanges:
    if ITEM_BYTES[dtype] != 2:
        raise CodecError(f"changes of dtype {dtype} cannot be listed; only types of two bytes have a sparse code")
    changes = _find_changes(new, old, new.size)
    assert changes is not None
    return changes


def encode(
    new: np.ndarray, old: np.ndarray | None, dtype: str, changes: SparseChanges | None = None
) -> tuple[Coding, bytes]:
    """Codes a part's raw bytes `new` with the coding that is probably the smallest; returns the coding and the code.
    `old` is the same part of the base, None without a base; `changes` are the changes from `old` to `new`; None: find
    them here."""
    item_bytes = ITEM_BYTES[dtype]
    if old is None:
        return Coding.DENSE, _encode_dense(new, item_bytes)
    if old.size != new.size:
        raise CodecError(f"a part of {new.size} bytes cannot be coded against a base's part of {old.size} bytes")
    if item_bytes == 2:
        return _encode_pairs(new, old, changes)
    if np.array_equal(new, old):
        return Coding.SAME, b""
    return _encode_whole(new, old, item_bytes)


def decode(coding: Coding, data: Any, old: np.ndarray | None, num_bytes: int, dtype: str) -> np.ndarray:
    """Returns the `num_bytes` raw bytes of a part from its code `data`. `old` is the same part of the base, None
    without a base; coding `same` returns `old` itself."""
    item_bytes = ITEM_BYTES[dtype]
    view = memoryview(data)
    if num_bytes % item_bytes:
        raise CodecError(f"a part of {num_bytes} bytes does not hold a whole number of {dtype} elements")
    if coding is Coding.DENSE:
        return _decode_dense(view, num_bytes, item_bytes)
    if old is None or old.size != num_bytes:
        found = "no base" if old is None else f"a base's part of {old.size} bytes"
        raise CodecError(f"coding {coding.value} needs a base's part of {num_bytes} bytes and was given {found}")
    if coding is Coding.SAME:
        if len(view):
            raise CodecError(f"a part with coding same has {len(view)} bytes of code; it must have none")
        return old
    if item_bytes != 2 and (coding is Coding.SPARSE or item_bytes != 4):
        raise CodecError(f"coding {coding.value} does not exist for dtype {dtype}")
    return decode_sparse(view, old) if coding is Coding.SPARSE else _decode_shift(view, old, item_bytes)


def _encode_pairs(new: np.ndarray, old: np.ndarray, changes: SparseChanges | None) -> tuple[Coding, bytes]:
    most = int(SPARSE_BELOW * (new.size // 2))
    changes = _find_changes(new, old, most) if changes is None else changes
    if changes is None or changes.positions.size > most:
        return _encode_whole(new, old, 2)
    if not changes.positions.size:
        return Coding.SAME, b""
    sparse = encode_sparse(changes, new, old)
    if len(sparse) <= SURE_SHARE * new.size:
        return Coding.SPARSE, sparse
    other = _encode_whole(new, old, 2)
    return other if len(other[1]) < len(sparse) else (Coding.SPARSE, sparse)


def _find_changes(new: np.ndarray, old: np.ndarray, most: int) -> SparseChanges | None:
    """Returns all changes from `old` to `new`, raw bytes of a two-byte type; None if there are more than `most`."""
    new_items, old_items = items_of(new, 2), items_of(old, 2)
    positions, differences, count = [np.empty(0, np.int64)], [np.empty(0, np.uint16)], 0
    for start in range(0, new_items.size, BLOCK_ITEMS):
        new_block, old_block = new_items[start : start + BLOCK_ITEMS], old_items[start : start + BLOCK_ITEMS]
        found = np.flatnonzero(new_block != old_block)
        count += found.size
        if count > most:
            return None
        differences.append(new_block.take(found) - old_block.take(found))
        found += start
        positions.append(found)
    return SparseChanges(np.concatenate(positions), np.concatenate(differences))


def _encode_whole(new: np.ndarray, old: np.ndarray, item_bytes: int) -> tuple[Coding, bytes]:
    """Codes all elements as `shift` or `dense`, whichever is smaller for a sample; returns the coding and the code."""
    if item_bytes not in (2, 4):
        return Coding.DENSE, _encode_dense(new, item_bytes)
    new_items, old_items = items_of(new, item_bytes), items_of(old, item_bytes)
    some_new, some_old = _sample(new_items), _sample(old_items)
    shift = write_streams(planes(zigzag(some_new - some_old)))
    dense = _encode_dense(some_new.view(np.uint8), item_bytes)
    whole = some_new.size == new_items.size
    if len(shift) < len(dense):
        return Coding.SHIFT, shift if whole else write_streams(planes(zigzag(new_items - old_items)))
    return Coding.DENSE, dense if whole else _encode_dense(new, item_bytes)


def _sample(items: np.ndarray) -> np.ndarray:
    """Returns a few evenly spread runs of neighbouring elements, or all elements of a small part."""
    if items.size <= SAMPLE_ITEMS * NUM_SAMPLES:
        return items
    starts = np.linspace(0, items.size - SAMPLE_ITEMS, NUM_SAMPLES, dtype=np.int64)
    return np.concatenate([items[start : start + SAMPLE_ITEMS] for start in starts])


def _decode_shift(view: memoryview, old: np.ndarray, item_bytes: int) -> np.ndarray:
    streams = Streams(view)
    new = unzigzag(streams.next_planes(old.size // item_bytes, item_bytes))
    streams.end()
    new += items_of(old, item_bytes)
    return new.view(np.uint8)


def _encode_dense(new: np.ndarray, item_bytes: int) -> bytes:
    coded = write_streams(planes(items_of(new, item_bytes)))
    return PLANES + coded if len(coded) < new.size else RAW + new.tobytes()


def _decode_dense(view: memoryview, num_bytes: int, item_bytes: int) -> np.ndarray:
    begin, rest = bytes(view[:1]), view[1:]
    if begin == RAW:
        if len(rest) != num_bytes:
            raise CodecError(f"a dense code has {len(rest)} raw bytes; its part has {num_bytes}")
        return np.frombuffer(rest, np.uint8)
    if begin != PLANES:
        raise CodecError(f"a dense code begins with {begin!r}; it must begin with {RAW!r} or {PLANES!r}")
    streams = Streams(rest)
    items = streams.next_planes(num_bytes // item_bytes, item_bytes)
    streams.end()
    return items.view(np.uint8)
