"""How far a decode step that pads reads each row: all of them as far as the longest, or long ones far and others less.

Duty: decide which rows are read apart, when requests start. All rows grow by a token a step, so what is longer stays
longer, and the choice holds until others start. Where answers are carried on over versions, a few long ones would
otherwise make every fresh one read their whole length. The engine that does so and the model that predicts it ask here.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

MIN_SAVED_TOKENS = 4096
"""Fewer reads are not worth the kernels that a second part adds to every layer."""


def num_read_far(lengths: np.ndarray) -> np.ndarray:
    """How many of the longest rows to read apart from the others, along the last axis: those that together read least;
    all of them where that saves too little. A length of 0 is no row. Rows of one length are never told apart."""
    longest_first = -np.sort(-lengths, axis=-1)
    num_rows = (lengths > 0).sum(axis=-1, keepdims=True)
    num_far = np.arange(lengths.shape[-1])
    saved = np.where(num_far < num_rows, (num_rows - num_far) * (longest_first[..., :1] - longest_first), 0)
    best = saved.argmax(axis=-1, keepdims=True)
    is_worth_it = np.take_along_axis(saved, best, -1) >= MIN_SAVED_TOKENS
    return np.where(is_worth_it, best, num_rows)[..., 0]


def is_read_far(lengths: np.ndarray) -> np.ndarray:
    """Which rows those are."""
    order = np.argsort(np.argsort(-lengths, axis=-1, kind="stable"), axis=-1)
    return (order < num_read_far(lengths)[..., None]) & (lengths > 0)


def exchanges(lengths: Sequence[int], num_far: int) -> list[tuple[int, int]]:
    """Pairs of rows that change places, so that the longest stand first; as few as there can be."""
    order = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    far = set(order[:num_far])
    comes = [row for row in order[:num_far] if row >= num_far]
    goes = [row for row in range(num_far) if row not in far]
    return list(zip(comes, goes, strict=True))
