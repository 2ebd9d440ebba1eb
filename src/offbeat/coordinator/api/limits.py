"""Limits of sizes, times and rates, and the token buckets that enforce the rates.

Pure: the clock is injected, nothing waits, and nothing grows with the number of strangers that call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

MIB = 1024 * 1024


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """Limits of the API, in total and for each caller."""

    max_body_bytes: int = 64 * MIB
    """As sent, perhaps compressed. Most calls have a smaller limit of their own."""
    max_decompressed_bytes: int = 256 * MIB
    """A trajectory of a million tokens has 8 MB."""
    max_held_bytes: int = 1024 * MIB
    """Bodies of all callers together, as sent and decompressed, until they are answered; beyond it callers retry
    later."""
    max_head_bytes: int = 16 * 1024
    requests_per_s: float = 200.0
    """Per worker. One with a thousand slots and answers of ten seconds sends a hundred."""
    request_burst: float = 400.0
    joins_per_s: float = 5.0
    """From one address."""
    head_within_s: float = 10.0
    body_within_s: float = 60.0
    max_wait_s: float = 30.0
    """Longest wait of one call for work; callers ask again. Below the time limits of proxies."""
    keep_alive_s: float = 75.0
    """Longer than clients keep an idle connection, so that none sends into one that is being closed."""
    max_connections: int = 4096
    """Beyond it, unauthenticated ones give way, the oldest first."""
    stop_within_s: float = 5.0
    """For calls under way when the server stops."""


class Buckets:
    """A token bucket per key: a burst at once, then a steady rate."""

    def __init__(self, per_s: float, burst: float, clock: Callable[[], float], max_keys: int = 10_000):
        self.per_s, self.burst, self._clock, self._max_keys = per_s, burst, clock, max_keys
        self._levels: dict[str, tuple[float, float]] = {}
        """Tokens left, and the time of that count. A missing key has a full bucket."""

    def __len__(self) -> int:
        return len(self._levels)

    def take(self, key: str) -> float:
        """Takes a token and returns 0; if there is none, returns the seconds until there is one."""
        now_s = self._clock()
        left = self._left(key, now_s)
        if left < 1.0:
            return (1.0 - left) / self.per_s
        if key not in self._levels and len(self._levels) >= self._max_keys:
            self._forget(now_s)
        self._levels[key] = (left - 1.0, now_s)
        return 0.0

    def _left(self, key: str, now_s: float) -> float:
        found = self._levels.get(key)
        return self.burst if found is None else min(found[0] + (now_s - found[1]) * self.per_s, self.burst)

    def _forget(self, now_s: float) -> None:
        """Drops full buckets, then the least recently used half."""
        in_use = {key: level for key, level in self._levels.items() if self._left(key, now_s) < self.burst}
        newest = sorted(in_use.items(), key=lambda item: item[1][1])[-(self._max_keys // 2) :]
        self._levels = dict(newest)
