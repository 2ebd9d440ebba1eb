"""Digests of weights: what proves that two machines hold the same version.

A tensor's digest is blake3 over the digests of its pieces of at most 16 MiB, so that several readers can make it in
parallel; a version's digest is blake3 over the sorted names, dtypes, shapes and digests of its tensors.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from blake3 import blake3
from torch import Tensor

PIECE_BYTES = 16 * 1024 * 1024


def tensor_digest(tensor: Tensor) -> str:
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
    pieces = blake3()
    for start in range(0, max(len(data), 1), PIECE_BYTES):
        pieces.update(blake3(data[start : start + PIECE_BYTES]).digest())
    return pieces.hexdigest()


def weights_digest(tensors: Mapping[str, Tensor]) -> str:
    whole = blake3()
    for name in sorted(tensors):
        tensor = tensors[name]
        dtype = str(tensor.dtype).removeprefix("torch.")
        whole.update(f"{name}\0{dtype}\0{list(tensor.shape)}\0{tensor_digest(tensor)}\n".encode())
    return whole.hexdigest()
