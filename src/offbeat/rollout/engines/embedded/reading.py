"""How far a decode step reads each slot: all of them as far as the longest, or long ones first and the others less far.

All rows grow by a token a step, so what is longer stays longer: who goes first is decided when requests start, and kept
until the next ones do. Where answers are carried on over versions, a few long ones would otherwise make every fresh one
read their whole length. Pure arithmetic over lengths; the stepper moves the rows.
"""

from __future__ import annotations

from collections.abc import Sequence

MIN_SAVED_TOKENS = 4096
"""Fewer reads are not worth the kernels that a second part adds to every layer."""


def num_read_far(lengths: Sequence[int]) -> int:
    """How many of the longest rows to read apart from the others; all of them where that saves too little."""
    longest_first = sorted(lengths, reverse=True)
    num_rows = len(longest_first)
    best, saved = num_rows, MIN_SAVED_TOKENS - 1
    for num_far in range(1, num_rows):
        saves = (num_rows - num_far) * (longest_first[0] - longest_first[num_far])
        if saves > saved:
            best, saved = num_far, saves
    return best


def exchanges(lengths: Sequence[int], num_far: int) -> list[tuple[int, int]]:
    """Pairs of rows that change places, so that the longest stand first; as few as there can be."""
    order = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    far = set(order[:num_far])
    comes = [row for row in order[:num_far] if row >= num_far]
    goes = [row for row in range(num_far) if row not in far]
    return list(zip(comes, goes, strict=True))
