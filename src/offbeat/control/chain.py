"""How versions stand on one another: when one is published whole though what changed would do.

Duty: bound what somebody who joins late has to fetch and replay, at the least cost for those who follow all along.
A chain is a full version, its anchor, and the deltas that stand on it one after the other.
"""

from __future__ import annotations

from dataclasses import dataclass

EVERY = 10
"""An anchor costs the trainer a full copy on its way to the store; followers fetch what changed all the same."""
MAX_SHARE = 0.5


@dataclass(frozen=True)
class Anchoring:
    """When a version is published whole though its base is known."""

    every: int = EVERY
    """Versions from one anchor to the next; 1: each is whole."""
    max_share: float = MAX_SHARE
    """Of a full copy, as it travels; a chain that outgrew it is ended."""

    def is_full(self, num_deltas: int, chain_bytes: int, full_bytes: int) -> bool:
        """Whether the next one is, after an anchor of `full_bytes` and `num_deltas` that weigh `chain_bytes`."""
        return num_deltas + 1 >= self.every or chain_bytes > self.max_share * full_bytes
