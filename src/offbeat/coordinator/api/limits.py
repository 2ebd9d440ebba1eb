"""Limits on sizes, times and rates, and the token buckets that enforce the rates.

Pure: the clock is injected, nothing waits, and memory does not grow with the number of unknown callers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

MIB = 1024 * 1024


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """Limits of the API, in total and for each caller."""

    max_body_bytes: int = 64 * MIB
    """Largest body as sent, possibly compressed. Most calls have a smaller limit of their own."""
    max_decompressed_bytes: int = 256 * MIB
    """Largest body after decompression. A trajectory of a million tokens takes 8 MB."""
    max_held_bytes: int = 1024 * MIB
    """Largest number of bytes that all bodies of unanswered requests take together, as sent plus decompressed. Further
    callers are told to retry later."""
    max_head_bytes: int = 16 * 1024
    requests_per_s: float = 200.0
    """Largest rate of calls per worker. A worker that generates 1000 answers at once, each in 10 s, makes about 100
    calls per second."""
    request_burst: float = 400.0
    joins_per_s: float = 5.0
    """Largest rate of attempts to join from one IP address."""
    head_within_s: float = 10.0
    body_within_s: float = 60.0
    max_wait_s: float = 30.0
    """Longest time that one call waits for work before the caller must ask again; shorter than proxies' timeouts."""
    keep_alive_s: float = 75.0
    """Seconds until an idle connection is closed: more than clients wait before they close it, so that no call uses a
    connection that the server is closing."""
    max_connections: int = 4096
    """At this limit, a new connection replaces the oldest unauthenticated one."""
    stop_within_s: float = 5.0
    """Time that unfinished calls get when the server stops."""


class Buckets:
    """One token bucket per key: allows `burst` calls at once, then `per_s` calls per second."""

    def __init__(self, per_s: float, burst: float, clock: Callable[[], float], max_keys: int = 10_000):
        self.per_s, self.burst, self._clock, self._max_keys = per_s, burst, clock, max_keys
        self._levels: dict[str, tuple[float, float]] = {}
        """For each key, the tokens left and the time of that count. A missing key has a full bucket."""

    def __len__(self) -> int:
        return len(self._levels)

    def take(self, key: str) -> float:
        """Takes a token and returns 0; if the bucket is empty, returns the seconds until the next token."""
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
        """Frees memory: keeps only the buckets that are not full, and of these at most the `max_keys` / 2 that were
        used last."""
        in_use = {key: level for key, level in self._levels.items() if self._left(key, now_s) < self.burst}
        newest = sorted(in_use.items(), key=lambda item: item[1][1])[-(self._max_keys // 2) :]
        self._levels = dict(newest)
