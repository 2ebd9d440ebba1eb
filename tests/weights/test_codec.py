"""Every part comes back to the bit, small where it can be; codes that are none are in `test_codec_damage.py`."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from coded_parts import NUM_ITEMS, back, bfloat16, bits, near_zero, step, weights
from hypothesis import example, given, settings
from hypothesis import strategies as st

from offbeat.weights.codec import BLOCK_ITEMS, CodecError, decode, encode, find_changes
from offbeat.weights.manifest import ITEM_BYTES, Coding

# Every value


@settings(max_examples=300, deadline=None)
@given(
    dtype=st.sampled_from(sorted(ITEM_BYTES)),
    num_items=st.one_of(st.integers(0, 70), st.integers(1000, 5000), st.just(40_000)),
    share=st.sampled_from([0.0, 0.001, 0.03, 0.3, 0.6, 1.0]),
    largest=st.sampled_from([1, 3, 300, 1 << 15, 1 << 62]),
    based=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_part_of_any_type_comes_back_to_the_bit(dtype, num_items, share, largest, based, seed):
    rng, item_bytes = np.random.default_rng(seed), ITEM_BYTES[dtype]
    old = rng.integers(0, 256, num_items * item_bytes, dtype=np.uint8)
    moves = rng.integers(-largest, largest + 1, num_items) * (rng.random(num_items) < share)
    new = (old.view(f"<u{item_bytes}") + moves.astype(np.int64).astype(f"<u{item_bytes}")).view(np.uint8)
    base = old if based else None

    coding, data = encode(new, base, dtype)

    assert np.array_equal(back(coding, data, base, new, dtype), new)
    assert len(data) <= new.size + 1
    assert (coding is Coding.SAME) == (based and np.array_equal(new, old))
    assert coding is not Coding.SPARSE or item_bytes == 2
    assert coding is not Coding.SHIFT or item_bytes in (2, 4)
    assert based or coding is Coding.DENSE


@settings(max_examples=200, deadline=None)
@given(
    positions=st.sets(st.integers(0, NUM_ITEMS - 1), min_size=1, max_size=40),
    differences=st.lists(st.integers(1, 65535), min_size=40, max_size=40),
)
@example(positions={NUM_ITEMS - 1}, differences=[1] * 40)
@example(positions={0}, differences=[32768] * 40)
@example(positions={254, 509, 510, 766, 1022}, differences=[65535] * 40)
@example(positions=set(range(40)), differences=[32769] * 40)
def test_changes_anywhere_and_by_any_amount_come_back_sparsely(positions, differences):
    places = sorted(positions)
    old = np.zeros(NUM_ITEMS, "<u2")
    new = old.copy()
    new[places] = differences[: len(places)]
    coding, data = encode(new.view(np.uint8), old.view(np.uint8), "BF16")
    assert coding is Coding.SPARSE
    assert np.array_equal(back(coding, data, old.view(np.uint8), new.view(np.uint8), "BF16"), new.view(np.uint8))


@pytest.mark.parametrize("gap", [1, 2, 31, 32, 64, 254, 255, 256, 257, 510, 511, 65535, 65536, 65537, 300_000])
def test_gaps_around_every_border_come_back(gap: int):
    old = np.full(NUM_ITEMS, 7, "<u2")
    for first in (0, 1, gap - 1):
        new = old.copy()
        new[first::gap] += 1
        coding, data = encode(new.view(np.uint8), old.view(np.uint8), "BF16")
        assert np.array_equal(back(coding, data, old.view(np.uint8), new.view(np.uint8), "BF16").view("<u2"), new)


@pytest.mark.parametrize("gap", [254, 255, 256, 257, 510, 511, 512, 766, 5000])
def test_one_wide_gap_between_crowded_changes_comes_back(gap: int):
    old = np.full(NUM_ITEMS, 7, "<u2")
    new = old.copy()
    new[: NUM_ITEMS // 4] += 1
    new[NUM_ITEMS // 4 - 1 + gap] += 1
    coding, data = encode(new.view(np.uint8), old.view(np.uint8), "BF16")
    assert coding is Coding.SPARSE
    assert np.array_equal(back(coding, data, old.view(np.uint8), new.view(np.uint8), "BF16").view("<u2"), new)


def test_nan_infinities_negative_zero_and_sign_flips_are_exact():
    nan, negative_nan, infinity, zero, negative_zero, one, minus_one = 0x7FC1, 0xFFC1, 0x7F80, 0, 0x8000, 0x3F80, 0xBF80
    values = [nan, negative_nan, infinity, zero, negative_zero, one, minus_one]
    old = np.repeat(np.array(values, "<u2"), len(values))
    new = np.tile(np.array(values, "<u2"), len(values))
    for padding in (0, 50_000):  # alone, and as rare changes
        before, after = np.pad(old, (0, padding)).view(np.uint8), np.pad(new, (0, padding)).view(np.uint8)
        coding, data = encode(after, before, "BF16")
        assert np.array_equal(back(coding, data, before, after, "BF16"), after)


def test_the_base_is_left_as_it_was():
    new, old = step(weights(1), 1e-5, 2)
    kept = old.copy()
    old.flags.writeable = False
    coding, data = encode(new, old, "BF16")
    decode(coding, data, old, new.size, "BF16")
    assert np.array_equal(old, kept)


def test_a_base_at_an_odd_address_will_do():
    new, old = step(weights(1, 5000), 1e-5, 2)
    shifted = np.concatenate([[np.uint8(0)], old])[1:]
    coding, data = encode(new, shifted, "BF16")
    assert (coding, data) == encode(new, old, "BF16")
    assert np.array_equal(back(coding, data, shifted, new, "BF16"), new)


# The choice


@pytest.mark.parametrize(
    "lr, coding", [(0.0, "same"), (1e-6, "sparse"), (1e-5, "sparse"), (3e-4, "shift"), (1.0, "dense")]
)
def test_the_size_of_an_update_chooses_the_coding(lr: float, coding: str):
    new, old = step(weights(3), lr, 4)
    assert encode(new, old, "BF16")[0] == coding


@pytest.mark.parametrize("lr", [1e-7, 1e-6, 3e-6, 1e-5])
def test_a_sparse_code_is_near_the_entropy_of_positions_and_signs(lr: float):
    new, old = step(weights(5), lr, 6)
    density = find_changes(new, old, "BF16").positions.size / NUM_ITEMS
    entropy_bits = -density * np.log2(density) - (1 - density) * np.log2(1 - density) + density
    assert 8 * len(encode(new, old, "BF16")[1]) <= 1.35 * NUM_ITEMS * entropy_bits


@pytest.mark.parametrize("lr", [1e-6, 3e-6, 1e-5])
def test_weights_near_zero_which_all_move_cost_no_positions(lr: float):
    new, old = near_zero(18, lr)
    found = find_changes(new, old, "BF16")
    density = found.positions.size / NUM_ITEMS
    entropy_bits = -density * np.log2(density) - (1 - density) * np.log2(1 - density) + density
    coding, data = encode(new, old, "BF16")
    assert coding is Coding.SPARSE
    assert 8 * len(data) <= 1.35 * NUM_ITEMS * entropy_bits
    assert np.array_equal(back(coding, data, old, new, "BF16"), new)


def test_a_few_large_moves_among_many_weights_near_zero_are_coded_by_position():
    old = np.zeros(NUM_ITEMS, "<u2")
    new = old.copy()
    new[::5000] = 0x3F80
    coding, data = encode(new.view(np.uint8), old.view(np.uint8), "BF16")
    assert len(data) < 3 * len(new[::5000])
    assert np.array_equal(back(coding, data, old.view(np.uint8), new.view(np.uint8), "BF16").view("<u2"), new)


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), num_items=st.integers(2, 3000), share=st.sampled_from([0.01, 0.1, 0.4, 1.0]))
def test_weights_near_zero_come_back_to_the_bit_whatever_else_moves(seed, num_items, share):
    rng = np.random.default_rng(seed)
    near = rng.random(num_items) < rng.choice([0.0, 0.01, 0.3])
    old = np.where(near, rng.integers(0, 4, num_items) | rng.choice([0, 0x8000], num_items), 0x3F80).astype("<u2")
    moves = (
        rng.integers(0, 65536, num_items) * (near | (rng.random(num_items) < 0.01)) * (rng.random(num_items) < share)
    )
    new = (old + moves.astype("<u2")).view(np.uint8)
    coding, data = encode(new, old.view(np.uint8), "F16")
    assert np.array_equal(back(coding, data, old.view(np.uint8), new, "F16"), new)


def test_a_dense_code_is_near_the_entropy_of_signs_and_exponents():
    _, part = step(weights(5), 0.0, 6)
    upper = np.bincount(part[1::2]) / NUM_ITEMS
    entropy_bits = 8 - np.sum(upper * np.log2(upper, where=upper > 0, out=np.zeros_like(upper)))
    assert 8 * len(encode(part, None, "BF16")[1]) <= 1.01 * NUM_ITEMS * entropy_bits


def test_float32_shifts_are_smaller_than_the_values_and_a_stranger_is_coded_alone():
    old = weights(7).astype("<f4")
    near, far = (old + np.float32(1e-6)).view(np.uint8), weights(8).astype("<f4").view(np.uint8)
    base = old.view(np.uint8)
    assert encode(near, base, "F32")[0] is Coding.SHIFT
    assert len(encode(near, base, "F32")[1]) < 0.6 * near.size
    assert encode(far, base, "F32")[0] is Coding.DENSE
    for new in (near, far):
        assert np.array_equal(back(*encode(new, base, "F32"), base, new, "F32"), new)


def test_noise_is_kept_as_it_is():
    noise = np.random.default_rng(9).integers(0, 256, 100_000, dtype=np.uint8)
    coding, data = encode(noise, None, "BF16")
    assert (coding, data) == (Coding.DENSE, b"\0" + noise.tobytes())


def test_weights_that_became_zero_are_not_coded_by_their_many_large_changes():
    old = bfloat16(np.where(np.arange(NUM_ITEMS) % 5 < 2, weights(10), 0.0))
    new = np.zeros_like(old)
    coding, data = encode(new, old, "BF16")
    assert coding is Coding.DENSE
    assert len(data) < 1000
    assert np.array_equal(back(coding, data, old, new, "BF16"), new)


@pytest.mark.parametrize("lr", [3e-6, 3e-4])
def test_known_changes_give_the_same_code(lr: float):
    new, old = step(weights(12), lr, 13)
    assert encode(new, old, "BF16", find_changes(new, old, "BF16")) == encode(new, old, "BF16")
    assert encode(old, old, "BF16", find_changes(old, old, "BF16")) == (Coding.SAME, b"")


def test_changes_are_positions_and_differences_modulo_the_range():
    found = find_changes(bits(1, 0, 5, 0xFFFF), bits(1, 1, 4, 1), "BF16")
    assert found.positions.tolist() == [1, 2, 3]
    assert found.differences.tolist() == [0xFFFF, 1, 0xFFFE]
    assert (found.positions.dtype, found.differences.dtype) == (np.int64, np.uint16)


def test_changes_are_found_on_both_sides_of_every_seam():
    old = np.zeros(3 * BLOCK_ITEMS + 5, "<u2")
    new = old.copy()
    places = [0, BLOCK_ITEMS - 1, BLOCK_ITEMS, 2 * BLOCK_ITEMS, 3 * BLOCK_ITEMS - 1, 3 * BLOCK_ITEMS + 4]
    new[places] = 1, 2, 3, 4, 5, 6
    found = find_changes(new.view(np.uint8), old.view(np.uint8), "BF16")
    assert (found.positions.tolist(), found.differences.tolist()) == (places, [1, 2, 3, 4, 5, 6])


def test_only_types_of_two_bytes_have_changes():
    with pytest.raises(CodecError, match="F32"):
        find_changes(bits(1, 2), bits(1, 3), "F32")


def test_threads_share_nothing():
    pairs = [step(weights(seed, 200_000), 1e-5, seed) for seed in range(8)]
    wanted = [encode(new, old, "BF16") for new, old in pairs]
    found: list[object] = [None] * len(pairs)

    def work(index: int) -> None:
        new, old = pairs[index]
        coding, data = encode(new, old, "BF16")
        found[index] = (coding, data) if np.array_equal(back(coding, data, old, new, "BF16"), new) else None

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(pairs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == wanted
