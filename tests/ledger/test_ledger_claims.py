"""Claims that do not go by ordinal, or come before their version."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from ledger_run import answer, claim, data_of, handed, new_groups, score_all, version

from offbeat.ledger.errors import Refused
from offbeat.ledger.ledger import Ledger
from offbeat.ledger.records import Batch
from offbeat.trajectory import Task


def _latest(ledger: Ledger) -> int:
    latest = ledger.latest_version()
    assert latest is not None
    return latest.number


def begin(ledger: Ledger, count: int) -> list[list[Task]]:
    """So many groups of two, all of whose tasks one worker holds."""
    ledger.admit(new_groups(ledger, count, require_version=None))
    tasks = ledger.lease("w", 2 * count, _latest(ledger))
    return [tasks[i : i + 2] for i in range(0, 2 * count, 2)]


def finish(ledger: Ledger, tasks: Sequence[Task], number: int) -> None:
    ledger.submit([handed(answer(task, [number]), "w", task.fence) for task in tasks])
    score_all(ledger)


def ordinals(batch: Batch | None) -> list[int] | None:
    return None if batch is None else [group.ordinal for group in batch.groups]


def test_out_of_order_an_unfinished_group_is_passed_over_until_its_last_chance(ledger: Ledger):
    ledger.terms = replace(ledger.terms, max_staleness=1)
    slow, quick = begin(ledger, 2)
    finish(ledger, quick, 0)
    assert claim(ledger, 0, 1, 1) is None, "in order, the first one is waited for"
    assert ordinals(claim(ledger, 0, 1, 1, in_order=False)) == [1]
    ledger.commit(0, version(1, 1, 0))
    (younger,) = begin(ledger, 1)
    finish(ledger, younger, 1)
    assert claim(ledger, 1, 1, 1, in_order=False) is None, "a step later its tokens would be too old"
    finish(ledger, slow, 0)
    assert ordinals(claim(ledger, 1, 1, 1, in_order=False)) == [0]
    assert ledger.counts().dropped_groups == {}


def test_out_of_order_the_longest_begun_go_first(ledger: Ledger):
    ledger.terms = replace(ledger.terms, max_staleness=3)
    first, second = begin(ledger, 2)
    ledger.release("w")
    full_step_of(ledger, 0)
    tasks = ledger.lease("w", 4, 1)
    assert {task.group for task in tasks} == {first[0].group, second[0].group}
    (third,) = begin(ledger, 1)
    finish(ledger, [*tasks, *third], 1)
    rows = ledger.execute("SELECT ordinal, first_step FROM groups WHERE state = 'ready' ORDER BY ordinal").fetchall()
    assert rows == [(0, 0), (1, 0), (3, 1)], "begun once with version 0, whoever carried on"
    assert ordinals(claim(ledger, 1, 2, 3, in_order=False)) == [0, 1]


def full_step_of(ledger: Ledger, step: int) -> None:
    """A step of one group that was begun and ended now, whatever else lies open."""
    ledger.admit(new_groups(ledger, 1, require_version=_latest(ledger)))
    number = ledger.cursor().next_ordinal - 1
    tasks = [task for task in ledger.lease("v", 99, _latest(ledger))]
    mine = [task for task in tasks if task.require_version is not None]
    ledger.submit([handed(answer(task, [_latest(ledger)]), "v", task.fence) for task in mine])
    ledger.release("v")
    score_all(ledger)
    assert ordinals(claim(ledger, step, 1, 3, in_order=False)) == [number]
    ledger.commit(step, version(step + 1, step + 1, step))


def test_a_step_can_be_claimed_ahead_of_its_version_once_the_one_before_is_chosen(ledger: Ledger):
    ledger.terms = replace(ledger.terms, max_staleness=1)
    for tasks in begin(ledger, 3):
        finish(ledger, tasks, 0)
    with pytest.raises(Refused, match="step 1 cannot be claimed: the latest version is of step 0"):
        claim(ledger, 1, 1, 1, in_order=False)
    claim(ledger, 0, 1, 1, in_order=False)
    ahead = claim(ledger, 1, 1, 1, in_order=False)
    assert ahead is not None
    assert (ahead.step, ahead.from_version, ordinals(ahead)) == (1, None, [1])
    assert [member.staleness.tolist() for member in ahead.groups[0].members] == [
        [1] * member.trajectory.num_tokens for member in ahead.groups[0].members
    ]
    with pytest.raises(Refused, match="step 2 cannot be claimed: the latest version is of step 0"):
        claim(ledger, 2, 1, 1, in_order=False)
    with pytest.raises(Refused, match="needs a version of step 2"):
        ledger.commit(1, version(1, 2, 0))
    ledger.commit(0, version(1, 1, 0))
    same = claim(ledger, 1, 1, 1, in_order=False)
    assert same is not None
    assert (same.from_version, data_of(same)) == (1, data_of(ahead))
    ledger.commit(1, version(2, 2, 1))
    assert ledger.counts().max_staleness_trained == 1


def test_a_batch_claimed_ahead_is_free_again_after_a_resume(ledger: Ledger):
    ledger.terms = replace(ledger.terms, max_staleness=1)
    for tasks in begin(ledger, 2):
        finish(ledger, tasks, 0)
    claim(ledger, 0, 1, 1, in_order=False)
    claim(ledger, 1, 1, 1, in_order=False)
    resumed = ledger.reconcile(0, 0)
    assert (resumed.replays_batch, resumed.undone_steps) == (True, (1,))
    assert ledger.counts().groups == {"claimed": 1, "ready": 1}
    assert ordinals(claim(ledger, 1, 1, 1, in_order=False)) == [1]


def test_a_lost_commit_is_completed_also_when_the_next_step_was_claimed_ahead(ledger: Ledger):
    ledger.terms = replace(ledger.terms, max_staleness=1)
    for tasks in begin(ledger, 2):
        finish(ledger, tasks, 0)
    claim(ledger, 0, 1, 1, in_order=False)
    claim(ledger, 1, 1, 1, in_order=False)
    assert ledger.reconcile(1, 1).completed_step == 0
    assert ledger.verify().violations == ()
    ledger.publish(version(1, 1, 0))
    batch = claim(ledger, 1, 1, 1, in_order=False)
    assert batch is not None
    assert batch.from_version == 1
    ledger.commit(1, version(2, 2, 1))
