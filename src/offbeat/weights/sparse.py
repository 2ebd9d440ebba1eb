"""The sparse code of a part: where its elements of two bytes changed, and by how much.

Positions are rising, so gaps between them say them all. Gaps lose low bits, which are noise, until most fit a byte;
bytes code well. By how much: a bit for the sign, a bit for "by more than one", and the rest of those few.

Elements near zero are another matter. Floating point is so fine there that an update moves them all, and by many
values, while their neighbours move by one in a hundred steps. Where there are many of them the code names a limit, and
every element whose base lies below it is coded by its difference alone: its position goes without saying.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import numpy as np

from offbeat.weights.streams import CodecError, Streams, items_of, planes, unzigzag, write_streams, zigzag

HEADER = struct.Struct("<IIH")
"""Changes that have a position, bytes of their gaps, and below which size of the base's bits none has."""
MEAN_GAP_BITS = 6
"""What the mean gap keeps."""
FILLER = 255
"""A gap's byte that means: 255, and the next byte belongs to it."""
MANY_LARGER = 0.25
"""The share of changes by more than one from which elements near zero are looked for. It is less where all weights have
a normal spread; more, and most of it is near zero, where they were quantised, or where the learning rate is small."""
NEAR_QUANTILE = 0.75
"""Of the bases of those changes: where the limit is. Few elements below it stay as they are."""
MIN_NEAR_CHANGED = 0.6
"""Of the elements below the limit: else it is none."""
SIZE_BITS = 0x7FFF


class Changes(NamedTuple):
    """Where a part differs from its base, for types of two bytes."""

    positions: np.ndarray
    """Of elements, rising, int64."""
    differences: np.ndarray
    """Of their bits, modulo 65536 and never 0, uint16."""


def encode_sparse(changes: Changes, new: np.ndarray, old: np.ndarray) -> bytes:
    """Of at least one change between raw bytes."""
    new_items, old_items = items_of(new, 2), items_of(old, 2)
    sizes = np.abs(changes.differences.view("<i2")).view("<u2")  # of -32768, too: it is its own opposite
    limit = _limit(changes, sizes, old_items)
    near = _near(old_items, limit)
    if limit:
        far = np.flatnonzero(old_items.take(changes.positions) & SIZE_BITS >= limit)
        if MIN_NEAR_CHANGED * near.size > changes.positions.size - far.size:
            limit, near = 0, near[:0]
        else:
            changes, sizes = Changes(*(array.take(far) for array in changes)), sizes.take(far)
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
    return HEADER.pack(changes.positions.size, high.size, limit) + write_streams(streams)


def decode_sparse(view: memoryview, old: np.ndarray) -> np.ndarray:
    old_items = items_of(old, 2)
    num_items = old_items.size
    if len(view) < HEADER.size:
        raise CodecError(f"a sparse code of {len(view)} bytes is cut short")
    count, num_high, limit = HEADER.unpack_from(view)
    if count > num_items or not count <= num_high <= count + num_items // FILLER or not (count or limit):
        raise CodecError(f"{count} changes with {num_high} bytes of gaps in a part of {num_items} elements")
    num_low_bits, num_bit_bytes = _num_low_bits(count, num_items), -(-count // 8)
    near = _near(old_items, limit)
    streams = Streams(view[HEADER.size :])
    high = streams.next(num_high)
    low = streams.next(-(-count * num_low_bits // 8))
    negative = np.unpackbits(streams.next(num_bit_bytes), count=count).astype("<u2")
    larger = np.flatnonzero(np.unpackbits(streams.next(num_bit_bytes), count=count).view(bool))
    rest = streams.next_planes(larger.size, 2)
    near_differences = unzigzag(streams.next_planes(near.size, 2))
    streams.end()

    positions = _positions(high, low, num_low_bits, count)
    if count and positions[-1] >= num_items:
        raise CodecError(f"a change at element {positions[-1]} of {num_items}")
    differences = np.ones(count, "<u2")
    differences[larger] = rest + np.uint16(2)
    differences ^= -negative  # which is all ones where the sign is set: the opposite, less one
    differences += negative
    new = old.copy()
    items = items_of(new, 2)
    items[positions] = items.take(positions) + differences
    items[near] += near_differences
    return new


# Elements near zero


def _limit(changes: Changes, sizes: np.ndarray, old_items: np.ndarray) -> int:
    """Below which size of the base's bits elements have no position; 0: all have."""
    larger = changes.positions[sizes > 1]
    if larger.size < MANY_LARGER * sizes.size:
        return 0
    bases = old_items.take(larger) & SIZE_BITS
    middle = int(NEAR_QUANTILE * (bases.size - 1))
    return int(np.partition(bases, middle)[middle]) + 1


def _near(old_items: np.ndarray, limit: int) -> np.ndarray:
    """Which elements' bases lie below the limit."""
    return np.flatnonzero(old_items & SIZE_BITS < limit) if limit else np.empty(0, np.int64)


# Positions


def _num_low_bits(count: int, num_items: int) -> int:
    """How many bits the gaps lose: both sides know it by the number of changes."""
    return max(0, (num_items // max(count, 1)).bit_length() - MEAN_GAP_BITS)


def _gaps(positions: np.ndarray) -> np.ndarray:
    """How many elements lie between each position and the one before it."""
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
    """Gaps as bytes, those of 255 and more behind as many fillers as they want."""
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
    """The running sums of the gaps."""
    sums = np.cumsum(high, dtype=np.int64)
    ends = high != FILLER
    if np.count_nonzero(ends) != count or not ends[-1:].all():
        raise CodecError(f"bytes of gaps that are not those of {count} changes")
    return sums if count == high.size else sums[ends]


def _pack_low_bits(gaps: np.ndarray, num_low_bits: int) -> np.ndarray:
    """The lowest bits of every gap, all first bits before all second ones."""
    return np.packbits(np.concatenate([(gaps >> bit) & 1 for bit in range(num_low_bits)] or [gaps[:0]]).astype(bool))


def _unpack_low_bits(packed: np.ndarray, num_low_bits: int, count: int) -> np.ndarray:
    bits = np.unpackbits(packed, count=count * num_low_bits).reshape(num_low_bits, count)
    low = np.zeros(count, np.int32)
    for bit in range(num_low_bits):
        low |= bits[bit].astype(np.int32) << bit
    return low
