"""Beginnings handed back: kept, carried on by whoever comes next, and accounted for to the last token."""

from __future__ import annotations

from dataclasses import replace

import pytest
from ledger_run import answer, claim, full_step, handed, new_groups, score_all, send, version, work

from offbeat.ledger.errors import Conflict, Fenced, Refused
from offbeat.ledger.ledger import Ledger
from offbeat.ledger.records import Outcome
from offbeat.trajectory import End, Task, Trajectory


@pytest.fixture
def overlapping(ledger: Ledger) -> Ledger:
    ledger.terms = replace(ledger.terms, max_staleness=2)
    return ledger


def begin(ledger: Ledger, *, size: int = 2, require_version: int | None = None) -> Task:
    ledger.admit(new_groups(ledger, 1, size=size, require_version=require_version))
    latest = ledger.latest_version()
    assert latest is not None
    return ledger.lease("w", 1, latest.number)[0]


def hand_back(ledger: Ledger, task: Task, *versions: int, worker: str = "w") -> Trajectory:
    partial = answer(task, versions, worker=worker, end=None)
    assert send(ledger, partial, worker, task.fence) is Outcome.PARTIAL
    return partial


def test_a_partial_opens_its_task_and_goes_with_the_next_lease(overlapping: Ledger):
    task = begin(overlapping)
    partial = hand_back(overlapping, task, 0)
    assert overlapping.report().tasks == {"open": 2}
    assert overlapping.counts().tokens.partial == partial.num_tokens
    again = overlapping.lease("v", 1, 0)[0]
    assert (again.id, again.fence, again.prefix) == (task.id, 2, partial)
    whole = answer(again, [0], worker="v")
    assert whole.segments[: len(partial.segments)] == partial.segments
    assert send(overlapping, whole, "v", 2) is Outcome.STORED
    counts = overlapping.counts().tokens
    assert (counts.partial, counts.waiting, counts.generated) == (0, whole.num_tokens, whole.num_tokens)


def test_a_partial_again_changes_nothing_and_another_one_is_a_conflict(overlapping: Ledger):
    task = begin(overlapping)
    partial = hand_back(overlapping, task, 0)
    assert send(overlapping, partial) is Outcome.REPEATED
    with pytest.raises(Conflict, match="a different trajectory is already stored for lease 1"):
        send(overlapping, answer(task, [0], salt="other", end=None))
    with pytest.raises(Conflict, match="stored for lease 1"):
        send(overlapping, answer(task, [0]))
    overlapping.lease("v", 1, 0)
    assert send(overlapping, partial) is Outcome.REPEATED, "also when somebody carries it on"


def test_a_partial_and_its_end_in_one_call_are_a_conflict(overlapping: Ledger):
    task = begin(overlapping)
    kept, conflict = overlapping.submit([handed(answer(task, [0], end=None)), handed(answer(task, [0]))])
    assert kept is Outcome.PARTIAL
    assert isinstance(conflict, Conflict)


def test_whatever_follows_a_partial_must_begin_with_it(overlapping: Ledger):
    task = begin(overlapping)
    hand_back(overlapping, task, 0)
    again = overlapping.lease("w", 1, 0)[0]
    for end in (None, End.STOP):
        elsewhere = answer(replace(again, prefix=None), [0, 0], salt="elsewhere", end=end)
        with pytest.raises(Refused, match="does not begin with the partial trajectory that is stored"):
            send(overlapping, elsewhere, fence=2)
    assert send(overlapping, answer(again, [0]), fence=2) is Outcome.STORED


def test_a_partial_may_be_carried_on_many_times_and_its_tokens_count_once(overlapping: Ledger):
    task = begin(overlapping)
    for _ in range(3):
        partial = hand_back(overlapping, task, 0)
        assert overlapping.counts().tokens.generated == partial.num_tokens
        task = overlapping.lease("w", 1, 0)[0]
    assert task.fence == 4
    send(overlapping, answer(task, [0]), fence=4)
    work(overlapping, 0)
    score_all(overlapping)
    assert claim(overlapping, 0, 1, 2) is not None


def test_a_worker_with_an_older_version_cannot_carry_on(overlapping: Ledger):
    full_step(overlapping, 0)
    overlapping.admit(new_groups(overlapping, 1, require_version=None))
    task = overlapping.lease("w", 1, 0)[0]
    hand_back(overlapping, task, 0, 1)
    assert [given.id for given in overlapping.lease("behind", 9, 0)] == [task.id + 1], "versions only rise"
    assert [given.id for given in overlapping.lease("w", 9, 1)] == [task.id]


def test_a_partial_of_a_required_version_stays_within_it(ledger: Ledger):
    task = begin(ledger, require_version=0)
    hand_back(ledger, task, 0)
    ledger.reconcile(0, 0)
    ledger.publish(version(1, 0, 0))
    again = ledger.lease("v", 1, 1)[0]
    assert send(ledger, answer(again, [1]), "v", 2) is Outcome.STORED, "the same weights under a new number"


def test_a_partial_without_a_sampled_token_is_refused(overlapping: Ledger):
    task = begin(overlapping)
    with pytest.raises(Refused, match="no sampled token"):
        send(overlapping, answer(task, [], end=None))


def test_a_partial_for_a_task_that_has_ended_is_discarded(overlapping: Ledger):
    task = begin(overlapping, size=1)
    for fence in (1, 2):
        overlapping.fail("w", task.id, fence, "engine")
        overlapping.lease("w", 1, 0)
    with pytest.raises(Fenced, match=r"has ended \(failed\), so its partial"):
        send(overlapping, answer(task, [0], end=None), fence=2)


def test_a_failure_keeps_the_beginning_until_the_task_ends(overlapping: Ledger):
    task = begin(overlapping, size=3)
    partial = hand_back(overlapping, task, 0)
    overlapping.lease("w", 1, 0)
    overlapping.fail("w", task.id, 2, "engine")
    assert overlapping.lease("w", 1, 0)[0].prefix == partial
    overlapping.fail("w", task.id, 3, "engine")
    counts = overlapping.counts().tokens
    assert (counts.partial, counts.wasted) == (0, {"engine": partial.num_tokens})


def test_a_dropped_group_wastes_its_partials(overlapping: Ledger):
    task = begin(overlapping)
    partial = hand_back(overlapping, task, 0)
    (other,) = [given for given in overlapping.lease("w", 2, 0) if given.id != task.id]
    for fence in (1, 2):
        overlapping.fail("w", other.id, fence, "engine")
        overlapping.lease("w", 1, 0)
    assert overlapping.counts().dropped_groups == {"failed": 1}
    assert overlapping.counts().tokens.wasted == {"failed": partial.num_tokens}


def test_what_a_wasted_partial_became_after_all_is_counted_once(overlapping: Ledger):
    task = begin(overlapping)
    partial = hand_back(overlapping, task, 0)
    carried, other = overlapping.lease("w", 2, 0)
    overlapping.fail("w", other.id, 1, "engine")
    assert overlapping.lease("w", 1, 0)[0].id == other.id
    overlapping.fail("w", other.id, 2, "engine")
    assert overlapping.counts().tokens.wasted == {"failed": partial.num_tokens}
    late = answer(carried, [0])
    assert send(overlapping, late, fence=2) is Outcome.LATE
    counts = overlapping.counts().tokens
    assert (counts.wasted, counts.generated) == ({"failed": late.num_tokens}, late.num_tokens)


def test_a_resume_wastes_beginnings_in_abandoned_versions_but_not_what_they_became(overlapping: Ledger):
    full_step(overlapping, 0)
    tasks = [begin(overlapping), overlapping.lease("w", 1, 1)[0]]
    for task in tasks:
        hand_back(overlapping, task, 1)
    carried = overlapping.lease("w", 1, 1)[0]
    overlapping.reconcile(0, 0)
    assert overlapping.counts().tokens.partial == 0
    before = overlapping.counts().tokens.waiting
    overlapping.publish(version(2, 0, 0))
    fresh = overlapping.lease("v", 1, 2)[0]
    assert (fresh.id, fresh.prefix) == (tasks[1].id, None)
    whole = answer(carried, [2])
    assert send(overlapping, whole, fence=2) is Outcome.STORED, "its new tokens may be trained"
    counts = overlapping.counts().tokens
    assert counts.waiting == before + whole.num_tokens
    assert counts.wasted.keys() == {"abandoned"}
    kept = overlapping.execute("SELECT task, state FROM partials ORDER BY task").fetchall()
    assert kept == [(tasks[0].id, "continued"), (tasks[1].id, "wasted")]


def handed_in(ledger: Ledger, task: int) -> list[tuple[int, str]]:
    return ledger.execute("SELECT start, worker FROM segments WHERE task = ? ORDER BY start", (task,)).fetchall()


def test_each_segment_is_remembered_with_the_worker_that_handed_it_in_first(overlapping: Ledger):
    """Whatever a segment says of its own worker: that is only what somebody says."""
    task = begin(overlapping)
    first = hand_back(overlapping, task, 0)
    again = overlapping.lease("v", 1, 0)[0]
    second = hand_back(overlapping, again, 0, worker="v")
    last = overlapping.lease("w", 1, 0)[0]
    whole = answer(last, [0], worker="forged")
    assert send(overlapping, whole, "w", last.fence) is Outcome.STORED
    assert handed_in(overlapping, task.id) == [(0, "w"), (first.num_tokens, "v"), (second.num_tokens, "w")]


def test_a_beginning_that_was_given_up_leaves_nobody_to_blame(overlapping: Ledger):
    full_step(overlapping, 0)
    task = begin(overlapping)
    hand_back(overlapping, task, 1)
    overlapping.reconcile(0, 0)  # which abandons version 1, and what was begun with it
    overlapping.publish(version(2, 0, 0))
    again = next(task for task in overlapping.lease("v", 9, 2) if task.prefix is None)
    assert send(overlapping, answer(again, [2], worker="v"), "v", again.fence) is Outcome.STORED
    assert handed_in(overlapping, again.id) == [(0, "v")]


def test_a_beginning_that_was_carried_on_after_all_stays_its_own(overlapping: Ledger):
    task = begin(overlapping, size=2)
    begun = hand_back(overlapping, task, 0)
    for _ in range(2):
        again = overlapping.lease("v", 1, 0)[0]
        overlapping.fail("v", task.id, again.fence, "engine")
    assert overlapping.report().tasks["failed"] == 1, "its beginning is given up"
    whole = answer(again, [0], worker="v")
    assert send(overlapping, whole, "v", again.fence) is Outcome.LATE
    assert handed_in(overlapping, task.id) == [(0, "w"), (begun.num_tokens, "v")]
