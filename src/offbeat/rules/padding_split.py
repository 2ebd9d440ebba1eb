"""Splits the rows (running answers) of a padded decode step into long and short ones, which are read separately.

A padded decode step reads every row's KV cache up to the length of the longest row. So a few long answers, continued
from earlier versions, would make every new answer as expensive as themselves. The split is chosen when requests start.
All rows grow by one token per decode step, so longer rows stay longer until new requests start. The embedded engine and
the event model share this rule.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

MIN_SAVED_TOKENS = 4096
"""Smallest number of tokens less to read for which a split is worth its extra kernels in every layer."""


def num_long_rows(lengths: np.ndarray) -> np.ndarray:
    """Returns how many of the longest rows a padded decode step should read separately, so that it reads the fewest
    tokens in total; the number of all rows if a split saves too little. The last axis of `lengths` holds the rows of
    one decode step, and 0 means no row. Rows of equal length are never separated."""
    longest_first = -np.sort(-lengths, axis=-1)
    num_rows = (lengths > 0).sum(axis=-1, keepdims=True)
    num_long = np.arange(lengths.shape[-1])
    saved = np.where(num_long < num_rows, (num_rows - num_long) * (longest_first[..., :1] - longest_first), 0)
    best = saved.argmax(axis=-1, keepdims=True)
    is_worth_it = np.take_along_axis(saved, best, -1) >= MIN_SAVED_TOKENS
    return np.where(is_worth_it, best, num_rows)[..., 0]


def is_long_row(lengths: np.ndarray) -> np.ndarray:
    """Returns a mask of the long rows: the longest ones, as many as `num_long_rows` says."""
    order = np.argsort(np.argsort(-lengths, axis=-1, kind="stable"), axis=-1)
    return (order < num_long_rows(lengths)[..., None]) & (lengths > 0)


def exchanges(lengths: Sequence[int], num_long: int) -> list[tuple[int, int]]:
    """Returns the smallest set of swaps, as pairs of row indices, that brings the `num_long` longest rows to the
    front."""
    order = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    long = set(order[:num_long])
    comes = [row for row in order[:num_long] if row >= num_long]
    goes = [row for row in range(num_long) if row not in long]
    return list(zip(comes, goes, strict=True))
