"""Quarantine: workers that fail their tasks, hoard them, or forge log-probs.

`Fitness` sets aside a worker that fails most of its tasks, before its failures use up the attempts of tasks that others
could do. Only different tasks count, so that a task that nobody can do sets no worker aside.

`HandInPace` finds workers that hold tasks and hand nothing in for longer than an honest one could need. A worker is
measured by its own slowest pace: seconds from a grant to the answer, per sampled token. One without an answer is
measured by the pace of the others, once enough is known of it, else not at all. Only time in which a worker holds tasks
counts, as far as the caller vouches for it. Returning tasks untouched, or handing in the same again, is no answer.

`is_believable` shuts out workers whose log-probs are not those of the claimed weights, by mistake or on purpose, and no
honest one: other arithmetic moves a log-prob by up to 0.1, rarely by 0.5. The trainer computes log-probs itself
(`offbeat.trainer.audit`) and counts, for every segment, the tokens compared and those that are off. Only the latest
segments of a worker are judged, so that no past buys credit. Until a worker `is_proven`, all of its tokens are
compared, and a segment that `looks_forged` is not trained on, whoever sent it.

No I/O; the clock is injected. A worker that leaves, or restarts, begins with a clean record.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

from offbeat.rules.leases import Lease

FAILURE_WINDOW = 16
"""Latest attempts that are judged."""
MAX_FAILED = 7
"""Different tasks that a worker may fail among these: half of them is no accident."""
ASIDE_S = 300.0
"""Time for which a worker gets no tasks. Then it may try again: the fault may have passed, and if not, its next
failures cost no attempt either."""


@dataclass
class _Attempts:
    latest: deque[int | None] = field(default_factory=lambda: deque(maxlen=FAILURE_WINDOW))
    """Tasks that failed, and None for each success."""
    back_s: float = 0.0
    """Time from which it may be given tasks again."""
    why: str = ""
    """Reason for which it was set aside last."""

    @property
    def num_failed(self) -> int:
        return len({task for task in self.latest if task is not None})


class Fitness:
    """The latest attempts of each worker."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._records: dict[str, _Attempts] = {}

    def succeeded(self, worker: str) -> None:
        if worker in self._records:  # a worker that never failed needs no record
            self._records[worker].latest.append(None)

    def failed(self, worker: str, task: int, reason: str) -> str | None:
        """Records a failure; returns the reason if it sets the worker aside."""
        record = self._records.setdefault(worker, _Attempts())
        record.latest.append(task)
        if record.num_failed <= MAX_FAILED:
            return None
        why = f"{record.num_failed} of the latest {len(record.latest)} tasks of {worker} failed: {reason}"
        self.set_aside(worker, why)
        return why

    def set_aside(self, worker: str, why: str) -> None:
        """Sets a worker aside for `ASIDE_S`; then it begins with a clean record."""
        record = self._records.setdefault(worker, _Attempts())
        record.why = why
        record.latest.clear()
        record.back_s = self._clock() + ASIDE_S

    def has_failed(self, worker: str) -> bool:
        """Whether it failed a task, or was set aside, since it came."""
        return worker in self._records

    def aside_s(self, worker: str) -> float:
        """Seconds for which a worker is still set aside; 0: it is not."""
        record = self._records.get(worker)
        return 0.0 if record is None else max(0.0, record.back_s - self._clock())

    def aside(self) -> dict[str, str]:
        """Reasons of the workers that are set aside now."""
        return {worker: record.why for worker, record in self._records.items() if self.aside_s(worker)}

    def forget(self, worker: str) -> None:
        """Deletes the record of a worker that left or restarts."""
        self._records.pop(worker, None)


MIN_TIMES_TTL = 2.0
"""No worker is overdue before this many times the time of a lease, however fast it was."""
OWN_MARGIN = 4.0
"""Factor on the longest answer at a worker's own slowest pace: engines slow down as they fill, and while loading."""
FLEET_MARGIN = 8.0
"""Factor on the longest answer at the fleet's slowest pace, for a newcomer. All may wait for the tasks that it holds.
Most answers are far from the longest, so that a machine much slower than this still has time for its first."""
MIN_FLEET_ANSWERS = 16
"""Answers of other workers that are needed to judge a newcomer by their pace."""
MAX_ENDED = 64
"""Ended leases that are kept, besides one for each living lease."""


@dataclass
class _HandIns:
    quiet_s: float = 0.0
    """Time that it has held tasks since its last answer."""
    num_answers: int = 0
    slowest_s: float = 0.0
    """Most seconds per token of any of its answers whose grant was seen."""


@dataclass(frozen=True)
class _Begun:
    lease: Lease
    since_s: float
    num_sampled: int
    """Tokens of the task that were sampled before the grant."""


class HandInPace:
    """Pace of each worker, and the time that it has been quiet."""

    def __init__(self, ttl_s: float, max_new_tokens: int, clock: Callable[[], float]):
        self._ttl_s, self._max_new_tokens, self._clock = ttl_s, max_new_tokens, clock
        self._records: dict[str, _HandIns] = {}
        self._begun: dict[int, _Begun] = {}
        """By task; kept for a while after the lease has ended, because a late answer still shows its worker's pace."""

    def granted(self, lease: Lease, num_sampled: int) -> None:
        """Reports that a worker was given a task with `num_sampled` tokens so far."""
        self._begun[lease.task] = _Begun(lease, self._clock(), num_sampled)

    def handed_in(self, lease: Lease, num_sampled: int) -> None:
        """Reports that a trajectory, whole or partial, of `num_sampled` sampled tokens was accepted for the first time;
        without a new token it does not count."""
        begun = self._begun.get(lease.task)
        if begun is not None and begun.lease != lease:
            begun = None
        num_new = num_sampled - (begun.num_sampled if begun is not None else 0)
        if num_new <= 0:
            return
        record = self._records.setdefault(lease.worker, _HandIns())
        record.quiet_s = 0.0
        if begun is not None:
            del self._begun[lease.task]
            record.num_answers += 1
            record.slowest_s = max(record.slowest_s, (self._clock() - begun.since_s) / num_new)

    def reset_quiet_time(self, worker: str) -> None:
        """Restarts the quiet time of a worker that failed a task, which is judged elsewhere, or lost its leases."""
        if worker in self._records:
            self._records[worker].quiet_s = 0.0

    def add_quiet_time(self, seconds: float, leases: Collection[Lease]) -> None:
        """Adds time in which the holders of these leases could have been heard."""
        for worker in {lease.worker for lease in leases}:
            self._records.setdefault(worker, _HandIns()).quiet_s += seconds
        if len(self._begun) > 2 * len(leases) + MAX_ENDED:
            living = set(leases)
            self._begun = {task: begun for task, begun in self._begun.items() if begun.lease in living}

    def bound_s(self, worker: str) -> float | None:
        """Longest time that a worker may hold tasks and hand in nothing; None: no limit."""
        record = self._records.get(worker, _HandIns())
        if record.num_answers:
            longest_s = OWN_MARGIN * record.slowest_s * self._max_new_tokens
        else:
            others = [other for other in self._records.values() if other.num_answers]
            if sum(other.num_answers for other in others) < MIN_FLEET_ANSWERS:
                return None
            longest_s = FLEET_MARGIN * median(other.slowest_s for other in others) * self._max_new_tokens
        return max(MIN_TIMES_TTL * self._ttl_s, longest_s)

    def overdue(self) -> dict[str, str]:
        """Reasons of the workers that have been quiet for too long."""
        return {worker: why for worker, record in self._records.items() if (why := self._why(worker, record.quiet_s))}

    def _why(self, worker: str, quiet_s: float) -> str | None:
        if quiet_s <= MIN_TIMES_TTL * self._ttl_s:  # below any limit, and cheap to check
            return None
        bound_s = self.bound_s(worker)
        if bound_s is None or quiet_s <= bound_s:
            return None
        return f"{worker} has held tasks for {quiet_s:.0f} s and handed in nothing; its limit is {bound_s:.0f} s"

    def forget(self, worker: str) -> None:
        """Deletes the record of a worker that left or restarts."""
        self._records.pop(worker, None)
        self._begun = {task: begun for task, begun in self._begun.items() if begun.lease.worker != worker}


OFF_GAP = 0.5
"""Distance from the trainer's log-prob above which a token is off."""
HONEST_SHARE, FORGED_SHARE = 0.01, 0.05
"""Most tokens that are off in honest segments, and fewest in forged ones. If a fifth of the tokens are forged and the
forger guesses well, one in twenty is off; honest engines stay below one in a hundred."""
TOUCHED = (0.2, 1.0)
"""Share of its segments that a forger touches: some, or all of them a little."""
MAX_STEP = 3.0
"""Most that one segment adds: a flipped bit, or a fault of a driver, can spoil a whole one."""
MAX_SUSPICION = 10.0
"""Four segments in a row that are off throughout pass it. Honest ones with a token in 200 off come to 6 in 30,000."""
AUDIT_WINDOW = 256
"""Latest segments that are judged."""
MIN_PROVEN = 16
"""Segments compared without a doubt after which a share of a worker's older tokens is enough to compare."""


class Compared(NamedTuple):
    """A segment that the trainer audited."""

    num_tokens: int
    """Tokens compared: those whose own weights were available."""
    num_off: int


def suspicion(compared: Iterable[Compared]) -> float:
    """Evidence against the worker of these segments, the latest last: the larger of two cumulative sums of
    log-likelihood ratios, forged over honest, that restart whenever they fall below 0."""
    sums = [0.0] * len(TOUCHED)
    for num_tokens, num_off in compared:
        forged = _forged(num_tokens, num_off)
        for i, touched in enumerate(TOUCHED):
            sums[i] = max(0.0, sums[i] + min(_mixed(forged, touched), MAX_STEP))
    return max(sums)


def _forged(num_tokens: int, num_off: int) -> float:
    """Log-likelihood ratio of a segment, forged over honest."""
    return num_off * math.log(FORGED_SHARE / HONEST_SHARE) + (num_tokens - num_off) * math.log(
        (1 - FORGED_SHARE) / (1 - HONEST_SHARE)
    )


def _mixed(forged: float, touched: float) -> float:
    """Log-ratio of a segment that is forged with probability `touched`, given that of a forged one."""
    return forged if touched == 1 else math.log1p(touched * math.expm1(min(forged, 100.0)))


def is_believable(compared: Iterable[Compared]) -> bool:
    return suspicion(compared) <= MAX_SUSPICION


def is_proven(compared: Collection[Compared]) -> bool:
    return len(compared) >= MIN_PROVEN and suspicion(compared) == 0


def looks_forged(num_tokens: int, num_off: int) -> bool:
    """Whether one segment is off beyond chance. Honest ones with a token in 200 off are so once in 1,000."""
    return _forged(num_tokens, num_off) > MAX_STEP
