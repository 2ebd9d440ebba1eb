"""Says when so many rewards fail that a run should stop. No I/O.

A few failures are left out of training and counted. When their share among the latest rewards passes the limit, the
training signal itself is in doubt, and going on would only waste the machine.
"""

from __future__ import annotations

from collections import Counter, deque

WINDOW = 512
"""Rewards looked back on: a few steps of a small run, so that a reward which breaks half-way is noticed soon."""
MIN_COUNT = 64
"""Fewer say little: three failures among the first ten may be chance. A smaller window must be full instead."""
MAX_REASON_CHARS = 300


class FailureWatch:
    """The latest rewards, and how many of them failed."""

    def __init__(self, max_share: float, window: int = WINDOW, min_count: int = MIN_COUNT):
        assert window >= 1, window
        self.max_share, self.min_count = max_share, min(min_count, window)
        self._latest: deque[str | None] = deque(maxlen=window)
        self.num_failed = 0

    def record(self, failed: bool, reason: str | None = None) -> None:
        """Takes in one reward."""
        if len(self._latest) == self._latest.maxlen:
            self.num_failed -= self._latest[0] is not None
        self._latest.append((reason or "no reason given") if failed else None)
        self.num_failed += failed

    @property
    def share(self) -> float:
        """The share of failures among the latest rewards."""
        return self.num_failed / len(self._latest) if self._latest else 0.0

    def verdict(self) -> str | None:
        """Why the run should stop; None while it may go on."""
        count = len(self._latest)
        if count < self.min_count or self.share <= self.max_share:
            return None
        ((reason, times),) = Counter(reason for reason in self._latest if reason is not None).most_common(1)
        return (
            f"{self.num_failed} of the latest {count} rewards failed ({self.share:.0%}; "
            f"reward.max_failure_share = {self.max_share:g}), {times} of them with: {reason[:MAX_REASON_CHARS]}"
        )
