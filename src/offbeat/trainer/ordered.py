"""Sums of gradients over ranks that do not depend on the number of ranks.

A micro-batch's gradient has the same bits on every rank; only the order in which gradients are added up depends on how
micro-batches were divided. `OrderedReduceScatter` sends each rank its rows of all gradients of a round, and adds them
one by one in the order of the micro-batches (`offbeat.trainer.rounds`).

Where ranks share a GPU, which NCCL refuses, data goes through host memory: `HostReduceScatter` and `HostAllGather`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

from offbeat.trainer.ranks import all_gather


@dataclass
class Round:
    """The round that is under way, as the gradients' sums see it."""

    num_real: int = 0
    """Number of ranks with a micro-batch in this round; the gradients of the others are left out."""


class OrderedReduceScatter(ReduceScatter):
    """FSDP's reduce-scatter for one unit of weights; adds to the sum of all earlier rounds of the update."""

    def __init__(self, round_: Round, *, via_host: bool):
        self._round, self._via_host = round_, via_host
        self._sum: Tensor | None = None

    def begin_update(self) -> None:
        self._sum = None

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        sent = input_tensor.cpu() if self._via_host else input_tensor
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        chunks = received.to(output_tensor.device).view(group.size(), -1)
        for chunk in chunks[: self._round.num_real]:
            self._sum = chunk.clone() if self._sum is None else self._sum.add_(chunk)
        assert self._sum is not None, "this is a bug: a round without a micro-batch"
        output_tensor.copy_(self._sum)


class HostReduceScatter(OrderedReduceScatter):
    """FSDP's reduce-scatter through host memory: the sum over the ranks of one round, in the order of ranks."""

    def __init__(self) -> None:
        super().__init__(Round(), via_host=True)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        self._sum, self._round.num_real = None, group.size()
        super().__call__(output_tensor, input_tensor, group, op, async_op)


class HostAllGather(AllGather):
    """FSDP's all-gather through host memory."""

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        sent = input_tensor.cpu().view(torch.uint8)
        received = torch.empty(group.size() * sent.numel(), dtype=torch.uint8)
        all_gather(received, sent, group=group)
        output_tensor.copy_(received.view(input_tensor.dtype).view_as(output_tensor))
