"""Times of a step: how long its generation and rewards took, and how long the trainer waited for its batch."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass
class _Batch:
    first_lease_s: float | None = None
    last_submit_s: float | None = None
    claimed_s: float | None = None


class StepTimes:
    """Measures how long a step's generation and rewards took, and how long the trainer waited for its batch. The caller
    reports when tasks are leased and submitted, and when batches are claimed and committed."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._next = self._claimed = _Batch()
        self._claimed_s: dict[int, float] = {}
        self._committed_s: float | None = None

    def leased(self) -> None:
        self._next.first_lease_s = self._next.first_lease_s or self._clock()

    def submitted(self) -> None:
        now_s = self._clock()
        if self._next.first_lease_s is None:  # its task was handed out before the last claim: generation never paused
            self._next.first_lease_s = self._claimed.claimed_s or now_s
        self._next.last_submit_s = now_s

    def claimed(self, step: int) -> None:
        """Records that the batch of `step` was claimed. A repeated claim, as after a restart, changes nothing."""
        if step not in self._claimed_s:
            self._claimed_s[step] = self._next.claimed_s = self._clock()
            self._claimed, self._next = self._next, _Batch()

    def committed(self, step: int) -> tuple[float, float] | None:
        """Records the commit of `step`. Returns two times in seconds: how long the trainer waited for this batch after
        the previous commit, and the whole time since the previous commit. None for the first commit."""
        before_s, now_s = self._committed_s, self._clock()
        claimed_s = self._claimed_s.get(step, now_s)
        self._committed_s = now_s
        self._claimed_s = {other: at_s for other, at_s in self._claimed_s.items() if other > step}
        return None if before_s is None else (max(claimed_s - before_s, 0.0), now_s - before_s)

    @property
    def is_training(self) -> bool:
        """Whether a batch is claimed and not committed yet."""
        return bool(self._claimed_s)

    def split(self) -> dict[str, float]:
        """Returns two times of the last claimed batch: `time_generate_s`, from the start of its generation to the last
        submission, and `time_reward_s`, from then until its claim, mostly spent on rewards. Empty if they are unknown.
        """
        found = self._claimed
        if found.first_lease_s is None or found.last_submit_s is None or found.claimed_s is None:
            return {}
        return {
            "time_generate_s": found.last_submit_s - found.first_lease_s,
            "time_reward_s": max(found.claimed_s - found.last_submit_s, 0.0),
        }
