"""Codes a part of a tensor by what changed since its base: the smallest of same, sparse, shift and dense.

Training moves one weight in a hundred per step, and nearly always to a neighbouring value of its type. So a part is
seen as integers, the bits of its elements, and

- `sparse` (types of two bytes, `offbeat.weights.sparse`) says where they changed and by how much;
- `shift` (two and four bytes) says by how much each changed, modulo the type's range;
- `dense` says what they are, and needs no base.

`encode` tries only what can win: the share of elements that changed decides, or a sample.

Guarantees: decoding is integer arithmetic, so NaN, -0 and sign flips come out to the bit. `decode` takes memory and
time in proportion to `num_bytes`, whatever the code claims, and raises `CodecError` where the code contradicts itself
or the part. It cannot tell a wrong base or a plausible code from the right one: whoever decodes checks the digest.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from offbeat.weights.manifest import ITEM_BYTES, Coding
from offbeat.weights.sparse import Changes, decode_sparse, encode_sparse
from offbeat.weights.streams import CodecError, Streams, items_of, planes, unzigzag, write_streams, zigzag

__all__ = ["Changes", "CodecError", "decode", "encode", "find_changes"]

SPARSE_BELOW = 0.5
"""The share of changed elements from which `shift` is no larger on updates with a normal spread, and quicker."""
SURE_SHARE = 0.25
"""Of the raw bytes: a sparse code below it is taken unseen, since no weights are that small when coded densely."""
BLOCK_ITEMS = 1 << 17
"""Compared in one go: few enough to stay in a core's cache until their changes are read. It saved up to a third of the
time on two busy cores (measured at 1 % changed)."""
SAMPLE_ITEMS, NUM_SAMPLES = 8192, 4
RAW, PLANES = b"\0", b"\1"
"""How a dense code begins."""


def find_changes(new: np.ndarray, old: np.ndarray, dtype: str) -> Changes:
    if ITEM_BYTES[dtype] != 2:
        raise CodecError(f"changes of {dtype}: only types of two bytes have them")
    changes = _find_changes(new, old, new.size)
    assert changes is not None
    return changes


def encode(new: np.ndarray, old: np.ndarray | None, dtype: str, changes: Changes | None = None) -> tuple[Coding, bytes]:
    """The smallest code of a part's raw bytes, against its base's where there is one; `changes` if they are known."""
    item_bytes = ITEM_BYTES[dtype]
    if old is None:
        return Coding.DENSE, _encode_dense(new, item_bytes)
    if old.size != new.size:
        raise CodecError(f"a part of {new.size} bytes on a base of {old.size}")
    if item_bytes == 2:
        return _encode_pairs(new, old, changes)
    if np.array_equal(new, old):
        return Coding.SAME, b""
    return _encode_whole(new, old, item_bytes)


def decode(coding: Coding, data: Any, old: np.ndarray | None, num_bytes: int, dtype: str) -> np.ndarray:
    """The raw bytes of a part of `num_bytes`; `old` itself, where nothing changed."""
    item_bytes = ITEM_BYTES[dtype]
    view = memoryview(data)
    if num_bytes % item_bytes:
        raise CodecError(f"a part of {num_bytes} bytes holds no whole number of {dtype}")
    if coding is Coding.DENSE:
        return _decode_dense(view, num_bytes, item_bytes)
    if old is None or old.size != num_bytes:
        found = "none" if old is None else f"one of {old.size}"
        raise CodecError(f"coding {coding.value} wants a base of {num_bytes} bytes and has {found}")
    if coding is Coding.SAME:
        if len(view):
            raise CodecError(f"coding same has {len(view)} bytes; allowed none")
        return old
    if item_bytes != 2 and (coding is Coding.SPARSE or item_bytes != 4):
        raise CodecError(f"coding {coding.value} is not made for {dtype}")
    return decode_sparse(view, old) if coding is Coding.SPARSE else _decode_shift(view, old, item_bytes)


def _encode_pairs(new: np.ndarray, old: np.ndarray, changes: Changes | None) -> tuple[Coding, bytes]:
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


def _find_changes(new: np.ndarray, old: np.ndarray, most: int) -> Changes | None:
    """None where there are more of them."""
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
    return Changes(np.concatenate(positions), np.concatenate(differences))


def _encode_whole(new: np.ndarray, old: np.ndarray, item_bytes: int) -> tuple[Coding, bytes]:
    """By shift or densely, as a sample says."""
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
    """A few runs of neighbours, evenly spread; all of a part that is small."""
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
            raise CodecError(f"a dense code of {len(rest)} raw bytes for a part of {num_bytes}")
        return np.frombuffer(rest, np.uint8)
    if begin != PLANES:
        raise CodecError(f"a dense code begins with {begin!r}")
    streams = Streams(rest)
    items = streams.next_planes(num_bytes // item_bytes, item_bytes)
    streams.end()
    return items.view(np.uint8)
