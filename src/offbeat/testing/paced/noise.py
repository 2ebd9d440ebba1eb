"""Tokens and log-probs of the paced engine: tokens depend on seed and position, log-probs also on the version.

Counter-based hashes (splitmix64) give the same values at each position, however an answer is split into requests.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_TOKENS, _LOGPROBS, _LENGTHS = 1, 2, 3
"""Numbers that identify the independent random streams of one seed."""


def tokens(seed: int, start: int, count: int, vocab_size: int, avoid: Sequence[int]) -> np.ndarray:
    """Returns the `count` token ids from position `start` on; ids in `avoid` never occur."""
    drawn = _bits(seed, _TOKENS, 0, start, count) % np.uint64(vocab_size)
    ids = drawn.astype(np.int32)
    while len(avoid) and (bad := np.isin(ids, avoid)).any():
        ids[bad] = (ids[bad] + 1) % vocab_size
    return ids


def logprobs(seed: int, start: int, count: int, version: int) -> np.ndarray:
    """Returns the `count` log-probs from position `start` on: finite, at most 0, and different for every version."""
    uniform = (_bits(seed, _LOGPROBS, version, start, count) >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return np.log1p(-uniform).astype(np.float32)


def uniform(seed: int) -> float:
    """Returns one number between 0 and 1, both excluded, per seed."""
    return (int(_bits(seed, _LENGTHS, 0, 0, 1)[0] >> np.uint64(12)) + 0.5) * 2.0**-52


def _bits(seed: int, stream: int, version: int, start: int, count: int) -> np.ndarray:
    with np.errstate(over="ignore"):  # the products wrap around on purpose
        key = np.array([seed & 0xFFFFFFFFFFFFFFFF], np.uint64)
        for part in (stream, version):
            key = _mix(key + _GOLDEN * np.uint64(part + 1))
        return _mix(key + _GOLDEN * np.arange(start + 1, start + count + 1, dtype=np.uint64))


def _mix(bits: np.ndarray) -> np.ndarray:
    bits = (bits ^ (bits >> np.uint64(30))) * _FIRST
    bits = (bits ^ (bits >> np.uint64(27))) * _SECOND
    mixed: np.ndarray = bits ^ (bits >> np.uint64(31))
    return mixed
