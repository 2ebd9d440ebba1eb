"""Finds on the weights' own device what changed, so that only that has to be looked at elsewhere.

The result equals that of `offbeat.weights.codec.find_changes` on the same bytes, bit for bit.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from offbeat.weights.codec import Changes, CodecError

BLOCK_ITEMS = 1 << 26
"""Looked at in one go: 64 MiB of marks on the device, however large the tensor is."""


@torch.no_grad()
def find_changes(new: Tensor, old: Tensor) -> Changes:
    """Where two tensors of one shape and one type of two bytes differ; positions count their elements in order."""
    if new.dtype != old.dtype or new.shape != old.shape or new.element_size() != 2:
        raise CodecError(
            f"changes of {new.dtype} {list(new.shape)} since {old.dtype} {list(old.shape)}: "
            "both must have one shape and one type of two bytes"
        )
    new_bits, old_bits = _bits(new), _bits(old)
    found = [_find(new_bits, old_bits, start) for start in range(0, new_bits.numel(), BLOCK_ITEMS)]
    positions = [positions for positions, _ in found] or [np.empty(0, np.int64)]
    differences = [differences for _, differences in found] or [np.empty(0, np.uint16)]
    return Changes(np.concatenate(positions), np.concatenate(differences))


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.int16)


def _find(new: Tensor, old: Tensor, start: int) -> Changes:
    new_block, old_block = new[start : start + BLOCK_ITEMS], old[start : start + BLOCK_ITEMS]
    positions = torch.nonzero(new_block != old_block).reshape(-1)
    differences = new_block[positions] - old_block[positions]  # wraps as unsigned integers would
    return Changes((positions + start).cpu().numpy(), differences.cpu().numpy().view(np.uint16))
