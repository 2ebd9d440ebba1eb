"""Whether weights are numbers: NaN and infinity are found in the bits, at the speed of memory."""

from __future__ import annotations

import numpy as np

from offbeat.weights.manifest import ITEM_BYTES

DOUBLED_LIMITS = {
    **{"BF16": 0xFF00, "F16": 0xF800, "F32": 0xFF00_0000, "F64": 0xFFE0 << 48},
    **{"F8_E5M2": 0xF8, "F8_E4M3": 0xFE},
}
"""By a type's name in a safetensors file: the bits of its smallest infinity, or NaN where it has none, without the sign
and shifted left by one. Whatever is not below is no number."""
BLOCK_ITEMS = 1 << 16
"""Looked at together: what is computed on the way stays in the cache."""


def is_finite(data: np.ndarray, dtype: str) -> bool:
    """Whether no element is NaN or infinite; `data` are the raw bytes of some."""
    limit = DOUBLED_LIMITS.get(dtype)
    if limit is None:
        return True
    items = data.view(f"<u{ITEM_BYTES[dtype]}")
    return all(
        int(np.left_shift(items[start : start + BLOCK_ITEMS], 1).max()) < limit
        for start in range(0, items.size, BLOCK_ITEMS)
    )
