"""Divides a step's micro-batches among ranks, of which a trainer may have only one (`ALONE`). Knows no torch.

With sharded weights all ranks meet at every layer, so they must make the same number of passes, and a round lasts as
long as its longest micro-batch. Micro-batches are therefore sorted by cost, the longest first, and rank r takes number
`k * N + r` in round k. The order does not depend on N, so sums in this order have the same bits for any number of
ranks. In the last round some ranks may find no micro-batch left; they make a pass whose result is dropped (a dummy).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

Arrays = dict[str, np.ndarray]
PARAMETERS_PER_WIDTH = 12
"""A decoder layer has about 12 times its width squared parameters, by which a token is multiplied. Attending to one
other token takes about as long as 1 / (12 x width) of that."""


@dataclass(frozen=True)
class Turn:
    """One rank's part in one round: a micro-batch, or a dummy."""

    index: int | None
    """Index of its micro-batch; None: none is left for this rank, which runs a dummy."""
    place: int
    """Place of the micro-batch in the order of all micro-batches, the same for any number of ranks."""
    num_real: int
    """Number of ranks with a micro-batch in this round; these are the first ranks."""


def cost(num_row_tokens: int, lengths: Sequence[int], width: int) -> int:
    """Returns the relative time of a pass over a row of `num_row_tokens` tokens, whose sequences have these `lengths`,
    through a model of this hidden `width`."""
    return PARAMETERS_PER_WIDTH * width * num_row_tokens + sum(length * length for length in lengths)


def by_cost(costs: Sequence[int]) -> list[int]:
    """Returns the indices of micro-batches, the most expensive first; equal ones keep their order."""
    return sorted(range(len(costs)), key=lambda i: (-costs[i], i))


def turns(order: Sequence[int], rank: int, num_ranks: int) -> Iterator[Turn]:
    """Yields what `rank` does in each round; `order` holds the indices of all micro-batches as `by_cost` sorts them."""
    for start in range(0, len(order), num_ranks):
        num_real = min(num_ranks, len(order) - start)
        yield Turn(order[start + rank] if rank < num_real else None, start + rank, num_real)


def balance(costs: Sequence[int], num_ranks: int) -> float:
    """Returns the share of the ranks' time that is spent on micro-batches rather than on waiting for longer ones."""
    ordered = [costs[i] for i in by_cost(costs)]
    slowest = sum(ordered[::num_ranks])
    return sum(ordered) / (num_ranks * slowest) if slowest else 1.0


class Ranks:
    """The ranks of a trainer, seen from one of them. This class itself is a trainer of one rank."""

    rank, size = 0, 1

    def gather(self, data: bytes) -> list[bytes]:
        """Returns what each rank gave, on every rank."""
        return [data]

    def merge(self, items: Sequence[tuple[int, Arrays]]) -> list[tuple[int, Arrays]]:
        """Returns the items of all ranks, on every rank, sorted by their first field, the place."""
        return sorted(items, key=lambda item: item[0])

    def agree(self, problem: str = "") -> list[str]:
        """Returns the problems that ranks report, each with its rank; empty if all is well. Every rank must call it."""
        told = self.gather(problem.encode())
        return [f"rank {rank}: {text.decode()}" for rank, text in enumerate(told) if text]


ALONE = Ranks()
"""A trainer of one rank, without torch.distributed."""


def agreed(error: Exception) -> Exception:
    """Marks an error that all ranks raise at the same point, after which they can go on together; returns it."""
    error.__dict__["is_agreed"] = True
    return error


def is_agreed(error: BaseException) -> bool:
    return getattr(error, "is_agreed", False)
