"""Which samples wait for a reward, who judges which, and until when. No I/O; the clock is handed in.

A judge gets a portion: samples that share a reward, under a ticket. A portion that is not answered in time, or whose
judge leaves, goes back to the front of the queue, and its ticket is over.

Guarantees: a sample that was added waits, is out under exactly one ticket, or was answered; it is answered once. No
more than `max_samples` wait or are out, as long as whoever adds asks for `room`. Tickets of an earlier process are
unknown here, however they are numbered.
"""

from __future__ import annotations

import secrets
from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from offbeat.ledger.errors import Fenced, Forbidden, Unknown
from offbeat.ledger.records import Unscored


@dataclass(frozen=True)
class Portion:
    """Samples that one judge has, and their reward."""

    ticket: str
    judge: str
    reward: str
    samples: tuple[Unscored, ...]
    deadline_s: float | None
    """On the clock; None where whoever judges keeps the time itself."""


class Portions:
    """See the module."""

    def __init__(self, max_samples: int, sample_s: float, slack_s: float, clock: Callable[[], float]):
        """A judge has `sample_s` for every sample that it holds, and `slack_s` besides."""
        self.max_samples, self.sample_s, self.slack_s, self._clock = max_samples, sample_s, slack_s, clock
        self._waiting: dict[str, deque[Unscored]] = {}
        self._out: dict[int, Portion] = {}
        self._by_judge = Counter[str]()
        self._by_reward = Counter[str]()
        self._num_issued = 0
        self._name = secrets.token_hex(8)

    @property
    def num_waiting(self) -> int:
        return sum(map(len, self._waiting.values()))

    @property
    def room(self) -> int:
        """How many samples may be added."""
        return self.max_samples - self.num_waiting - self._by_judge.total()

    @property
    def rewards(self) -> list[str]:
        """Those that samples wait for."""
        return [reward for reward, samples in self._waiting.items() if samples]

    @property
    def held(self) -> dict[str, int]:
        """Samples that are out, by judge."""
        return dict(self._by_judge)

    def held_of(self, judge: str, reward: str) -> int:
        return sum(len(p.samples) for p in self._out.values() if (p.judge, p.reward) == (judge, reward))

    def add(self, samples: Sequence[Unscored]) -> None:
        for sample in samples:
            self._waiting.setdefault(sample.reward, deque()).append(sample)

    def lease(self, judge: str, capacity: int, rewards: Collection[str], *, timed: bool = True) -> Portion | None:
        """Up to `capacity` samples of the reward that the fewest are out for; None where nothing waits."""
        ready = [reward for reward in self.rewards if reward in rewards]
        if not ready or capacity < 1:
            return None
        reward = min(ready, key=lambda reward: (self._by_reward[reward], self._waiting[reward][0].seq))
        queue = self._waiting[reward]
        samples = tuple(queue.popleft() for _ in range(min(capacity, len(queue))))
        self._num_issued += 1
        self._by_judge[judge] += len(samples)
        self._by_reward[reward] += len(samples)
        # For all that it holds: a judge with one process comes to these last.
        ttl_s = self._by_judge[judge] * self.sample_s + self.slack_s
        deadline_s = self._clock() + ttl_s if timed else None
        portion = Portion(f"{self._name}-{self._num_issued}", judge, reward, samples, deadline_s)
        self._out[self._num_issued] = portion
        return portion

    def find(self, judge: str, ticket: str) -> Portion:
        """What a judge has under a ticket, or why it has nothing."""
        number = self._number(ticket)
        portion = self._out.get(number)
        if portion is None:
            raise Fenced(f"ticket {ticket}: over; its samples were answered, or went to someone else")
        if portion.judge != judge:
            raise Forbidden(f"ticket {ticket}: not {judge}'s")
        return portion

    def answer(self, judge: str, ticket: str) -> Portion:
        """Ends a ticket; its samples are answered."""
        portion = self.find(judge, ticket)
        self._end(self._number(ticket))
        return portion

    def leave(self, judge: str) -> int:
        """Takes back what a judge has; returns how many samples that is."""
        return self._take_back([number for number, portion in self._out.items() if portion.judge == judge])

    def expire(self) -> int:
        """Takes back what is overdue; returns how many samples that is."""
        now_s = self._clock()
        due = [n for n, portion in self._out.items() if portion.deadline_s is not None and portion.deadline_s <= now_s]
        return self._take_back(due)

    def next_deadline_s(self) -> float | None:
        """When `expire` should be asked next; None while no time runs."""
        return min((p.deadline_s for p in self._out.values() if p.deadline_s is not None), default=None)

    def _number(self, ticket: str) -> int:
        name, _, digits = ticket.partition("-")
        known = name == self._name and digits.isascii() and digits.isdecimal() and len(digits) < 20
        if not known or not 1 <= int(digits) <= self._num_issued:
            raise Unknown(f"ticket {ticket[:64]!r}: never given out, or by a coordinator that has been started again")
        return int(digits)

    def _end(self, number: int) -> Portion:
        portion = self._out.pop(number)
        self._by_judge[portion.judge] -= len(portion.samples)
        if not self._by_judge[portion.judge]:
            del self._by_judge[portion.judge]  # or they would grow with every judge that ever came
        self._by_reward[portion.reward] -= len(portion.samples)
        return portion

    def _take_back(self, numbers: Sequence[int]) -> int:
        """To the front, and among themselves in their old order."""
        num_samples = 0
        for number in sorted(numbers, reverse=True):
            portion = self._end(number)
            self._waiting[portion.reward].extendleft(reversed(portion.samples))
            num_samples += len(portion.samples)
        return num_samples
