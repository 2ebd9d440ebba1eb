"""Rounds of bursts of groups, from the order in which their answers end: many lanes at once.

Duty: the mechanics of the event model. A lane is one course of rounds, such as those of one over-provision factor. All
lanes play their next round together, because arrays of a dozen lanes cost little more than those of one. A lane has
places for groups; a place holds what each member has, what it has left, and how old its tokens are.

Guarantees: every token is counted in the round that makes it, and delivered once, with its age. Lanes take nothing from
each other, and begin the same fresh groups in the same order. A batch takes those begun longest ago first and waits for
those whose last chance it is, as `select` does out of order.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np

from offbeat.control.reading import is_read_far


@dataclass(frozen=True)
class Flow:
    """What a round did, a lane each."""

    num_steps: np.ndarray
    num_rows: np.ndarray
    """Summed over the steps: the tokens made."""
    num_context_tokens: np.ndarray
    """Read, summed over the steps."""
    num_prefilled_tokens: np.ndarray
    num_prefilled_again: np.ndarray
    """Of these, for answers that go on."""
    peak_context_tokens: np.ndarray
    """In flight at once."""
    delivered_by_age: np.ndarray
    """Tokens by lane and by the rounds since they were made."""


@dataclass(frozen=True, slots=True)
class Terms:
    """What all rounds of a burst have in common."""

    num_wanted: int
    """Groups of a batch."""
    bound: int
    prompt_tokens: float
    slots: int | None
    resumes: bool
    pads: bool


class Bursts:
    """See the module. `num_alive` is how many groups each lane begins its rounds with; survivors are there at first."""

    def __init__(self, terms: Terms, num_alive: np.ndarray, have: np.ndarray, left: np.ndarray, ages: np.ndarray):
        self.terms, self._num_alive = terms, num_alive
        shape = (len(num_alive), max(int(num_alive.max()), len(have)), have.shape[1])
        self._have, self._left = np.zeros(shape), np.zeros(shape)
        self._by_age = np.zeros((*shape[:2], terms.bound + 1))
        self._begun, self._is_alive = np.zeros(shape[:2]), np.zeros(shape[:2], bool)
        """The round in which a group got its first token, those at first in negative ones; and whether there is one."""
        num, ages = len(have), np.minimum(ages, terms.bound)
        self._have[:, :num], self._left[:, :num] = have, left
        self._by_age[:, np.arange(num), ages] = have.sum(axis=1)  # as old as its first token, for want of better
        self._begun[:, :num], self._is_alive[:, :num] = -ages, True
        self._round, self._num_fresh = 0, np.zeros(len(num_alive), np.int64)

    def play(self, fresh: np.ndarray) -> Flow:
        """One round of every lane, filled up with fresh groups of these lengths, in order."""
        self._admit(fresh)
        terms = self.terms
        starts = self._starts()
        ready_at = np.where(self._is_alive, (starts + self._left).max(axis=2), np.inf)
        last = self._last_step(ready_at)
        made = np.clip(last[:, None, None] - starts, 0, self._left)
        begins = made > 0
        before = terms.prompt_tokens + self._have
        goes_on = begins & (self._have > 0)
        again = np.zeros(len(last)) if terms.resumes else (before * goes_on).sum(axis=(1, 2))
        first = terms.prompt_tokens * (begins & ~goes_on).sum(axis=(1, 2))
        read, peak = _context(before, starts, made, terms.pads)
        self._by_age[:, :, 0] += made.sum(axis=2)
        self._have, self._left = self._have + made, self._left - made
        delivered = self._take(ready_at <= last[:, None])
        return Flow(last, made.sum(axis=(1, 2)), read, first + again, again, peak, delivered)

    def _admit(self, fresh: np.ndarray) -> None:
        """Fills free places of every lane with its next fresh groups."""
        is_free = ~self._is_alive
        wanted = np.maximum(self._num_alive - self._is_alive.sum(axis=1), 0)
        place = is_free.cumsum(axis=1)
        lanes, places = np.nonzero(is_free & (place <= wanted[:, None]))
        which = self._num_fresh[lanes] + place[lanes, places] - 1
        self._have[lanes, places], self._left[lanes, places] = 0.0, fresh[which]
        self._by_age[lanes, places], self._is_alive[lanes, places] = 0.0, True
        # A later ordinal breaks the tie of those begun in one round
        self._begun[lanes, places] = self._round + which / (len(fresh) + 1)
        self._num_fresh += wanted

    def _starts(self) -> np.ndarray:
        """The step before which each member gets a row: at once, or when one is free, those begun longest ago first."""
        starts, slots = np.zeros(self._left.shape), self.terms.slots
        if slots is None:
            return starts
        for lane in np.flatnonzero((self._left > 0).sum(axis=(1, 2)) > slots):
            order = np.argsort(self._begun[lane], kind="stable")
            left = self._left[lane, order].ravel()
            waiting, flat = np.flatnonzero(left > 0), np.zeros(len(left))
            busy_until = left[waiting[:slots]].tolist()
            heapq.heapify(busy_until)
            for member in waiting[slots:].tolist():
                flat[member] = busy_until[0]
                heapq.heapreplace(busy_until, busy_until[0] + left[member])
            starts[lane, order] = flat.reshape(-1, self._left.shape[2])
        return starts

    def _last_step(self, ready_at: np.ndarray) -> np.ndarray:
        """The step after which the batch is there: enough groups are, and so are all whose last chance it is."""
        wanted, bound = self.terms.num_wanted, self.terms.bound
        last = np.partition(ready_at, wanted - 1, axis=1)[:, wanted - 1]
        begun = np.floor(self._begun)
        for more_steps in range(bound):
            is_due = self._is_alive & (begun <= self._round - bound + more_steps)
            num_due = np.minimum(is_due.sum(axis=1) - more_steps * wanted, wanted)
            lanes = np.flatnonzero(num_due > 0)
            if len(lanes):
                due = np.sort(np.where(is_due, ready_at, np.inf)[lanes], axis=1)
                last[lanes] = np.maximum(last[lanes], due[np.arange(len(lanes)), num_due[lanes] - 1])
        return last

    def _take(self, is_ready: np.ndarray) -> np.ndarray:
        """Hands the batch over and makes all others a round older; returns the tokens of the batch by age."""
        wanted = self.terms.num_wanted
        order = np.where(is_ready, self._begun, np.inf)
        is_taken = order <= np.partition(order, wanted - 1, axis=1)[:, wanted - 1, None]
        delivered = (self._by_age * is_taken[:, :, None]).sum(axis=1)
        self._is_alive &= ~is_taken
        self._left[is_taken] = 0.0
        self._round += 1
        is_waiting = self._is_alive & ~self._by_age.any(axis=2)
        self._begun[is_waiting] += 1  # without a token nothing grows old
        oldest = self._by_age[:, :, -1] + (self._by_age[:, :, -2] if self.terms.bound else 0.0)
        self._by_age[:, :, 1:] = self._by_age[:, :, :-1].copy()
        self._by_age[:, :, -1], self._by_age[:, :, 0] = oldest, 0.0
        return delivered


def _context(before: np.ndarray, starts: np.ndarray, made: np.ndarray, pads: bool) -> tuple[np.ndarray, np.ndarray]:
    """Tokens of context that each lane reads in all and has in flight at most.

    `before` a row's first step it has so much, and one more with each. A step that pads reads rows × longest, in the
    two parts that are chosen when the round begins.
    """
    num_lanes = len(before)
    runs = made > 0
    _, peak = _padded(before, starts, made, runs)
    if not pads:
        return (made * (before + (made + 1) / 2)).sum(axis=(1, 2)), peak
    is_far = is_read_far(np.where(runs, before, 0.0).reshape(num_lanes, -1)).reshape(before.shape)
    far, near = (_padded(before, starts, made, part)[0] for part in (runs & is_far, runs & ~is_far))
    return far + near, peak


def _padded(
    before: np.ndarray, starts: np.ndarray, made: np.ndarray, some: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """What some rows of each lane read as far as the longest of them, and what they have in flight at most."""
    num_lanes = len(before)
    runs, made = some.reshape(num_lanes, -1), np.where(some, made, 0.0)
    ends = np.where(runs, (starts + made).reshape(num_lanes, -1), 0.0)
    order = np.argsort(ends, axis=1)
    ends, runs = np.take_along_axis(ends, order, 1), np.take_along_axis(runs, order, 1)
    at_step_0 = np.where(runs, np.take_along_axis((before - starts).reshape(num_lanes, -1), order, 1), 0.0)
    begins = np.concatenate([np.zeros((num_lanes, 1)), ends[:, :-1]], axis=1)
    rows = runs[:, ::-1].cumsum(axis=1)[:, ::-1]
    rows = rows - _num_not_begun(starts, made, begins)
    peak = (rows * ends + at_step_0[:, ::-1].cumsum(axis=1)[:, ::-1]).max(axis=1)
    longest = np.maximum.accumulate(at_step_0[:, ::-1], axis=1)[:, ::-1]
    read = (rows * (ends - begins) * (longest + (begins + ends + 1) / 2)).sum(axis=1)
    return read, peak


def _num_not_begun(starts: np.ndarray, made: np.ndarray, at: np.ndarray) -> np.ndarray:
    """How many rows of each lane begin only after these steps."""
    if not starts.any():
        return np.zeros(at.shape)
    waits = np.sort(np.where(made > 0, starts, 0.0).reshape(len(at), -1), axis=1)
    num_begun = [np.searchsorted(row, times, side="right") for row, times in zip(waits, at, strict=True)]
    return waits.shape[1] - np.stack(num_begun)
