"""A rate that several connections share: a token bucket."""

from __future__ import annotations

import asyncio
import time


class Bucket:
    """Lets bytes through in the order in which they are offered.

    Its credit, what it may let through at once after a pause, makes up for an event loop that wakes a little late; over
    any longer time the rate is kept exactly.
    """

    def __init__(self, credit_s: float = 0.0):
        self._credit_s = credit_s
        self._free_s = 0.0
        """When all that was let through so far would have passed a line without credit."""

    async def take(self, num_bytes: int, bytes_per_s: float) -> None:
        """Returns when so many bytes have passed."""
        now_s = time.monotonic()
        self._free_s = max(self._free_s, now_s - self._credit_s) + num_bytes / bytes_per_s
        await asyncio.sleep(self._free_s - now_s)
