"""Which groups a step trains on, and which can never be trained any more.

Duty: hold the bound. Selection sees each candidate as stretches of tokens with the step of their version and answers
with what to take, what to drop as stale, and whom it waits for. The ledger loads the candidates and stores the answer
within one transaction; the simulator calls the same function.

Guarantees: a stretch older than the bound, given by an environment, or of an abandoned version is never trainable;
groups are taken by ordinal, never by arrival, and none is taken while one of a lower ordinal is unfinished; a batch is
whole or it is empty.
"""

from __future__ import annotations

from collections.abc import Iterable
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


def is_trainable(token_step: int | None, step: int, bound: int) -> bool:
    """Whether tokens of a version of `token_step` may be trained from `step`."""
    age = staleness(token_step, step)
    return age is not None and age <= bound


def select(candidates: Iterable[Candidate], step: int, count: int, bound: int) -> Selection:
    """Picks `count` groups to train from `step`, or none while they are not all there."""
    take: list[int] = []
    stale: list[int] = []
    waits_for: int | None = None
    for candidate in sorted(candidates, key=lambda c: (c.ordinal, c.group)):
        if candidate.require_step is not None and candidate.require_step > step:
            continue  # re-issued for a step that is yet to come
        if _is_stale(candidate, step, bound):
            stale.append(candidate.group)
        elif not candidate.ready:
            waits_for = candidate.group if waits_for is None else waits_for
        elif waits_for is None and len(take) < count:
            take.append(candidate.group)
    return Selection(tuple(take) if len(take) == count else (), tuple(stale), waits_for)


def _is_stale(candidate: Candidate, step: int, bound: int) -> bool:
    if candidate.ready:
        return not any(is_trainable(stretch.step, step, bound) for stretch in candidate.stretches)
    return candidate.require_step is not None and step - candidate.require_step > bound
