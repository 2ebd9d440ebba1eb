from __future__ import annotations

import random
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from offbeat.rules.groups import (
    AdmissionState,
    AdmissionTarget,
    Candidate,
    Selection,
    VersionRun,
    admit,
    is_trainable,
    may_begin,
    select,
)


def ready(group: int, *steps: int | None, ordinal: int | None = None, begun: int | None = None) -> Candidate:
    stretches = tuple(VersionRun(3, step) for step in steps)
    return Candidate(group, group if ordinal is None else ordinal, True, first_step=begun, runs=stretches)


def unfinished(group: int, require_step: int | None = None, begun: int | None = None) -> Candidate:
    return Candidate(group, group, False, require_step, first_step=begun)


def test_groups_are_taken_by_ordinal_whatever_order_they_come_in():
    candidates = [ready(7, 0, ordinal=2), ready(9, 0, ordinal=0), ready(8, 0, ordinal=1)]
    assert select(candidates, step=0, count=2, max_staleness=0).take == (9, 8)


def test_a_batch_is_whole_or_empty():
    assert select([ready(1, 0)], step=0, count=2, max_staleness=0) == Selection()


def test_no_group_passes_an_unfinished_one_of_lower_ordinal():
    selection = select([ready(1, 0), unfinished(2), ready(3, 0)], step=0, count=2, max_staleness=0)
    assert selection == Selection(waits_for=2)


def test_an_unfinished_group_after_the_batch_is_not_waited_for():
    selection = select([ready(1, 0), ready(2, 0), unfinished(3)], step=0, count=2, max_staleness=0)
    assert selection == Selection(take=(1, 2))


def test_groups_meant_for_a_later_step_neither_train_nor_block():
    selection = select([unfinished(1, require_step=5), ready(2, 4)], step=4, count=1, max_staleness=0)
    assert selection == Selection(take=(2,))


def test_a_group_with_nothing_but_old_tokens_is_stale_and_does_not_block():
    selection = select([ready(1, 1, 2), ready(2, 1, 3)], step=4, count=1, max_staleness=1)
    assert selection == Selection(take=(2,), stale=(1,))


def test_an_unfinished_group_that_must_come_too_late_is_stale():
    assert select([unfinished(1, require_step=3)], step=4, count=1, max_staleness=0).stale == (1,)
    assert select([unfinished(1, require_step=3)], step=4, count=1, max_staleness=1) == Selection(waits_for=1)


def test_abandoned_and_given_tokens_alone_make_a_group_stale():
    assert select([ready(1, None, None)], step=4, count=1, max_staleness=9).stale == (1,)


def test_tokens_of_the_future_are_not_trainable():
    assert not is_trainable(5, step=4, max_staleness=9)


steps = st.one_of(st.none(), st.integers(0, 6))
candidate_lists = st.lists(
    st.tuples(st.booleans(), st.lists(steps, max_size=3), st.one_of(st.none(), st.integers(0, 6))), max_size=8
)


@given(candidate_lists, st.integers(0, 6), st.integers(1, 4), st.integers(0, 3))
def test_whatever_is_taken_can_be_trained_and_whatever_is_stale_cannot(rows, step, count, bound):
    candidates = [
        Candidate(i, i, is_ready, require_step, runs=tuple(VersionRun(1, s) for s in stretches))
        for i, (is_ready, stretches, require_step) in enumerate(rows)
    ]
    selection = select(candidates, step, count, bound)
    assert len(selection.take) in (0, count)
    assert list(selection.take) == sorted(selection.take)
    assert not set(selection.take) & set(selection.stale)
    for group in selection.take:
        assert candidates[group].ready
        assert any(is_trainable(s.step, step, bound) for s in candidates[group].runs)
    for group in selection.stale:
        assert not candidates[group].ready or not any(is_trainable(s.step, step, bound) for s in candidates[group].runs)


# Out of order: what is unfinished is passed over, but never past its bound.


def test_out_of_order_the_longest_begun_are_taken_first():
    candidates = [ready(1, 4, begun=4), ready(2, 3, begun=3), unfinished(3), ready(4, 3, begun=3)]
    assert select(candidates, step=4, count=2, max_staleness=2, in_order=False).take == (2, 4)


def test_out_of_order_an_unfinished_group_is_passed_over_while_there_is_time():
    candidates = [unfinished(1, begun=3), ready(2, 4, begun=4)]
    assert select(candidates, step=4, count=1, max_staleness=2, in_order=False) == Selection(take=(2,))


def test_out_of_order_the_batch_waits_at_the_last_chance():
    candidates = [unfinished(1, begun=2), ready(2, 4, begun=4)]
    assert select(candidates, step=4, count=1, max_staleness=2, in_order=False) == Selection(waits_for=1)


def test_the_last_chance_of_two_is_a_step_earlier_where_a_step_takes_one():
    candidates = [unfinished(1, begun=3), unfinished(2, begun=3), ready(3, 4, begun=4)]
    assert select(candidates, step=4, count=1, max_staleness=2, in_order=False) == Selection(waits_for=1)
    two_a_step = [*candidates, ready(4, 4, begun=4)]
    assert select(two_a_step, step=4, count=2, max_staleness=2, in_order=False).take == (3, 4)


def test_a_group_that_nobody_began_is_never_waited_for():
    candidates = [unfinished(1), ready(2, 4, begun=4)]
    assert select(candidates, step=4, count=1, max_staleness=0, in_order=False).take == (2,)


def test_what_is_past_its_bound_is_not_waited_for():
    candidates = [unfinished(1, begun=1), ready(2, 4, begun=4)]
    assert select(candidates, step=4, count=1, max_staleness=2, in_order=False).take == (2,)


def test_nobody_waits_where_waiting_wins_nothing():
    """Both are at their last chance and a step takes one: the other is too late whether it is waited for or not."""
    candidates = [unfinished(1, begun=2), ready(2, 2, begun=2)]
    assert select(candidates, step=4, count=1, max_staleness=2, in_order=False).take == (2,)


@given(
    bound=st.integers(0, 3),
    groups_per_step=st.integers(1, 3),
    share=st.floats(0, 1),
    stops=st.booleans(),
    claims_ahead=st.booleans(),
    lags=st.booleans(),
    rng=st.integers(0, 2**32).map(random.Random),
)
def test_with_pacing_no_token_ever_passes_the_bound(bound, groups_per_step, share, stops, claims_ahead, lags, rng):
    """A whole run: groups finish in any order, each is begun with the newest version, or with an older one as far as
    pacing allows. Work overlaps with training, or stops while a batch is trained and is carried on after."""
    pace = AdmissionTarget(groups_per_step, over_provision=1 + share * bound)
    claims_ahead = claims_ahead and not stops
    begun: dict[int, int | None] = {}
    done: set[int] = set()
    claimed: dict[int, tuple[int, ...]] = {}
    trained: set[int] = set()
    newest, num_drawn, num_waits = 0, 0, 0
    while newest < 12:
        alive = len(begun)
        for _ in range(admit(AdmissionState(newest, alive), pace)):
            begun[num_drawn] = None
            num_drawn += 1
        works = not (stops and newest in claimed)
        for group in [g for g, step in begun.items() if works and step is None and rng.random() < 0.7]:
            have = newest - rng.randint(0, 3) if lags else newest
            is_in_time = not lags or may_begin_with(have, begun, claimed, newest, groups_per_step, bound)
            begun[group] = have if is_in_time else None
        may_end = [g for g, step in begun.items() if works and step is not None and g not in done]
        done |= {g for g in may_end if rng.random() < 0.3}
        step = newest + 1 if claims_ahead and newest in claimed else newest
        if step not in claimed:
            taken = {g for groups in claimed.values() for g in groups}
            candidates = [
                Candidate(g, g, g in done, first_step=at, runs=(VersionRun(1, at),) if g in done else ())
                for g, at in begun.items()
                if g not in taken
            ]
            selection = select(candidates, step, groups_per_step, bound, in_order=False)
            assert selection.stale == (), "a group passed its bound"
            check_wait(candidates, selection, step, groups_per_step, bound)
            num_waits += selection.waits_for is not None
            if selection.take:
                assert trained.isdisjoint(selection.take), "two batches share a group"
                trained |= set(selection.take)
                assert all(step - begun[g] <= bound for g in selection.take)
                claimed[step] = selection.take
        if newest in claimed and rng.random() < 0.5:
            for g in claimed.pop(newest):
                del begun[g]
            newest += 1


def may_begin_with(step, begun, claimed, newest, groups_per_step, bound):
    taken = {g for groups in claimed.values() for g in groups}
    num_begun = Counter(at for g, at in begun.items() if at is not None and g not in taken)
    next_step = max([newest, *(step + 1 for step in claimed)])
    return may_begin(step, num_begun, next_step, groups_per_step, bound) > 0


def check_wait(candidates, selection, step, count, bound):
    """A batch that could be whole waits exactly where going on would make some group too old: by counting, for every
    step to come, who must be trained by then."""
    by_age = sorted((c for c in candidates if c.ready), key=lambda c: (c.first_step, c.group))
    if len(by_age) < count:
        return
    taken = {c.group for c in by_age[:count]}
    left = [c.first_step + bound for c in candidates if c.group not in taken and c.first_step is not None]
    too_late = any(
        sum(deadline <= at for deadline in left) > (at - step) * count for at in range(step, step + bound + 1)
    )
    assert (selection.waits_for is not None) == too_late
