"""The norm of a gradient, summed row by row in float64, so that its bits do not depend on how rows are divided among
ranks. A row of a tensor holds all numbers with the same first index; it is never divided between ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

BLOCK_NUMBERS = 1 << 24
"""Numbers squared at a time, in float64: 128 MiB."""


def row_squares(values: Tensor) -> Tensor:
    """Returns the sum of squares of each row of `values` in float64. A row holds all numbers with the same first index.

    The numbers of a row are added in halves, so that the result does not depend on the number of rows, threads or
    vector lanes.
    """
    rows = values.flatten(1) if values.dim() > 1 else values[:, None]
    found = torch.zeros(len(rows), dtype=torch.float64, device=values.device)
    step = max(BLOCK_NUMBERS // max(rows.shape[1], 1), 1)
    for start in range(0, len(rows), step):
        block = rows[start : start + step].double().square()
        while block.shape[1] > 1:
            half = block.shape[1] // 2
            odd = block[:, 2 * half :]
            block = block[:, :half] + block[:, half : 2 * half]
            if odd.shape[1]:
                block[:, 0] += odd[:, 0]
        found[start : start + step] = block[:, 0] if block.shape[1] else 0.0
    return found


def norm_of(squares: Sequence[np.ndarray]) -> float:
    """Returns the norm of all gradients; `squares` holds the sums of squares of each gradient's rows, in order."""
    return math.sqrt(float(np.concatenate(squares).sum())) if squares else 0.0
