"""How much one caller may ask for: sizes, times and rates, and the token buckets that hold the rates.

Pure: the clock is handed in, nothing waits here, and nothing here grows with the number of strangers that call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

MIB = 1024 * 1024


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """What the coordinator's face grants, in all and to each caller."""

    max_body_bytes: int = 64 * MIB
    """As sent, perhaps compressed. Most calls have a smaller limit of their own; weights are files, and have no limit
    but the disk."""
    max_decompressed_bytes: int = 256 * MIB
    """A trajectory of a million tokens has 8 MB."""
    max_held_bytes: int = 1024 * MIB
    """Bodies of all callers together, as sent and decompressed, until they are answered; beyond it callers are asked to
    come back."""
    max_head_bytes: int = 16 * 1024
    requests_per_s: float = 200.0
    """Of one worker. One with a thousand slots and answers of ten seconds sends a hundred."""
    request_burst: float = 400.0
    joins_per_s: float = 5.0
    """From one address."""
    head_within_s: float = 10.0
    body_within_s: float = 60.0
    """Also the longest silence in the middle of a file of weights."""
    max_wait_s: float = 30.0
    """The longest that one call may wait for work; callers ask again. Below what proxies cut off."""
    keep_alive_s: float = 75.0
    """Longer than clients keep an idle connection, so that none sends into one that is just being closed."""
    max_connections: int = 4096
    """Beyond it, those on which nobody has proved who it is give way, the oldest first."""
    stop_within_s: float = 5.0
    """For calls that are being answered when the server stops."""


class Buckets:
    """A token bucket per key: a burst at once, a steady rate ever after."""

    def __init__(self, per_s: float, burst: float, clock: Callable[[], float], max_keys: int = 10_000):
        self.per_s, self.burst, self._clock, self._max_keys = per_s, burst, clock, max_keys
        self._levels: dict[str, tuple[float, float]] = {}
        """What is left, and when that was so. A key that is not here has a full bucket."""

    def __len__(self) -> int:
        return len(self._levels)

    def take(self, key: str) -> float:
        """Takes one from the bucket: 0, or how many seconds are missing until there is one, and nothing taken."""
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
        """Leaves out full buckets, which say nothing; where all are in use, those that were used longest ago."""
        in_use = {key: level for key, level in self._levels.items() if self._left(key, now_s) < self.burst}
        newest = sorted(in_use.items(), key=lambda item: item[1][1])[-(self._max_keys // 2) :]
        self._levels = dict(newest)
