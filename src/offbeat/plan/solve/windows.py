"""What a gang and a column lose to one another: seconds of a period, and how short the period may be for the tail."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from offbeat.plan.problem import Gang, Problem, RolloutColumn
from offbeat.plan.solve.lags import Floats, Ints, lags_of, relays_of, source_of

ROUNDING = 1e-12
"""A column is admitted this much later than its window opens, so that exact arithmetic admits it too."""


@dataclass(frozen=True)
class Windows:
    """The shortest periods that the tail fits, of S gangs and J columns.

    Thousands of gangs have a few sources of versions among them, so what depends on the source is kept once.
    """

    late_s: Floats
    """1 + R x sources x J: from training to the end of the tail, where versions come from a gang's own classes, or over
    each of R others; infinite where a gang leaves a column no memory."""
    source: Ints
    """By gang."""
    trained_s: Floats
    """By gang: what its training takes of the window besides."""
    num_periods: float = 1.0
    """Of the window."""
    stretch: float = 1.0
    """Times the period that is needed, for tails that are to be ready so much earlier."""

    @cached_property
    def opens_s(self) -> Floats:
        """S x J: whoever passes versions on."""
        return self._periods(self.late_s.min(axis=0)[self.source], self.trained_s)

    def ways_s(self, gangs: Ints) -> Floats:
        """1 + R x gangs x J: by who passes versions on."""
        return self._periods(self.late_s[:, self.source[gangs]], self.trained_s[gangs])

    def _periods(self, late_s: Floats, trained_s: Floats) -> Floats:
        return (late_s + trained_s[:, None]) / self.num_periods * (1 + ROUNDING) * self.stretch


def windows(
    problem: Problem, gangs: Sequence[Gang], columns: Sequence[Sequence[RolloutColumn]], overs: Sequence[str]
) -> tuple[Floats, Windows]:
    """Per gang and column: seconds of a period without generation, and which periods the tail fits, by those that pass
    versions on besides the gang's own classes."""
    demand = problem.demand
    relays = relays_of(problem)
    sources = [source_of(gang, relays) for gang in gangs]
    known = {source: i for i, source in enumerate(dict.fromkeys(sources))}
    of_gang = np.array([known[source] for source in sources], dtype=np.int64)
    first = [shapes[0] for shapes in columns]
    lags = lags_of(first, {root for root, _ in known})
    lost = [[column.blocking_s[root] for column in first] for root, _ in known]
    blocking = np.array(lost, dtype=float).reshape(len(known), len(first))[of_gang]
    every = np.array([lags.every(source, overs) for source in known]).reshape(len(known), 1 + len(overs), len(first))
    lag_s = every.transpose(1, 0, 2) + demand.lag_s
    tail_s = demand.tail_tokens * np.array([column.token_s for column in first], dtype=float)
    trained_s = np.array([gang.period_s for gang in gangs], dtype=float)
    if demand.bound == 0:
        blocking = blocking + trained_s[:, None] + lag_s[0, of_gang]
        return blocking, _taking_turns(gangs, first, blocking + tail_s if demand.tail_tokens else 0.0)
    if not demand.tail_tokens:
        return blocking, Windows(np.zeros(lag_s.shape), of_gang, np.zeros(len(gangs)))
    return blocking, Windows(tail_s + lag_s, of_gang, trained_s, demand.bound + 1 - demand.age_guard)


def _taking_turns(gangs: Sequence[Gang], columns: Sequence[RolloutColumn], late_s: Floats | float) -> Windows:
    """Each gang for itself: its training comes first, and what it keeps may leave a column on its cards no memory."""
    room = np.array([np.inf if column.room_bytes is None else column.room_bytes for column in columns])
    offers = sorted({column.offer for column in columns})
    kept = np.array([[gang.kept_bytes.get(name, 0.0) for name in offers] for gang in gangs], dtype=float)
    fits = kept.reshape(len(gangs), len(offers))[:, [offers.index(column.offer) for column in columns]] <= room
    return Windows(np.where(fits, late_s, np.inf)[None], np.arange(len(gangs)), np.zeros(len(gangs)))
