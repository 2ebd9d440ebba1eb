from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from offbeat.control.select import Candidate, Selection, Stretch, is_trainable, select


def ready(group: int, *steps: int | None, ordinal: int | None = None) -> Candidate:
    stretches = tuple(Stretch(3, step) for step in steps)
    return Candidate(group, group if ordinal is None else ordinal, True, stretches=stretches)


def unfinished(group: int, require_step: int | None = None) -> Candidate:
    return Candidate(group, group, False, require_step)


def test_groups_are_taken_by_ordinal_whatever_order_they_come_in():
    candidates = [ready(7, 0, ordinal=2), ready(9, 0, ordinal=0), ready(8, 0, ordinal=1)]
    assert select(candidates, step=0, count=2, bound=0).take == (9, 8)


def test_a_batch_is_whole_or_empty():
    assert select([ready(1, 0)], step=0, count=2, bound=0) == Selection()


def test_no_group_passes_an_unfinished_one_of_lower_ordinal():
    selection = select([ready(1, 0), unfinished(2), ready(3, 0)], step=0, count=2, bound=0)
    assert selection == Selection(waits_for=2)


def test_an_unfinished_group_after_the_batch_is_not_waited_for():
    selection = select([ready(1, 0), ready(2, 0), unfinished(3)], step=0, count=2, bound=0)
    assert selection.take == (1, 2)


def test_groups_meant_for_a_later_step_neither_train_nor_block():
    selection = select([unfinished(1, require_step=5), ready(2, 4)], step=4, count=1, bound=0)
    assert selection == Selection(take=(2,))


def test_a_group_with_nothing_but_old_tokens_is_stale_and_does_not_block():
    selection = select([ready(1, 1, 2), ready(2, 1, 3)], step=4, count=1, bound=1)
    assert selection == Selection(take=(2,), stale=(1,))


def test_an_unfinished_group_that_must_come_too_late_is_stale():
    assert select([unfinished(1, require_step=3)], step=4, count=1, bound=0).stale == (1,)
    assert select([unfinished(1, require_step=3)], step=4, count=1, bound=1) == Selection(waits_for=1)


def test_abandoned_and_given_tokens_alone_make_a_group_stale():
    assert select([ready(1, None, None)], step=4, count=1, bound=9).stale == (1,)


def test_tokens_of_the_future_are_not_trainable():
    assert not is_trainable(5, step=4, bound=9)


steps = st.one_of(st.none(), st.integers(0, 6))
candidate_lists = st.lists(
    st.tuples(st.booleans(), st.lists(steps, max_size=3), st.one_of(st.none(), st.integers(0, 6))), max_size=8
)


@given(candidate_lists, st.integers(0, 6), st.integers(1, 4), st.integers(0, 3))
def test_whatever_is_taken_can_be_trained_and_whatever_is_stale_cannot(rows, step, count, bound):
    candidates = [
        Candidate(i, i, is_ready, require_step, tuple(Stretch(1, s) for s in stretches))
        for i, (is_ready, stretches, require_step) in enumerate(rows)
    ]
    selection = select(candidates, step, count, bound)
    assert len(selection.take) in (0, count)
    assert list(selection.take) == sorted(selection.take)
    assert not set(selection.take) & set(selection.stale)
    for group in selection.take:
        assert candidates[group].ready
        assert any(is_trainable(s.step, step, bound) for s in candidates[group].stretches)
    for group in selection.stale:
        assert not candidates[group].ready or not any(
            is_trainable(s.step, step, bound) for s in candidates[group].stretches
        )
