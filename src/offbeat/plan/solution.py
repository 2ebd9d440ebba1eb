"""A plan in counts: which gang trains, how many replicas generate, on how many nodes. Where they stand comes later."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Solution:
    """An answer to a `Problem`; names are those of its columns and offers."""

    tau_s: float
    """The step's period."""
    gang: str
    replicas: Mapping[str, int]
    """By rollout column; those that are not used are left out."""
    nodes: Mapping[str, int]
    """Rented for rollout, by offer, beside the gang's; those without any are left out."""
