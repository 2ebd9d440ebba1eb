"""Which groups a step trains on, and which can never be trained any more.

Duty: hold the bound. Selection sees each candidate as stretches of tokens with the step of their version and answers
with what to take, what to drop as stale, and whom it waits for. The ledger loads the candidates and stores the answer
within one transaction; the simulator calls the same function.

Guarantees: a stretch older than the bound, given by an environment, or of an abandoned version is never trainable; a
batch is whole or it is empty. In order, groups are taken by ordinal, never by arrival, and none while one of a lower
ordinal is unfinished. Otherwise those begun longest ago are taken first, and one that is unfinished is passed over
until its last chance: when the later steps would have no room left to train it, and all that are as old, within the
bound, the batch waits for it. So while S + 1 steps' groups are alive at most and each is begun with the newest version,
no token of theirs ever passes the bound.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Stretch:
    """A segment as selection sees it."""

    num_tokens: int
    step: int | None
    """Of its version; None where tokens were given, or their version is abandoned."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A living group that was not claimed yet."""

    group: int
    ordinal: int
    ready: bool
    require_step: int | None = None
    """The step whose version its tasks must be sampled from; None: any."""
    first_step: int | None = None
    """Of the oldest version that a member was begun with; None: none is begun."""
    stretches: tuple[Stretch, ...] = ()
    """Those of its scored members, all together; unread while the group is not ready."""


@dataclass(frozen=True, slots=True)
class Selection:
    take: tuple[int, ...] = ()
    """The batch's groups by ordinal; empty while there are too few."""
    stale: tuple[int, ...] = ()
    """Groups without one token that may still be trained."""
    waits_for: int | None = None
    """The first unfinished group that stands in the way."""


def staleness(token_step: int | None, step: int) -> int | None:
    """How old a token is for a batch trained from `step`; None where it may not be trained at any age."""
    return None if token_step is None or token_step > step else step - token_step


def oldest_trainable_step(step: int, bound: int) -> int:
    """The step of the oldest version whose tokens may be trained from `step`."""
    return step - bound


def is_trainable(token_step: int | None, step: int, bound: int) -> bool:
    """Whether tokens of a version of `token_step` may be trained from `step`."""
    return token_step is not None and oldest_trainable_step(step, bound) <= token_step <= step


def select(candidates: Iterable[Candidate], step: int, count: int, bound: int, *, in_order: bool = True) -> Selection:
    """Picks `count` groups to train from `step`, or none while they are not all there."""
    queue: list[Candidate] = []
    stale: list[int] = []
    for candidate in sorted(candidates, key=_by_ordinal if in_order else _by_age):
        if candidate.require_step is not None and candidate.require_step > step:
            continue  # re-issued for a step that is yet to come
        if _is_stale(candidate, step, bound):
            stale.append(candidate.group)
        else:
            queue.append(candidate)
    first_ones = itertools.takewhile(_is_ready, queue) if in_order else filter(_is_ready, queue)
    take = list(itertools.islice(first_ones, count))
    if len(take) < count:
        waits_for = next((candidate.group for candidate in queue if not candidate.ready), None)
    else:
        waits_for = None if in_order else _last_chance(queue, take, step, bound)
    is_whole = len(take) == count and waits_for is None
    return Selection(tuple(candidate.group for candidate in take) if is_whole else (), tuple(stale), waits_for)


def _is_ready(candidate: Candidate) -> bool:
    return candidate.ready


def _by_ordinal(candidate: Candidate) -> tuple[int, int]:
    return candidate.ordinal, candidate.group


def _by_age(candidate: Candidate) -> tuple[float, int, int]:
    return _begun(candidate), candidate.ordinal, candidate.group


def _begun(candidate: Candidate) -> float:
    return math.inf if candidate.first_step is None else candidate.first_step


def _last_chance(queue: Sequence[Candidate], take: Sequence[Candidate], step: int, bound: int) -> int | None:
    """The oldest group that must not be passed over for younger ones; `queue` and `take` are by age.

    Unfinished groups whose oldest tokens reach the bound within n more steps must fit into those n steps. What is past
    the bound already has nothing to lose; where nothing younger is taken, waiting would win nothing."""
    oldest = oldest_trainable_step(step, bound)
    passed_over = [
        candidate for candidate in queue if not candidate.ready and oldest <= _begun(candidate) < _begun(take[-1])
    ]
    for num_older, candidate in enumerate(passed_over):
        more_steps = _begun(candidate) - oldest
        if num_older >= more_steps * len(take):
            return passed_over[0].group
    return None


def _is_stale(candidate: Candidate, step: int, bound: int) -> bool:
    if candidate.ready:
        return not any(is_trainable(stretch.step, step, bound) for stretch in candidate.stretches)
    return candidate.require_step is not None and candidate.require_step < oldest_trainable_step(step, bound)
