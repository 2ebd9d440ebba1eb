"""Finds the workers to quarantine: those that fail their tasks, hoard them, or forge log-probs. No I/O; the clock is
injected.

`Fitness` sets aside a worker that fails at least half of its latest tasks, before its failures use up the attempts of
tasks that other workers could do. Repeated failures of one task count once, so that a task that always fails sets no
worker aside.

`HandInPace` finds workers that hold tasks and submit nothing for longer than an honest worker could need. A worker is
judged by its own slowest pace, in seconds per sampled token from the lease of a task to the answer. A worker without an
answer is judged by the pace of the others, once they have given enough answers. Tasks returned untouched and
trajectories submitted again do not count as answers.

`is_believable` is False for workers whose log-probs are not those of the claimed weights, according to the trainer's
audits (`offbeat.trainer.audit`). Honest workers pass: different arithmetic changes a log-prob by up to 0.1, rarely by
0.5. Only the latest segments of a worker are judged, so that an honest past gives no credit. Until a worker
`is_proven`, all of its tokens are audited. A segment that `looks_forged` is not trained on, whichever worker sent it.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from statistics import median
from typing import Any, NamedTuple

from offbeat.rules.leases import Lease

FAILURE_WINDOW = 16
"""Number of latest attempts by which a worker is judged."""
MAX_FAILED = 7
"""Number of tasks that a worker may fail in its latest `FAILURE_WINDOW` attempts; failing half is no accident."""
ASIDE_S = 300.0
"""Time for which a worker that is set aside gets no tasks. Then it may try again, because the fault may have passed. If
the fault is still there, the worker is set aside again. Once it is set aside, its failures no longer count against the
tasks that are unfinished."""


@dataclass
class _Attempts:
    latest: deque[int | None] = field(default_factory=lambda: deque(maxlen=FAILURE_WINDOW))
    """Latest attempts: the task of each failure, None for each success."""
    back_s: float = 0.0
    """Time on the clock from which the worker may be given tasks again."""
    why: str = ""
    """Reason why the worker was last set aside."""

    @property
    def num_failed(self) -> int:
        return len({task for task in self.latest if task is not None})


class Fitness:
    """Records the latest attempts of each worker, and which workers are set aside: they get no tasks for a while."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._records: dict[str, _Attempts] = {}

    def succeeded(self, worker: str) -> None:
        if worker in self._records:  # a worker that never failed needs no record
            self._records[worker].latest.append(None)

    def failed(self, worker: str, task: int, reason: str) -> str | None:
        """Records that a worker failed a task. Returns why the worker is now set aside; None if it is not."""
        record = self._records.setdefault(worker, _Attempts())
        record.latest.append(task)
        if record.num_failed <= MAX_FAILED:
            return None
        why = (
            f"{record.num_failed} of the latest {len(record.latest)} tasks of {worker} failed, the last one with: "
            f"{reason}"
        )
        self.set_aside(worker, why)
        return why

    def set_aside(self, worker: str, why: str) -> None:
        """Sets a worker aside for `ASIDE_S` seconds, because of `why`; afterwards it begins with a clean record."""
        record = self._records.setdefault(worker, _Attempts())
        record.why = why
        record.latest.clear()
        record.back_s = self._clock() + ASIDE_S

    def has_failed(self, worker: str) -> bool:
        """Whether the worker has failed a task or been set aside since it joined or last restarted."""
        return worker in self._records

    def aside_s(self, worker: str) -> float:
        """Returns the seconds for which a worker is still set aside; 0 if it is not."""
        record = self._records.get(worker)
        return 0.0 if record is None else max(0.0, record.back_s - self._clock())

    def aside(self) -> dict[str, str]:
        """Returns the workers that are set aside now, with the reason for each."""
        return {worker: record.why for worker, record in self._records.items() if self.aside_s(worker)}

    def forget(self, worker: str) -> None:
        """Deletes the record of a worker that left or restarts."""
        self._records.pop(worker, None)


MIN_TIMES_TTL = 2.0
"""A worker may hold tasks without an answer for this many times `ttl_s`, the lease time, however fast it was."""
OWN_MARGIN = 4.0
"""A worker may take this many times as long as the longest answer would take at its own slowest pace; then it is
overdue. Engines slow down as they fill up and while they load weights."""
FLEET_MARGIN = 8.0
"""A worker without an answer may take this many times as long as the longest answer would take at the median of the
other workers' slowest paces. With a larger value, the other workers would wait too long for its tasks. Most answers
are far shorter than the longest, so even a much slower machine has time for its first answer."""
MIN_FLEET_ANSWERS = 16
"""Number of answers that other workers must have given before a worker without an answer is judged by their pace."""
MAX_ENDED = 64
"""Once more leases are remembered than twice the current ones plus this number, those that have ended are forgotten."""


@dataclass
class _HandIns:
    quiet_s: float = 0.0
    """Time for which the worker has held tasks since its last answer."""
    num_answers: int = 0
    slowest_s: float = 0.0
    """Largest number of seconds per token among those answers whose lease was reported by `granted`."""


@dataclass(frozen=True)
class _Begun:
    lease: Lease
    since_s: float
    num_sampled: int
    """Number of the task's tokens that were sampled before this lease."""


class HandInPace:
    """Pace of each worker in seconds per token, and its quiet time: how long it has held tasks without an answer."""

    def __init__(self, ttl_s: float, max_new_tokens: int, clock: Callable[[], float]):
        self._ttl_s, self._max_new_tokens, self._clock = ttl_s, max_new_tokens, clock
        self._records: dict[str, _HandIns] = {}
        self._begun: dict[int, _Begun] = {}
        """Latest reported lease of each task, kept for a while after the lease has ended, because a late answer still
        shows the worker's pace."""

    def granted(self, lease: Lease, num_sampled: int) -> None:
        """Reports that a worker was given a task that already has `num_sampled` sampled tokens."""
        self._begun[lease.task] = _Begun(lease, self._clock(), num_sampled)

    def handed_in(self, lease: Lease, num_sampled: int) -> None:
        """Reports that a trajectory, whole or partial, with `num_sampled` sampled tokens was accepted for the first
        time. Without a new token it does not count as an answer."""
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
        """Sets a worker's quiet time (how long it has held tasks without an answer) to 0, because the worker lost its
        leases or failed a task. Failures are judged by `Fitness` instead."""
        if worker in self._records:
            self._records[worker].quiet_s = 0.0

    def add_quiet_time(self, seconds: float, leases: Collection[Lease]) -> None:
        """Adds `seconds` to the quiet time of each worker that holds one of `leases`, which must be all current leases.
        Time in which the coordinator could not receive answers must not be counted. Also forgets ended leases once
        there are many."""
        for worker in {lease.worker for lease in leases}:
            self._records.setdefault(worker, _HandIns()).quiet_s += seconds
        if len(self._begun) > 2 * len(leases) + MAX_ENDED:
            living = set(leases)
            self._begun = {task: begun for task, begun in self._begun.items() if begun.lease in living}

    def bound_s(self, worker: str) -> float | None:
        """Returns the most seconds for which a worker may hold tasks without submitting anything; None: no limit."""
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
        """Returns the workers that have held tasks and submitted nothing for too long, with the reason for each."""
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
"""Difference between a worker's and the trainer's log-prob above which a token counts as off."""
HONEST_SHARE, FORGED_SHARE = 0.01, 0.05
"""Assumed share of tokens that are off in an honest segment (at most this), and in a forged one (at least this). If a
fifth of the tokens are forged and the forger guesses well, one in twenty is off. Honest engines stay below one in a
hundred."""
TOUCHED = (0.2, 1.0)
"""Two assumptions about the share of its segments that a forger forges: a fifth of them, or all."""
MAX_STEP = 3.0
"""Largest suspicion that one segment adds, because a flipped bit or a driver fault can spoil a whole segment."""
MAX_SUSPICION = 10.0
"""Suspicion above which a worker is not believed. Four consecutive segments that are completely off exceed it; honest
segments with one token in 200 off reach 6 within 30,000 segments."""
AUDIT_WINDOW = 256
"""Number of latest segments by which a worker is judged."""
MIN_PROVEN = 16
"""Number of audited segments after which a worker without suspicion is proven: only a share of its older tokens is
then audited."""


class Compared(NamedTuple):
    """Result of the trainer's audit of one segment: how many log-probs it recomputed, and how many were off."""

    num_tokens: int
    """Number of tokens compared: those whose version's weights were still available."""
    num_off: int


def suspicion(compared: Iterable[Compared]) -> float:
    """Returns the evidence that a worker is a forger, from its audited segments, oldest first. For each share in
    `TOUCHED`, adds up the segments' log-likelihood ratios of forged over honest, at most `MAX_STEP` each, and restarts
    from 0 whenever the sum is negative. Returns the largest of these sums."""
    sums = [0.0] * len(TOUCHED)
    for num_tokens, num_off in compared:
        forged = _forged(num_tokens, num_off)
        for i, touched in enumerate(TOUCHED):
            sums[i] = max(0.0, sums[i] + min(_mixed(forged, touched), MAX_STEP))
    return max(sums)


def _forged(num_tokens: int, num_off: int) -> float:
    """Returns the log-likelihood ratio, forged over honest, of a segment with `num_off` of `num_tokens` tokens off."""
    return num_off * math.log(FORGED_SHARE / HONEST_SHARE) + (num_tokens - num_off) * math.log(
        (1 - FORGED_SHARE) / (1 - HONEST_SHARE)
    )


def _mixed(forged: float, touched: float) -> float:
    """Returns the log-likelihood ratio of a segment that is forged with probability `touched`. `forged` is the ratio of
    a segment that is certainly forged."""
    return forged if touched == 1 else math.log1p(touched * math.expm1(min(forged, 100.0)))


def is_believable(compared: Iterable[Compared]) -> bool:
    return suspicion(compared) <= MAX_SUSPICION


def is_proven(compared: Collection[Compared]) -> bool:
    return len(compared) >= MIN_PROVEN and suspicion(compared) == 0


def looks_forged(num_tokens: Any, num_off: Any) -> Any:
    """Whether more tokens of one segment are off (`num_off`) than chance explains. With one token in 200 off, this
    happens to one honest segment in 1,000. Takes tensors too, with one entry per segment."""
    return _forged(num_tokens, num_off) > MAX_STEP
