"""Until columns have a version: by who publishes it and who passes it on, for all of them at once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from offbeat.plan.problem import Gang, Problem, RolloutColumn

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Source = tuple[str, frozenset[str]]
"""Where a gang's versions come from: the class that publishes, and those of its own that may pass them on."""


def relays_of(problem: Problem) -> frozenset[str]:
    """Classes over which a version may reach another one sooner; none with bound 0."""
    if not problem.demand.bound:
        return frozenset()
    return _relays(problem.rollout)


def _relays(columns: Iterable[RolloutColumn]) -> frozenset[str]:
    return frozenset(name for column in columns for ways_s in column.lag_over_s.values() for name in ways_s)


def source_of(gang: Gang, relays: frozenset[str]) -> Source:
    return gang.root, frozenset(gang.nodes) & relays


@dataclass(frozen=True)
class Lags:
    """Of J columns."""

    direct_s: dict[str, Floats]
    """J, by who publishes."""
    over_s: dict[tuple[str, str], Floats]
    """J, by who publishes and who passes on; infinite where that brings a column nothing."""

    def of(self, root: str, over: Iterable[str] = ()) -> Floats:
        """What `RolloutColumn.lag_from_s` says, for all columns."""
        ways_s = [self.over_s[root, name] for name in over if (root, name) in self.over_s]
        return np.minimum.reduce([self.direct_s[root], *ways_s])

    def every(self, source: Source, relays: Iterable[str]) -> Floats:
        """1 + R x J: from a gang's own classes, then with each of R others."""
        root, own = source
        return np.array([self.of(root, over) for over in (own, *(own | {name} for name in relays))])


def lags_of(columns: Sequence[RolloutColumn], roots: Iterable[str]) -> Lags:
    relays = _relays(columns)
    direct_s, over_s = {}, {}
    for root in roots:
        direct_s[root] = np.array([column.lag_from_s(root) for column in columns], dtype=float)
        ways_s = [column.lag_over_s.get(root, {}) for column in columns]
        for name in relays:
            over_s[root, name] = np.array([ways.get(name, np.inf) for ways in ways_s], dtype=float)
    return Lags(direct_s, over_s)
