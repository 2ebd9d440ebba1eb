"""Rules for groups: which a step trains, how many may be drawn or begun, and when a group has ended.

Selection. A candidate is given as runs of tokens with the step of their version. The ledger loads the candidates and
stores the selection within one transaction. Guarantees: a run older than the bound, given by an environment, or of an
abandoned version is never trainable; a batch is whole or empty. In order, groups are taken by ordinal, never by
arrival, and none while one of a lower ordinal is unfinished. Otherwise the groups begun longest ago are taken first,
and an unfinished one is passed over until its last chance: when the later steps would have no room to train it, and all
as old, within the bound, the batch waits for it. So while groups of at most S + 1 steps are alive, and each is begun
with the newest version, none of their tokens ever passes the bound.

Admission. Work for a step is drawn once the version of that step is published: the groups that a step trains, times the
over-provision factor r, and no more than the run will train. With r = 1 the step trains all of them; with more, it
trains those that finish first, and the others continue. r is at most S + 1: then steps that take the oldest groups
first train each within S steps of its begin. `may_begin` ensures the same for workers with an older version. A dropped
group frees its place; a re-issued one keeps it.

Settlement. A failed member is left out while enough remain; a group that cannot reach that number has failed at once,
without waiting for members still under way. A group with equal rewards teaches nothing; it may be dropped for another
prompt, but only so often for a step that a policy that solves every prompt, or none, still gets its batches.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum


@dataclass(frozen=True, slots=True)
class VersionRun:
    """Tokens of one version."""

    num_tokens: int
    step: int | None
    """Step of the version; None if the tokens were given or the version is abandoned."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A living group that no batch has claimed."""

    group: int
    ordinal: int
    ready: bool
    require_step: int | None = None
    """Step whose version its tasks must be sampled from; None: any."""
    first_step: int | None = None
    """Step of the oldest version that a member was begun with; None: none is begun."""
    runs: tuple[VersionRun, ...] = ()
    """Tokens of its scored members; not used before the group is ready."""


@dataclass(frozen=True, slots=True)
class Selection:
    take: tuple[int, ...] = ()
    """Groups of the batch; empty while there are too few."""
    stale: tuple[int, ...] = ()
    """Groups without a token that may still be trained."""
    waits_for: int | None = None
    """First unfinished group that the batch waits for."""


def oldest_trainable_step(step: int, max_staleness: int) -> int:
    """Step of the oldest version whose tokens may be trained from `step`."""
    return step - max_staleness


def is_trainable(token_step: int | None, step: int, max_staleness: int) -> bool:
    """Whether tokens of a version of `token_step` may be trained from `step`; None: given, or abandoned."""
    return token_step is not None and oldest_trainable_step(step, max_staleness) <= token_step <= step


def trained_staleness(token_step: int | None, step: int, max_staleness: int) -> int | None:
    """Staleness of a token in a batch trained from `step`; None if it may not be trained."""
    return step - token_step if token_step is not None and is_trainable(token_step, step, max_staleness) else None


def select(
    candidates: Iterable[Candidate], step: int, count: int, max_staleness: int, *, in_order: bool = True
) -> Selection:
    """Picks `count` groups to train from `step`, or none while they are not all ready."""
    queue: list[Candidate] = []
    stale: list[int] = []
    for candidate in sorted(candidates, key=_by_ordinal if in_order else _by_age):
        if candidate.require_step is not None and candidate.require_step > step:
            continue  # re-issued for a later step
        if _is_stale(candidate, step, max_staleness):
            stale.append(candidate.group)
        else:
            queue.append(candidate)
    first_ones = itertools.takewhile(_is_ready, queue) if in_order else filter(_is_ready, queue)
    take = list(itertools.islice(first_ones, count))
    if len(take) < count:
        waits_for = next((candidate.group for candidate in queue if not candidate.ready), None)
    else:
        waits_for = None if in_order else _last_chance(queue, take, oldest_trainable_step(step, max_staleness))
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


def _last_chance(queue: Sequence[Candidate], take: Sequence[Candidate], oldest: int) -> int | None:
    """Oldest group that must not be passed over for younger ones; `queue` and `take` are sorted by age, and `oldest` is
    the oldest trainable step.

    Unfinished groups whose oldest tokens reach the bound within n more steps must fit into those n steps. Groups
    already past the bound have nothing to lose; if nothing younger is taken, waiting gains nothing."""
    passed_over = [
        candidate for candidate in queue if not candidate.ready and oldest <= _begun(candidate) < _begun(take[-1])
    ]
    for num_older, candidate in enumerate(passed_over):
        more_steps = _begun(candidate) - oldest
        if num_older >= more_steps * len(take):
            return passed_over[0].group
    return None


def _is_stale(candidate: Candidate, step: int, max_staleness: int) -> bool:
    if candidate.ready:
        return not any(is_trainable(run.step, step, max_staleness) for run in candidate.runs)
    required = candidate.require_step  # not above `step` here
    return required is not None and not is_trainable(required, step, max_staleness)


@dataclass(frozen=True, slots=True)
class AdmissionState:
    """Progress of a run."""

    step: int | None
    """Step of the latest living version, which is trained from next; None before the first version."""
    num_alive: int
    """Groups open, ready or claimed that this step may train."""


@dataclass(frozen=True, slots=True)
class AdmissionTarget:
    """Groups that a run wants."""

    groups_per_step: int
    num_steps: int | None = None
    """Steps of the whole run; None: no end."""
    over_provision: float = 1.0
    """Groups in flight over groups that a step trains: from 1 to max_staleness + 1."""


def admit(state: AdmissionState, target: AdmissionTarget) -> int:
    """Number of groups to draw now."""
    if state.step is None:
        return 0
    steps = target.over_provision
    if target.num_steps is not None:
        steps = min(steps, target.num_steps - state.step)
    wanted = math.ceil(round(steps * target.groups_per_step, 6))  # 1.1 * 110 is a hair more than 121
    return max(0, wanted - state.num_alive)


def may_begin(step: int, begun: Mapping[int, int], next_step: int, groups_per_step: int, max_staleness: int) -> int:
    """Number of groups that may be begun now with a version of `step`, so that they and all others are trained in time.

    `begun` counts the groups that no batch has claimed, by the step of the oldest version that they were begun with;
    `next_step` is the first step without a batch. Steps take the oldest first: groups begun with versions up to any
    step must fit into the batches up to `max_staleness` steps later."""
    rooms = []
    for last in sorted({step, *(other for other in begun if other > step)}):
        num_batches = last + max_staleness - next_step + 1
        rooms.append(num_batches * groups_per_step - sum(num for first, num in begun.items() if first <= last))
    return max(0, min(rooms))


MAX_RETRIES = 1
"""A prompt whose group failed is tried once more: a second failure is the prompt's own."""
EQUAL_WITHIN = 1e-8
"""Rewards closer than this count as equal."""


class GroupVerdict(StrEnum):
    OPEN = "open"
    """Members are still under way."""
    READY = "ready"
    """Every member ended and enough were scored."""
    FAILED = "failed"
    """Too few members can still be scored."""
    NO_SIGNAL = "no_signal"
    """It would be ready, but nothing can be learnt from it, and another may take its place."""


def settle(size: int, num_scored: int, num_failed: int, min_group: int) -> GroupVerdict:
    """Verdict on a group; a group smaller than `min_group` needs all of its members."""
    if size - num_failed < min(min_group, size):
        return GroupVerdict.FAILED
    return GroupVerdict.READY if num_scored + num_failed == size else GroupVerdict.OPEN


def settle_ready(spread: float, num_before: int, max_no_signal: float) -> GroupVerdict:
    """Verdict on a ready group whose highest and lowest rewards lie `spread` apart.

    `num_before` measures the progress of its step. If steps take groups by ordinal, it counts the groups of lower
    ordinals drawn for the step, so that the verdict does not depend on arrival; otherwise, the groups dropped since the
    last batch was chosen.
    """
    return GroupVerdict.NO_SIGNAL if spread <= EQUAL_WITHIN and num_before < max_no_signal else GroupVerdict.READY
