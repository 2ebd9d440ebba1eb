"""Rules for groups: which ones a step trains, how many may be drawn or begun, and when a group has ended.

Selection. S is the bound on staleness, `max_staleness`. Tokens are never trained if they are staler than S, were given
by an environment, or belong to an abandoned version. A batch has `groups_per_step` groups, or none while the step must
wait. With `in_order`, no group is taken while one that was drawn earlier is unfinished. Otherwise an unfinished group
is passed over as long as later steps can still train it in time. So if at most (S + 1) × `groups_per_step` groups are
alive (open, ready or claimed), and each is begun with the newest version, none of their tokens becomes staler than S.

Admission. When the version of a step is published, groups are drawn until r × `groups_per_step` are alive, where r is
the over-provision factor. No more are drawn than the run will train. With r above 1 the step trains the groups that
finish first, and the others continue. With r at most S + 1, every group is trained within S steps of its beginning if
steps take the oldest groups first; `may_begin` ensures the same for workers with an older version. When a group is
dropped, another may be drawn, unless the dropped group's prompt is issued again.

Settlement. A failed member is left out while enough members remain; a group fails as soon as too few members can still
be scored. A group with equal rewards teaches nothing and may be dropped for another prompt. The number of such drops
per step is limited, so that a policy that solves all prompts, or none, still gets its batches.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from operator import attrgetter


@dataclass(frozen=True, slots=True)
class VersionRun:
    """Number of a group's tokens that belong to one version."""

    num_tokens: int
    step: int | None
    """Step of the version; None if the tokens were not sampled, or the version is abandoned."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """An open or ready group, which no batch has claimed yet."""

    group: int
    ordinal: int
    """Number of the group in the order of drawing."""
    ready: bool
    require_step: int | None = None
    """Step from whose version the group must be sampled; None: any step."""
    first_step: int | None = None
    """Step of the oldest version with which a member of the group was begun; None: no member was begun."""
    runs: tuple[VersionRun, ...] = ()
    """Numbers of tokens of the group's scored members, by version; not used before the group is ready."""


@dataclass(frozen=True, slots=True)
class Selection:
    """Result of `select` for one step: the groups to train, the groups to drop, and the group to wait for."""

    take: tuple[int, ...] = ()
    """Groups of the batch; empty while the batch must wait."""
    stale: tuple[int, ...] = ()
    """Groups to drop, because none of their tokens may be trained on any more."""
    waits_for: int | None = None
    """First unfinished group for which the batch waits; None: it waits for none."""


def oldest_trainable_step(step: int, max_staleness: int) -> int:
    """Returns the step of the oldest version whose tokens may still be trained on at `step`."""
    return step - max_staleness


def is_trainable(token_step: int | None, step: int, max_staleness: int) -> bool:
    """Whether tokens of the version of `token_step` may still be trained on at `step`. `token_step` is None, and the
    result False, for tokens that were not sampled or whose version is abandoned."""
    return token_step is not None and oldest_trainable_step(step, max_staleness) <= token_step <= step


def trained_staleness(token_step: int | None, step: int, max_staleness: int) -> int | None:
    """Returns the staleness at `step` of tokens of the version of `token_step`: `step` - `token_step`. Returns None if
    they may not be trained on."""
    return step - token_step if token_step is not None and is_trainable(token_step, step, max_staleness) else None


def select(
    candidates: Iterable[Candidate], step: int, count: int, max_staleness: int, *, in_order: bool = True
) -> Selection:
    """Selects `count` groups to train on at `step`: those drawn first if `in_order`, else those begun with the oldest
    versions. Takes none while too few groups are ready, or while the batch must wait for an unfinished group. Also
    names the groups to drop as stale."""
    queue: list[Candidate] = []
    stale: list[int] = []
    for candidate in sorted(candidates, key=attrgetter("ordinal", "group") if in_order else _by_age):
        if candidate.require_step is not None and candidate.require_step > step:
            continue  # re-issued for a later step
        if _is_stale(candidate, step, max_staleness):
            stale.append(candidate.group)
        else:
            queue.append(candidate)
    first_ones = (itertools.takewhile if in_order else filter)(attrgetter("ready"), queue)
    take = list(itertools.islice(first_ones, count))
    if len(take) < count:
        waits_for = next((candidate.group for candidate in queue if not candidate.ready), None)
    else:
        waits_for = None if in_order else _last_chance(queue, take, oldest_trainable_step(step, max_staleness))
    is_whole = len(take) == count and waits_for is None
    return Selection(tuple(candidate.group for candidate in take) if is_whole else (), tuple(stale), waits_for)


def select_batch(
    load: Callable[[], Iterable[Candidate]],
    drop: Callable[[Sequence[int]], None],
    step: int,
    count: int,
    max_staleness: int,
    *,
    in_order: bool = True,
) -> tuple[Selection, list[int]]:
    """Selects the batch of `step` with `select`, and again after groups were dropped as stale, because `load` may then
    return others. Returns the last selection and all dropped groups, which are to be issued again."""
    stale: list[int] = []
    while True:
        selection = select(load(), step, count, max_staleness, in_order=in_order)
        drop(selection.stale)
        stale += selection.stale
        if selection.take or not selection.stale:
            return selection, stale


def unclaimed_step(newest: int | None, claimed: int | None) -> int:
    """Returns the first step without a batch. `newest` is the step of the newest version, and `claimed` the step after
    the last batch; None: there is none."""
    return max(newest or 0, claimed or 0)


def _by_age(candidate: Candidate) -> tuple[float, int, int]:
    return _begun(candidate), candidate.ordinal, candidate.group


def _begun(candidate: Candidate) -> float:
    return math.inf if candidate.first_step is None else candidate.first_step


def _last_chance(queue: Sequence[Candidate], take: Sequence[Candidate], oldest: int) -> int | None:
    """Returns the oldest unfinished group if the batch must wait for it, else None. `queue` holds the candidates that
    are not stale and `take` those for the batch, both sorted by age; `oldest` is the oldest trainable step.

    The batch waits if, for some n, the unfinished groups that must be trained within the n steps after this one do not
    fit into the batches of these n steps. An unfinished group is no reason to wait if it is already too old, or if no
    group in `take` is younger than it."""
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
    required = candidate.require_step  # `select` has skipped steps after `step`
    return required is not None and not is_trainable(required, step, max_staleness)


@dataclass(frozen=True, slots=True)
class AdmissionState:
    """Progress of a run, from which `admit` decides."""

    step: int | None
    """Step to train next: that of the newest version that is not abandoned; None before the first version."""
    num_alive: int
    """Number of open, ready or claimed groups that the next training step may use."""


@dataclass(frozen=True, slots=True)
class AdmissionTarget:
    """Number of groups that a run needs, per step and in total."""

    groups_per_step: int
    num_steps: int | None = None
    """Steps of the whole run; None: unlimited."""
    over_provision: float = 1.0
    """Ratio of groups in flight to groups that a step trains, from 1 to max_staleness + 1."""


def admit(state: AdmissionState, target: AdmissionTarget) -> int:
    """Returns how many new groups a run in `state` must draw now to have as many as `target` asks for."""
    if state.step is None:
        return 0
    steps = target.over_provision
    if target.num_steps is not None:
        steps = min(steps, target.num_steps - state.step)
    wanted = math.ceil(round(steps * target.groups_per_step, 6))  # 1.1 * 110 is slightly more than 121
    return max(0, wanted - state.num_alive)


def may_begin(step: int, begun: Mapping[int, int], next_step: int, groups_per_step: int, max_staleness: int) -> int:
    """Returns how many groups may be begun now with the version of `step`, so that no group becomes too stale to train.

    `begun` counts the groups that are begun but in no batch yet, by the step of the oldest version they were begun
    with. `next_step` is the first step without a batch. Batches take the oldest groups first. So for every step s, the
    groups begun with versions up to s must fit into the batches up to step s + `max_staleness`."""
    rooms = []
    for last in sorted({step, *(other for other in begun if other > step)}):
        num_batches = last + max_staleness - next_step + 1
        rooms.append(num_batches * groups_per_step - sum(num for first, num in begun.items() if first <= last))
    return max(0, min(rooms))


MAX_RETRIES = 1
"""How often a prompt is issued again after its group failed. If it still fails, the prompt itself is assumed to be the
cause."""


def may_retry(num_retries: int) -> bool:
    """Whether the prompt of a group that failed is issued again, after `num_retries` retries."""
    return num_retries < MAX_RETRIES


EQUAL_WITHIN = 1e-8
"""Rewards closer than this count as equal."""


class GroupVerdict(StrEnum):
    OPEN = "open"
    """Not all members have ended."""
    READY = "ready"
    """Every member has ended, and enough of them have a reward."""
    FAILED = "failed"
    """Too few members can still be scored."""
    NO_SIGNAL = "no_signal"
    """Ready, but to be dropped in favour of another prompt, because its equal rewards teach nothing."""


def settle(size: int, num_scored: int, num_failed: int, min_group: int) -> GroupVerdict:
    """Returns whether a group is open, ready or failed, if `num_scored` of its `size` members have a reward and
    `num_failed` have failed. A ready group has at least `min_group` scored members, or `size` if `size` is less."""
    if size - num_failed < min(min_group, size):
        return GroupVerdict.FAILED
    return GroupVerdict.READY if num_scored + num_failed == size else GroupVerdict.OPEN


def settle_ready(spread: float, num_before: int, max_no_signal: float) -> GroupVerdict:
    """Returns `READY` if a ready group may be trained on, `NO_SIGNAL` if it is dropped because its rewards are equal.

    `spread` is the group's highest reward minus its lowest. A group with equal rewards is dropped only if `num_before`
    is below `max_no_signal`. If the group may be sampled from any version, `num_before` is the number of groups that
    were dropped for equal rewards since the last batch was claimed. If it must be sampled from the version of one step
    (`Candidate.require_step`), `num_before` is the number of prompts that were drawn for this step before its own, so
    that the result does not depend on which group is ready first."""
    return GroupVerdict.NO_SIGNAL if spread <= EQUAL_WITHIN and num_before < max_no_signal else GroupVerdict.READY
