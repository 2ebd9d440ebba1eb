"""A code that is none is refused, whatever it claims, at no great cost."""

from __future__ import annotations

import struct
import tracemalloc
from contextlib import suppress

import numpy as np
import pytest
import zstandard
from coded_parts import bits, near_zero, step, weights
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.weights.codec import CodecError, decode, encode
from offbeat.weights.manifest import Coding


def codes() -> list[tuple[Coding, bytes, np.ndarray | None, np.ndarray, str]]:
    new, old = step(weights(14, 20_000), 1e-5, 15)
    far, _ = step(weights(14, 20_000), 3e-4, 16)
    floats = weights(17, 5000).astype("<f4").view(np.uint8)
    moved, near = (part[: 1 << 17] for part in near_zero(19, 1e-6))
    return [
        (*encode(new, old, "BF16"), old, new, "BF16"),
        (*encode(far, old, "BF16"), old, far, "BF16"),
        (*encode(new, None, "BF16"), None, new, "BF16"),
        (*encode(floats, None, "F32"), None, floats, "F32"),
        (*encode(moved, near, "BF16"), near, moved, "BF16"),
    ]


CODES = codes()


@pytest.mark.parametrize("index", range(5))
def test_a_code_cut_short_anywhere_or_with_more_behind_it_is_refused(index: int):
    coding, data, old, new, dtype = CODES[index]
    assert coding == ["sparse", "shift", "dense", "dense", "sparse"][index]
    for length in {*range(0, 60), *range(0, len(data), 97), len(data) - 1}:
        with pytest.raises(CodecError):
            decode(coding, data[:length], old, new.size, dtype)
    with pytest.raises(CodecError):
        decode(coding, data + b"\0", old, new.size, dtype)


@settings(max_examples=400, deadline=None)
@given(index=st.integers(0, 4), flips=st.lists(st.integers(0, 2**31), min_size=1, max_size=4))
def test_flipped_bits_give_an_error_or_a_part_of_the_right_size_never_anything_else(index, flips):
    coding, data, old, new, dtype = CODES[index]
    damaged = bytearray(data)
    for flip in flips:
        place = flip % (8 * len(damaged)) if flip % 2 else flip % 512  # headers as often as the rest
        damaged[place // 8] ^= 1 << place % 8
    try:
        found = decode(coding, bytes(damaged), old, new.size, dtype)
    except CodecError:
        return
    assert found.dtype == np.uint8
    assert found.size == new.size


@settings(max_examples=300, deadline=None)
@given(data=st.binary(max_size=80), coding=st.sampled_from(Coding), dtype=st.sampled_from(["BF16", "F32", "I64", "U8"]))
def test_any_bytes_give_an_error_or_a_part_of_the_right_size(data, coding, dtype):
    old = np.zeros(64, np.uint8)
    with suppress(CodecError):
        assert decode(coding, data, old, 64, dtype).size == 64


def test_a_code_of_another_part_is_refused_by_its_size():
    coding, data, old, new, _ = CODES[0]
    with pytest.raises(CodecError, match="needs a base's part of 39998 bytes"):
        decode(coding, data, old, new.size - 2, "BF16")
    with pytest.raises(CodecError, match="was given no base"):
        decode(coding, data, None, new.size, "BF16")
    with pytest.raises(CodecError):
        decode(Coding.DENSE, CODES[2][1], None, new.size - 2, "BF16")
    with pytest.raises(CodecError, match="whole number"):
        decode(Coding.DENSE, CODES[2][1], None, new.size - 1, "BF16")
    with pytest.raises(CodecError, match="must have none"):
        decode(Coding.SAME, b"x", old, new.size, "BF16")
    with pytest.raises(CodecError, match="does not exist for dtype U8"):
        decode(Coding.SHIFT, data, old, new.size, "U8")
    with pytest.raises(CodecError, match="does not exist for dtype F32"):
        decode(Coding.SPARSE, data, old, new.size, "F32")
    with pytest.raises(CodecError, match="against a base's part of"):
        encode(new[2:], old, "BF16")


def test_a_change_beyond_the_part_is_refused():
    old = np.zeros(2000, np.uint8)
    new = old.copy()
    new[-1] = 1
    coding, data = encode(new, old, "BF16")
    with pytest.raises(CodecError, match="changes element 999 of a part with 998"):
        decode(coding, data, old[:-4], 1996, "BF16")


def sparse_code(count: int, *streams: bytes, num_high: int | None = None, limit: int = 0) -> bytes:
    """By hand: a header and streams as they are."""
    stored = b"".join(struct.pack("<I", 2 * len(stream)) + stream for stream in streams)
    return struct.pack("<IIH", count, len(streams[0]) if num_high is None else num_high, limit) + stored


REST = (b"", b"\0", b"\0", b"", b"", b"", b"")
"""No low bits, no sign, none by more than one, none near zero."""


def test_a_sparse_code_made_by_hand_is_read():
    found = decode(Coding.SPARSE, sparse_code(5, b"\0\0\0\3\xff\0", *REST), np.zeros(600, np.uint8), 600, "BF16")
    assert np.flatnonzero(found.view("<u2")).tolist() == [0, 1, 2, 6, 262]


def test_a_sparse_code_without_positions_made_by_hand_is_read():
    old = bits(0x3F80, 3, 0x8002, 4)
    code = sparse_code(0, b"", *(b"",) * 5, b"\2\3", b"\0\0", limit=4)
    found = decode(Coding.SPARSE, code, old, 8, "BF16")
    assert found.view("<u2").tolist() == [0x3F80, 4, 0x8000, 4]
    with pytest.raises(CodecError, match="has 2 bytes; it must have 3"):
        decode(Coding.SPARSE, code, bits(0x3F80, 3, 0x8002, 0), 8, "BF16")


@pytest.mark.parametrize(
    "data, why",
    [
        (sparse_code(5, b"\0\0\3\xff\xff", *REST), "announces 5 changes"),
        (sparse_code(5, b"\0\0\0\3\3\xff", *REST), "announces 5 changes"),
        (sparse_code(5, b"\0\0\0\3\3\3", *REST), "announces 5 changes"),
        (sparse_code(0, b"", b"", b"", b"", *REST[3:]), "0 changes"),
        (sparse_code(301, bytes(301), b"", bytes(38), bytes(38), *REST[3:]), "301 changes"),
        (sparse_code(5, bytes(7), *REST), "5 changes in 7 bytes"),
        (sparse_code(5, bytes(4), *REST), "5 changes in 4 bytes"),
        (sparse_code(5, b"\0\0\0\0\xff\51", *REST), "element 300 of a part with 300"),
        (sparse_code(5, bytes(4), *REST, num_high=5), "has 4 bytes; it must have 5"),
        (sparse_code(5, bytes(5), b"\0", *REST[1:]), "has 1 bytes; it must have 0"),
        (sparse_code(5, bytes(5), *REST[:-1]) + struct.pack("<I", 4), "cut short"),
        (sparse_code(5, bytes(5), *REST)[:-4] + struct.pack("<I", 1), "a compressed stream has 0 bytes"),
    ],
)
def test_a_sparse_code_that_contradicts_itself_is_refused(data: bytes, why: str):
    with pytest.raises(CodecError, match=why):
        decode(Coding.SPARSE, data, np.zeros(600, np.uint8), 600, "BF16")


def test_a_code_that_claims_gigabytes_costs_next_to_nothing():
    bomb = zstandard.ZstdCompressor().compress(bytes(1 << 28))  # a frame that says its size, 256 MiB
    silent = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(1 << 28))
    old = np.zeros(65536, np.uint8)
    frames = [struct.pack("<I", 2 * len(frame) + 1) + frame for frame in (bomb, silent)]
    attempts = [(Coding.SHIFT, frame * 2) for frame in frames]
    attempts += [(Coding.DENSE, b"\1" + frame * 2) for frame in frames]
    attempts += [
        (Coding.SPARSE, struct.pack("<II", count, high) + frames[0]) for count, high in ((9, 9), (2**32 - 1,) * 2)
    ]
    tracemalloc.start()
    try:
        for coding, data in attempts:
            with pytest.raises(CodecError):
                decode(coding, data, old, old.size, "BF16")
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes < 4 << 20


def test_a_second_frame_behind_a_compressed_stream_is_refused():
    plane = np.zeros(32768, np.uint8)
    frame = zstandard.ZstdCompressor().compress(plane)
    twice = struct.pack("<I", 2 * 2 * len(frame) + 1) + 2 * frame
    with pytest.raises(CodecError, match="damaged"):
        decode(Coding.SHIFT, 2 * twice, np.zeros(65536, np.uint8), 65536, "BF16")
