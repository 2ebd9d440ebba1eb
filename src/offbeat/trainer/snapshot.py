"""Snapshots of the trainer's tensors in host memory, which are written to the disk while the next step changes the
tensors themselves.

The memory is taken at the first snapshot and used again for all others: on an H200, copying 18 GB takes 15 s into new
memory, 1.2 s into memory used before, and 0.3 s if that is pinned. So a snapshot is valid until the next one is taken.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

import torch
from torch import Tensor

from offbeat.host_memory import host_memory
from offbeat.trainer.host_adamw import pinned_zeros

log = logging.getLogger(__name__)

SAFE_SHARE = 0.8
"""Share of the free host memory that a snapshot may take; the rest is for what other processes take later."""
MIN_PINNED_BYTES = 1 << 20
"""Smallest tensor whose copy is pinned, in bytes. Memory is pinned by whole pages, which small tensors share."""


class Snapshot:
    """Host memory for a copy of some tensors. `name` says in warnings what is copied, such as "a checkpoint"."""

    def __init__(self, name: str):
        self.name = name
        self._held: dict[str, Tensor] = {}
        self._has_warned = False

    @torch.no_grad()
    def take(
        self, tensors: Mapping[str, Tensor], dtypes: Mapping[str, torch.dtype] | None = None
    ) -> dict[str, Tensor] | None:
        """Copies `tensors` to host memory, in `dtypes` (None: their own), and returns the copies, which are valid until
        the next call. If the host's memory is too small, returns None, and logs a warning the first time."""
        wanted = {name: tensor.dtype for name, tensor in tensors.items()} if dtypes is None else dtypes
        missing = [name for name in tensors if name not in self._held]
        num_bytes = sum(tensors[name].numel() * wanted[name].itemsize for name in missing)
        if missing and not fits(num_bytes, host_memory()[0]):
            if not self._has_warned:
                log.warning(
                    "training waits while %s is written: a copy of %.1f GB does not fit into the free host memory",
                    self.name,
                    num_bytes / 1e9,
                )
            self._has_warned = True
            return None
        for name in missing:
            self._held[name] = _host_memory_for(tensors[name], wanted[name])
        for name, tensor in tensors.items():  # rounded where the tensor is, which moves fewer bytes
            self._held[name].copy_(tensor.to(wanted[name]), non_blocking=tensor.is_cuda)
        if torch.cuda.is_initialized():
            torch.cuda.current_stream().synchronize()  # the whole device cannot be waited for while an engine records
        return {name: self._held[name] for name in tensors}


def fits(num_bytes: int, num_free_bytes: int) -> bool:
    """Whether a snapshot of `num_bytes` leaves enough of the free host memory to other processes."""
    return num_bytes <= SAFE_SHARE * num_free_bytes


def _host_memory_for(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    if tensor.is_cuda and tensor.numel() * dtype.itemsize >= MIN_PINNED_BYTES:
        try:
            return pinned_zeros(tensor, dtype)
        except MemoryError as error:  # a limit on locked memory: copying is slower then
            log.info("a copy of a tensor is not pinned, so copying is slower: %s", error)
    return torch.zeros(tensor.shape, dtype=dtype)  # new memory, which many threads fill faster than one copy
