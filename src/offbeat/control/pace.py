"""Which workers hold tasks and hand nothing in, for longer than an honest one could need.

Duty: bound how long heartbeats keep leases alive. A worker is measured by its own pace: seconds from a grant to the
answer, over the tokens sampled meanwhile, at its slowest. One that has never handed in anything is measured by the
pace of the others, once enough is known of it; until then by nothing. No I/O; the clock is injected.

Guarantees: only time in which a worker holds tasks counts, and only as much of it as the caller vouches for, so that
standing still itself blames nobody. Giving tasks back untouched, or handing in the same again, is no answer.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from statistics import median

from offbeat.control.leases import Held

MIN_TIMES_TTL = 2.0
"""Nobody is overdue before so many times the time of a lease, however fast it was."""
OWN_MARGIN = 4.0
"""Times the longest answer at a worker's own slowest pace: engines slow down as they fill, and while weights load."""
FLEET_MARGIN = 16.0
"""Times the longest answer at the fleet's pace: a machine may be ten times slower than most and still be of use."""
MIN_FLEET_ANSWERS = 16
"""Of other workers, before their pace says anything about a newcomer."""

MAX_ENDED = 64
"""Leases that have ended are remembered up to about so many, or as many as there are living ones."""


@dataclass
class _Record:
    quiet_s: float = 0.0
    """How long it has held tasks since it handed in something."""
    num_answers: int = 0
    slowest_s: float = 0.0
    """Seconds per token, the most of all its answers whose grant we saw."""


@dataclass(frozen=True)
class _Begun:
    held: Held
    since_s: float
    num_sampled: int
    """Tokens that others had sampled of it before."""


class Pace:
    """The pace of each worker, and how long each has been quiet."""

    def __init__(self, ttl_s: float, max_new_tokens: int, clock: Callable[[], float]):
        self._ttl_s, self._max_new_tokens, self._clock = ttl_s, max_new_tokens, clock
        self._records: dict[str, _Record] = {}
        self._begun: dict[int, _Begun] = {}
        """By task; for a while also after the lease has ended, because a late answer still tells its worker's pace."""

    def granted(self, held: Held, num_sampled: int) -> None:
        """A worker was given a task of which `num_sampled` tokens are there already."""
        self._begun[held.task] = _Begun(held, self._clock(), num_sampled)

    def handed_in(self, held: Held, num_sampled: int) -> None:
        """An answer, or the beginning of one, was accepted for the first time; it holds `num_sampled` sampled tokens.
        One without a new token says nothing."""
        begun = self._begun.get(held.task)
        if begun is not None and begun.held != held:
            begun = None
        num_new = num_sampled - (begun.num_sampled if begun is not None else 0)
        if num_new <= 0:
            return
        record = self._records.setdefault(held.worker, _Record())
        record.quiet_s = 0.0
        if begun is not None:
            del self._begun[held.task]
            record.num_answers += 1
            record.slowest_s = max(record.slowest_s, (self._clock() - begun.since_s) / num_new)

    def begin_anew(self, worker: str) -> None:
        """It failed a task, which is judged elsewhere, or what it held was taken from it."""
        if worker in self._records:
            self._records[worker].quiet_s = 0.0

    def pass_by(self, seconds: float, leases: Collection[Held]) -> None:
        """So much time has passed in which whoever has one of these leases could have been heard."""
        for worker in {held.worker for held in leases}:
            self._records.setdefault(worker, _Record()).quiet_s += seconds
        if len(self._begun) > 2 * len(leases) + MAX_ENDED:
            living = set(leases)
            self._begun = {task: begun for task, begun in self._begun.items() if begun.held in living}

    def bound_s(self, worker: str) -> float | None:
        """How long a worker may hold tasks and hand in nothing; None: for ever."""
        record = self._records.get(worker, _Record())
        if record.num_answers:
            longest_s = OWN_MARGIN * record.slowest_s * self._max_new_tokens
        else:
            others = [other for other in self._records.values() if other.num_answers]
            if sum(other.num_answers for other in others) < MIN_FLEET_ANSWERS:
                return None
            longest_s = FLEET_MARGIN * median(other.slowest_s for other in others) * self._max_new_tokens
        return max(MIN_TIMES_TTL * self._ttl_s, longest_s)

    def overdue(self) -> dict[str, str]:
        """Workers that have been quiet for too long, and in which words."""
        return {worker: why for worker, record in self._records.items() if (why := self._why(worker, record.quiet_s))}

    def _why(self, worker: str, quiet_s: float) -> str | None:
        if quiet_s <= MIN_TIMES_TTL * self._ttl_s:  # which is no more than any bound, and costs nothing to look at
            return None
        bound_s = self.bound_s(worker)
        if bound_s is None or quiet_s <= bound_s:
            return None
        return f"{worker} has held tasks for {quiet_s:.0f} s and handed in nothing; {bound_s:.0f} s is its bound"

    def forget(self, worker: str) -> None:
        """It left, or begins anew."""
        self._records.pop(worker, None)
        self._begun = {task: begun for task, begun in self._begun.items() if begun.held.worker != worker}
