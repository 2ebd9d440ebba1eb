"""The one rule by which token losses add up to an update's loss: a weighted sum, whose weights are fixed beforehand.

Denominators are counted over the whole update, over all micro-batches and ranks, before anything is rejected: a
micro-batch adds its own sum and is divided by nothing of its own, so that any split gives the same loss and the same
gradient. A sequence without a trained token adds 0 and still counts as one.

    token_mean      every token counts the same: 1 / tokens
    sequence_mean   every sequence counts the same: 1 / (sequences x its tokens)
    constant        every token counts 1 / (sequences x a constant), however long its sequence is
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np


@dataclass(frozen=True)
class Totals:
    """What an update is divided by; totals of parts add up."""

    num_tokens: int = 0
    num_sequences: int = 0

    @classmethod
    def of(cls, masks: Sequence[np.ndarray]) -> Self:
        return cls(sum(int(mask.sum()) for mask in masks), len(masks))

    def __add__(self, other: Totals) -> Totals:
        return Totals(self.num_tokens + other.num_tokens, self.num_sequences + other.num_sequences)


def token_weights(
    masks: Sequence[np.ndarray],
    totals: Totals,
    how: str,
    constant: int,
    counted: Sequence[np.ndarray] | None = None,
) -> list[np.ndarray]:
    """What each token of each sequence counts, 0 where it is not trained on. `counted` are the tokens of each sequence
    that its own denominator counts, where they are more than those trained on."""
    sequences = max(totals.num_sequences, 1)
    match how:
        case "token_mean":
            denominators = [max(totals.num_tokens, 1)] * len(masks)
        case "sequence_mean":
            denominators = [sequences * max(int(own.sum()), 1) for own in counted or masks]
        case "constant":
            denominators = [sequences * constant] * len(masks)
        case _:
            raise AssertionError(f"unknown aggregation {how}")
    return [mask.astype(np.float32) / count for mask, count in zip(masks, denominators, strict=True)]
