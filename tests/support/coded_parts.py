"""Parts of weights as they are before and after an update."""

from __future__ import annotations

import numpy as np

from offbeat.weights.codec import decode
from offbeat.weights.manifest import Coding

NUM_ITEMS = 1 << 20


def bfloat16(values: np.ndarray) -> np.ndarray:
    """Rounded to bf16, to nearest even, as raw bytes."""
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2").view(np.uint8)


def weights(seed: int, num_items: int = NUM_ITEMS) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(num_items) * 0.02


def step(masters: np.ndarray, lr: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """A part before and after an update, whose masters lie anywhere between the values of bf16."""
    rng = np.random.default_rng(seed)
    away = masters * (1 + rng.uniform(-0.003, 0.003, masters.size))
    return bfloat16(away + lr * 0.6 * rng.standard_normal(masters.size)), bfloat16(away)


def back(coding: Coding, data: bytes, old: np.ndarray | None, new: np.ndarray, dtype: str) -> np.ndarray:
    return decode(coding, data, old, new.size, dtype)


def bits(*values: int) -> np.ndarray:
    return np.array(values, "<u2").view(np.uint8)


def near_zero(seed: int, lr: float) -> tuple[np.ndarray, np.ndarray]:
    """An update of weights of which one in 300 is next to nothing, as quantised models have them."""
    rng = np.random.default_rng(seed)
    masters = np.where(rng.random(NUM_ITEMS) < 1 / 300, rng.standard_normal(NUM_ITEMS) * lr, 5 * weights(seed))
    return step(masters, lr, seed)
