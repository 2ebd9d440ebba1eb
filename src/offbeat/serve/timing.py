"""When things happened in a step, on a clock that only goes forward: for the time split, and for how long the trainer
stood still."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass
class _Batch:
    """When a batch's generation began and ended."""

    first_lease_s: float | None = None
    last_submit_s: float | None = None
    claimed_s: float | None = None


class StepTimes:
    """Told of what happens; asked for what it took."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._next = self._claimed = _Batch()
        self._claimed_s: dict[int, float] = {}
        self._committed_s: float | None = None

    def leased(self) -> None:
        self._next.first_lease_s = self._next.first_lease_s or self._clock()

    def submitted(self) -> None:
        self._next.last_submit_s = self._clock()

    def claimed(self, step: int) -> None:
        """The batch of a step is complete; telling it again, as a trainer that comes back does, changes nothing."""
        if step not in self._claimed_s:
            self._claimed_s[step] = self._next.claimed_s = self._clock()
            self._claimed, self._next = self._next, _Batch()

    def committed(self, step: int) -> tuple[float, float] | None:
        """How long the trainer stood still before this step, and how long the step took; None for the first."""
        before_s, now_s = self._committed_s, self._clock()
        claimed_s = self._claimed_s.get(step, now_s)
        self._committed_s = now_s
        self._claimed_s = {other: at_s for other, at_s in self._claimed_s.items() if other > step}
        return None if before_s is None else (max(claimed_s - before_s, 0.0), now_s - before_s)

    def split(self) -> dict[str, float]:
        """Seconds that the batch claimed last took to generate, and then to score."""
        found = self._claimed
        if found.first_lease_s is None or found.last_submit_s is None or found.claimed_s is None:
            return {}
        return {
            "generate": found.last_submit_s - found.first_lease_s,
            "reward": max(found.claimed_s - found.last_submit_s, 0.0),
        }
