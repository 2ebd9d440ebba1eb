"""Which rows are read apart from the others, and which change places for it."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from offbeat.rules.padding_split import MIN_SAVED_TOKENS, exchanges, is_long_row, num_long_rows

LENGTHS = st.lists(st.integers(1, 600), min_size=1, max_size=60)


def reads(lengths: list[int], num_long: int) -> int:
    longest_first = sorted(lengths, reverse=True)
    near = longest_first[num_long:]
    return num_long * longest_first[0] + len(near) * max(near, default=0)


@given(LENGTHS)
def test_rows_are_read_in_the_two_parts_that_read_least_or_all_alike_where_that_saves_too_little(lengths):
    best = min(reads(lengths, num_long) for num_long in range(1, len(lengths) + 1))
    num_long, all_alike = int(num_long_rows(np.array(lengths))), reads(lengths, len(lengths))
    assert reads(lengths, num_long) == (best if all_alike - best >= MIN_SAVED_TOKENS else all_alike)


@given(LENGTHS, st.data())
def test_after_the_exchanges_no_row_behind_is_longer_than_one_that_is_long_row(lengths, data):
    num_long = data.draw(st.integers(1, len(lengths)))
    pairs = exchanges(lengths, num_long)
    placed = list(lengths)
    for one, other in pairs:
        assert lengths[one] > lengths[other], "an exchange that changes nothing"
        placed[one], placed[other] = placed[other], placed[one]
    assert min(placed[:num_long]) >= max(placed[num_long:], default=0)
    assert sorted(placed) == sorted(lengths)


@given(st.lists(st.lists(st.integers(0, 600), min_size=20, max_size=20), min_size=1, max_size=4))
def test_many_lanes_at_once_are_each_lane_alone_and_nothing_counts_as_no_row(lanes):
    far = is_long_row(np.array(lanes))
    for lane, is_far in zip(lanes, far, strict=True):
        rows = [length for length in lane if length]
        num_long = int(num_long_rows(np.array(rows))) if rows else 0
        read_far = [length for length, one in zip(lane, is_far, strict=True) if one]
        assert sorted(read_far, reverse=True) == sorted(rows, reverse=True)[:num_long]
