"""In which order sources of weights are asked.

Duty: keep to the order that the coordinator gave, which spares slow links, as long as it works. A peer that fails
rests, longer each time; one that sent something other than what was asked for rests long. One that is far slower than
another source (by a moving average of bytes a second, times that of success) comes after the others. Nothing is
remembered for good: machines are mended, and lines get better.

Guarantees: the root never rests; pure, with the clock handed in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

ROOT = ""
"""Stands for the root among the addresses of peers."""
WEIGHT = 0.3
"""Of the latest figure in a moving average."""
FAR_SLOWER = 0.25
"""So much slower than the best that it is worth to cross a slow link instead."""
FIRST_REST_S, LONGEST_REST_S = 1.0, 60.0
DAMAGED_REST_S = 300.0
FORGOTTEN_AFTER_S = 60.0
"""A speed says nothing any more when it is this old."""
LEAST_BYTES = 64 * 1024
"""What is smaller measures the way there, not the line's width."""
LEAST_BYTES_PER_S = 4096.0
"""Below it a peer is as good as silent, whatever others give."""
UNKNOWN_BYTES_PER_S = 64 * 1024.0
"""What a peer must give where nobody knows what another would: who is slower may well be the slowest of all."""


@dataclass
class Record:
    """What is known of one source."""

    bytes_per_s: float | None = None
    success: float = 1.0
    num_failures: int = 0
    """In a row."""
    rests_until_s: float = 0.0
    is_damaged: bool = False
    """Why it rests."""
    seen_s: float = 0.0


class Ranking:
    def __init__(self, clock: Callable[[], float]):
        self._clock = clock
        self._peers: list[str] = []
        self._records: dict[str, Record] = {ROOT: Record()}

    def use(self, peers: Sequence[str]) -> None:
        """Takes a new order; what is known of those that stay is kept."""
        self._peers = list(dict.fromkeys(peers))
        self._records = {url: self._records.get(url) or Record() for url in (*self._peers, ROOT)}

    def order(self) -> list[str]:
        """Whom to ask: all that can be asked now, the root among them; those that rest only after it."""
        now_s = self._clock()
        resting = [url for url in self._peers if self._records[url].rests_until_s > now_s]
        ready = [url for url in (*self._peers, ROOT) if url not in resting]
        slow = {url for url in ready if self._is_far_slower(url, ready)}
        last_resort = [url for url in resting if not self._records[url].is_damaged]
        return [url for url in ready if url not in slow] + [url for url in ready if url in slow] + last_resort

    def least_bytes_per_s(self, url: str) -> float:
        """What a source must give at least so as not to be broken off."""
        now_s = self._clock()
        ready = [other for other, record in self._records.items() if record.rests_until_s <= now_s or other == ROOT]
        scores = [score for other in ready if other != url and (score := self.score(other)) is not None]
        return max(LEAST_BYTES_PER_S, FAR_SLOWER * max(scores)) if scores else UNKNOWN_BYTES_PER_S

    def gave(self, url: str, num_bytes: int, seconds: float) -> None:
        record = self._record(url)
        record.num_failures, record.is_damaged, record.rests_until_s = 0, False, 0.0
        record.success += WEIGHT * (1.0 - record.success)
        if num_bytes >= LEAST_BYTES:
            self._measured(record, num_bytes / max(seconds, 1e-6))

    def was_slow(self, url: str, bytes_per_s: float) -> None:
        """A source that was broken off because of its pace."""
        self._measured(self._record(url), bytes_per_s)
        self.failed(url)

    def failed(self, url: str) -> None:
        record = self._record(url)
        record.num_failures += 1
        record.success -= WEIGHT * record.success
        self._rest(record, min(FIRST_REST_S * 2 ** min(record.num_failures - 1, 16), LONGEST_REST_S))

    def damaged(self, url: str) -> None:
        """A source sent, all by itself, what was not asked for."""
        self.failed(url)
        record = self._record(url)
        record.is_damaged = True
        self._rest(record, DAMAGED_REST_S)

    def score(self, url: str) -> float | None:
        """Bytes a second that may be hoped for; None: nobody knows, or not any more."""
        record = self._records[url]
        if record.bytes_per_s is None or self._clock() - record.seen_s > FORGOTTEN_AFTER_S:
            return None
        return record.bytes_per_s * record.success

    def _is_far_slower(self, url: str, others: Sequence[str]) -> bool:
        scores = [score for other in others if (score := self.score(other)) is not None]
        score = self.score(url)
        return score is not None and score < FAR_SLOWER * max(scores)

    def _record(self, url: str) -> Record:
        return self._records.get(url) or Record()  # one that was replaced while it was being asked

    def _rest(self, record: Record, seconds: float) -> None:
        record.rests_until_s = max(record.rests_until_s, self._clock() + seconds)

    def _measured(self, record: Record, bytes_per_s: float) -> None:
        is_old = record.bytes_per_s is None or self._clock() - record.seen_s > FORGOTTEN_AFTER_S
        old = bytes_per_s if is_old or record.bytes_per_s is None else record.bytes_per_s
        record.bytes_per_s = old + WEIGHT * (bytes_per_s - old)
        record.seen_s = self._clock()
