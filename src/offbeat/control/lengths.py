"""How long answers are, from those that ended and those that did not yet.

Duty: the length model. A mean over finished answers is biased short, because the long ones are those that still run.
Here every trajectory is one record with its whole length: an event where it ended by itself, right-censored where it
was cut at the cap or is still under way, in whatever number of segments. From these follows the Kaplan-Meier estimate
S(t) = Π (1 − d_j / n_j) over the lengths t_j ≤ t at which d_j of n_j that came so far ended.

Guarantees: each key counts once, with what was said of it last; what ended under earlier versions counts exponentially
less, what is under way counts fully; a bucket with few records is drawn to the curve of all.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Iterable
from dataclasses import dataclass

import numpy as np

from offbeat.control.law import Law
from offbeat.control.siblings import expected_length, shared_share

FORGET = 0.95
"""Of the weight of what ended, with each version: about twenty versions count."""
MIN_WEIGHT = 0.05
MAX_RECORDS = 8192
"""Ended ones that are kept; the oldest go first. More would not say more."""
SHRINK = 20.0
"""Records of a bucket that weigh as much as the curve of all buckets together."""
TAIL = 0.25
"""The share of the longest answers that say how the curve goes on where nobody has been."""
MAX_GROUPS = 64
"""The latest groups from which is told what siblings have in common: a millisecond or two."""


@dataclass(slots=True)
class _Record:
    bucket: Hashable
    num_tokens: int
    group: Hashable
    is_event: bool = False
    """It ended by itself."""
    weight: float | None = None
    """None while it is under way."""


class Lengths:
    """See the module. Say what happens to each trajectory by its key; `advance` with each version."""

    def __init__(self, max_tokens: int):
        self.max_tokens = max_tokens
        self._records: dict[Hashable, _Record] = {}
        self._curves: dict[Hashable, np.ndarray] = {}
        self._shared: float | None = None
        """Both are remembered until something new is said."""

    def running(self, key: Hashable, bucket: Hashable, num_tokens: int, group: Hashable = None) -> None:
        """It has so many tokens and goes on, now or later."""
        self._put(key, _Record(bucket, min(num_tokens, self.max_tokens), group))

    def finished(self, key: Hashable, bucket: Hashable, num_tokens: int, group: Hashable = None) -> None:
        """It ended by itself; one of `max_tokens` was cut."""
        if num_tokens >= self.max_tokens:
            return self.capped(key, bucket, group)
        self._put(key, _Record(bucket, num_tokens, group, is_event=True, weight=1.0))

    def capped(self, key: Hashable, bucket: Hashable, group: Hashable = None) -> None:
        """It was cut at `max_tokens`."""
        self._put(key, _Record(bucket, self.max_tokens, group, weight=1.0))

    def dropped(self, key: Hashable) -> None:
        """It is not carried on, and nobody will know how long it would have been."""
        if key in self._records and self._records[key].weight is None:
            self._records[key].weight = 1.0

    def advance(self) -> None:
        """There is a new version."""
        ended = {key: record.weight for key, record in self._records.items() if record.weight is not None}
        for index, (key, weight) in enumerate(ended.items()):
            if weight * FORGET < MIN_WEIGHT or len(ended) - index > MAX_RECORDS:
                del self._records[key]
            else:
                self._records[key].weight = weight * FORGET
        self._forget_curves()

    @property
    def num_ended(self) -> float:
        """Records that ended, each by what it counts for."""
        return sum(record.weight for record in self._records.values() if record.weight is not None)

    def survival(self, bucket: Hashable = None) -> np.ndarray:
        """At t = 0..max_tokens the share that has more than t tokens; None: of all buckets together."""
        if bucket not in self._curves:
            everyone = self._records.values()
            if bucket is None:
                self._curves[bucket] = kaplan_meier(everyone, self.max_tokens)
            else:
                own = [record for record in everyone if record.bucket == bucket]
                num = sum(record.weight for record in own if record.weight is not None)
                mixed = num * kaplan_meier(own, self.max_tokens) + SHRINK * self.survival()
                self._curves[bucket] = mixed / (num + SHRINK)
        return self._curves[bucket]

    def law(self, bucket: Hashable = None) -> Law:
        """What a prediction draws from."""
        return Law(self.survival(bucket), self._shared_share())

    def expected_remaining(self, bucket: Hashable, num_tokens: int) -> float:
        """Tokens that a trajectory with so many is expected to add, whatever its siblings do."""
        curve = self.survival(bucket)[num_tokens : self.max_tokens]
        return float(curve.sum() / curve[0]) if len(curve) and curve[0] > 0 else 0.0

    def expected_of(
        self, group: Hashable, bucket: Hashable = None, earlier: Collection[Hashable] = ()
    ) -> dict[Hashable, float]:
        """Tokens that each running member of a group is expected to add, given all that is known of its siblings.

        `earlier` are groups of the same prompt in earlier epochs, whose members tell as much while they are remembered.
        """
        members = {key: record for key, record in self._records.items() if record.group == group}
        others = [record for record in self._records.values() if record.group in earlier]
        num_tokens, ended = _table([[*members.values(), *others]])
        expected = expected_length(self.law(bucket), num_tokens, ended)[0]
        pairs = zip(members.items(), expected, strict=False)
        return {key: float(total) - record.num_tokens for (key, record), total in pairs if record.weight is None}

    def _put(self, key: Hashable, record: _Record) -> None:
        self._records.pop(key, None)  # so that records stand in the order in which something was said of them
        self._records[key] = record
        self._forget_curves()

    def _forget_curves(self) -> None:
        self._curves.clear()
        self._shared = None

    def _shared_share(self) -> float:
        if self._shared is None:
            groups: dict[Hashable, list[_Record]] = {}
            for record in reversed(self._records.values()):
                if record.group is not None and (record.group in groups or len(groups) < MAX_GROUPS):
                    groups.setdefault(record.group, []).append(record)
            several = [members for members in groups.values() if len(members) > 1]
            self._shared = shared_share(Law(self.survival()), *_table(several)) if several else 0.0
        return self._shared


def _table(groups: list[list[_Record]]) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and whether they are all, a row a group; -1 where a group has no such member."""
    size = max((len(members) for members in groups), default=0)
    num_tokens, ended = np.full((len(groups), size), -1), np.zeros((len(groups), size), bool)
    for row, members in enumerate(groups):
        num_tokens[row, : len(members)] = [record.num_tokens for record in members]
        ended[row, : len(members)] = [record.is_event for record in members]
    return num_tokens, ended


def kaplan_meier(records: Iterable[_Record], max_tokens: int) -> np.ndarray:
    """S(t) at t = 0..max_tokens; beyond the longest record it goes on as the longest ones suggest."""
    rows = [(r.num_tokens, r.is_event, 1.0 if r.weight is None else r.weight) for r in records]
    if not rows:
        return np.ones(max_tokens + 1)
    num_tokens, is_event, weights = (np.array(column) for column in zip(*rows, strict=True))
    ends = np.bincount(num_tokens, weights * is_event, minlength=max_tokens + 1)
    came_so_far = np.bincount(num_tokens, weights, minlength=max_tokens + 1)[::-1].cumsum()[::-1]
    share = np.divide(ends, came_so_far, out=np.zeros(max_tokens + 1), where=ends > 0)
    curve = np.cumprod(1 - np.minimum(share, 1.0))
    longest = int(num_tokens.max())
    if curve[longest] > 0 and longest < max_tokens:
        beyond = np.arange(longest, max_tokens + 1) / max(longest, 1)
        curve[longest:] = curve[longest] * np.maximum(beyond, 1.0) ** -_tail_exponent(num_tokens, is_event, weights)
    return curve


def _tail_exponent(num_tokens: np.ndarray, is_event: np.ndarray, weights: np.ndarray) -> float:
    """Of a power law through the longest records, censored ones too (Hill): how fast they thin out."""
    least = max(float(np.quantile(num_tokens, 1 - TAIL)), 1.0)
    is_long = num_tokens >= least
    num_ends = float((weights * is_event)[is_long].sum())
    way = float((weights * np.log(np.maximum(num_tokens, 1) / least))[is_long].sum())
    return (num_ends + 1) / (way + 1 / math.e)
