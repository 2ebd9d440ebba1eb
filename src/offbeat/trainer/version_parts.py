"""Turns the rows of weights, which ranks hold for training, into the parts of a version, which ranks publish.

Training stands still only while each rank copies its rows to host memory (`RowsOfVersion.take`). The copies are
exchanged later, bucket by bucket and over a group of their own, while the next step is trained: each part of 16 MiB
comes whole to the rank to which it belongs (`offbeat.weights.divided`), which codes it while later ones are on the way.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping
from typing import NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from offbeat.errors import OffbeatError
from offbeat.trainer.ranks import Gang
from offbeat.trainer.snapshot import Snapshot
from offbeat.weights.divided import Key, Parts, owner_of, parts_of

log = logging.getLogger(__name__)

BUCKET_BYTES = 256 * 2**20
"""Bytes of parts, over all ranks, that are exchanged at a time."""


class RowRange(NamedTuple):
    """The rows of a tensor that one rank holds: `num` rows from `start`, of `total` rows."""

    start: int
    num: int
    total: int


def rows_of(total: int, rank: int, num_ranks: int) -> RowRange:
    """Returns the rows of a tensor with `total` rows that a rank holds, as FSDP2 divides them."""
    each = -(-total // num_ranks)
    start = min(rank * each, total)
    return RowRange(start, min(each, total - start), total)


class RowsOfVersion:
    """The rows of the next version on one rank; the memory of their copies is used again for each version."""

    def __init__(self, gang: Gang):
        self.gang = gang
        self._copies = Snapshot("a version")
        self._number = 0
        """Number of the latest `take`; whoever exchanges the rows of an earlier one ends."""
        self._lock = threading.Lock()

    @torch.no_grad()
    def take(self, tensors: Mapping[str, Tensor], dtypes: Mapping[str, torch.dtype]) -> Parts:
        """Copies this rank's rows of `tensors` to host memory, in the version's dtypes, and returns the parts that
        belong to this rank; every rank must call it. The parts arrive as they are read, which all ranks must do at the
        same time. If a rank has no memory for a copy, they are exchanged at once."""
        rows = {name: _own(tensor, self.gang.rank) for name, tensor in tensors.items()}
        with self._lock:
            self._number += 1
            copied = self._copies.take(rows, dtypes)
        shapes = {name: (tensor.shape, isinstance(tensor, DTensor)) for name, tensor in tensors.items()}
        lacks = self.gang.agree("no memory for a copy" if copied is None else "")
        parts = Parts(self._exchanged(rows if lacks or copied is None else copied, shapes, dtypes, self._number))
        if lacks:
            parts.finish()
        return parts

    def _exchanged(
        self,
        rows: Mapping[str, Tensor],
        shapes: Mapping[str, tuple[torch.Size, bool]],
        dtypes: Mapping[str, torch.dtype],
        number: int,
    ) -> Iterator[tuple[Key, Tensor]]:
        bucket = _Bucket(self.gang)
        for name in sorted(rows):
            shape, is_divided = shapes[name]
            num_bytes = shape.numel() * dtypes[name].itemsize
            held = rows[name].detach().to(dtypes[name]).contiguous().reshape(-1).view(torch.uint8)
            if is_divided:
                row_bytes = num_bytes // max(shape[0], 1)
                ranges = [rows_of(shape[0], rank, self.gang.size) for rank in range(self.gang.size)]
                bounds = [(each.start * row_bytes, (each.start + each.num) * row_bytes) for each in ranges]
            else:  # all ranks have it; rank 0 gives it
                bounds = [(0, num_bytes), *[(0, 0)] * (self.gang.size - 1)]
            for position, start, stop in parts_of(num_bytes):
                bucket.add((name, position), held, bounds, start, stop)
                if bucket.num_bytes >= BUCKET_BYTES:
                    yield from self._run(bucket, number)
                    bucket = _Bucket(self.gang)
        yield from self._run(bucket, number)

    def _run(self, bucket: _Bucket, number: int) -> list[tuple[Key, Tensor]]:
        with self._lock:
            if number != self._number:
                raise OffbeatError("a later version is published already")
            try:
                return bucket.run()
            except RuntimeError as error:
                _end(self.gang, error)


class _Bucket:
    """Some parts of a version, brought from the ranks with their rows to those to which they belong."""

    def __init__(self, gang: Gang):
        self.gang, self.num_bytes = gang, 0
        self._own: list[tuple[Key, Tensor]] = []
        self._sent: list[list[Tensor]] = [[] for _ in range(gang.size)]
        self._expected: list[list[tuple[Tensor, int, int]]] = [[] for _ in range(gang.size)]
        """From each rank: where its next bytes go, as a part, and the range within the part."""

    def add(self, key: Key, held: Tensor, bounds: list[tuple[int, int]], start: int, stop: int) -> None:
        """Adds the part of a tensor from byte `start` to `stop`. Each rank holds the range of the tensor's bytes in
        `bounds`, and this rank `held`."""
        owner, (first, last) = owner_of(key, self.gang.size), bounds[self.gang.rank]
        low, high = max(first, start), min(last, stop)
        if low < high:
            self._sent[owner].append(held[low - first : high - first])
        if owner == self.gang.rank:
            part = torch.empty(stop - start, dtype=torch.uint8)
            self._own.append((key, part))
            for rank, (begin, end) in enumerate(bounds):
                if max(begin, start) < min(end, stop):
                    self._expected[rank].append((part, max(begin, start) - start, min(end, stop) - start))
        self.num_bytes += stop - start

    def run(self) -> list[tuple[Key, Tensor]]:
        """Exchanges the parts with all ranks, and returns those that belong to this one."""
        sizes = [sum(stop - start for _, start, stop in expected) for expected in self._expected]
        outgoing = [sum(map(len, parts)) for parts in self._sent]
        flat = [part.cpu() for parts in self._sent for part in parts]
        sent = torch.cat(flat) if flat else torch.empty(0, dtype=torch.uint8)
        received = torch.empty(sum(sizes), dtype=torch.uint8)
        self.gang.exchange_weights(received, sent, sizes, outgoing)
        at = 0
        for expected in self._expected:
            for part, start, stop in expected:
                part[start:stop] = received[at : at + stop - start]
                at += stop - start
        return self._own


def _own(tensor: Tensor, rank: int) -> Tensor:
    """Returns what this rank gives of a tensor: its rows, and on rank 0 all of one that every rank has whole."""
    if isinstance(tensor, DTensor):
        return tensor.to_local()
    return tensor if rank == 0 else tensor.reshape(-1)[:0]


def _end(gang: Gang, error: RuntimeError) -> NoReturn:
    log.error("trainer rank %d: %s", gang.rank, " ".join(str(error).split())[:300])
    gang.name_lost()
