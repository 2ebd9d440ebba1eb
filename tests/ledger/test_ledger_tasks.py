from __future__ import annotations

import pytest
from ledger_run import answer, eval_groups, new_groups, score_all, version, work

from offbeat.ledger.errors import Refused, Unknown
from offbeat.ledger.ledger import Ledger
from offbeat.ledger.records import Outcome, TaskState


def test_tasks_go_out_by_ordinal_and_member_and_only_once(ledger: Ledger):
    first, second = ledger.admit(new_groups(ledger, 2, size=3))
    assert [task.group for task in ledger.lease("a", 4, 0)] == [first, first, first, second]
    assert [task.group for task in ledger.lease("b", 9, 0)] == [second, second]
    assert ledger.lease("c", 9, 0) == []


def test_evaluation_goes_first_and_a_started_group_before_a_fresh_one(ledger: Ledger):
    (started,) = ledger.admit(new_groups(ledger, 1, size=2))
    ledger.lease("a", 1, 0)
    (fresh,) = ledger.admit(new_groups(ledger, 1, size=2))
    (judged,) = ledger.admit(eval_groups(1, size=1))
    assert [task.group for task in ledger.lease("b", 9, 0)] == [judged, started, fresh, fresh]


def test_a_worker_without_the_version_gets_no_task_but_learns_which_to_take(ledger: Ledger):
    ledger.admit(new_groups(ledger, 1))
    assert ledger.lease("w", 9, None) == []
    assert ledger.lease("w", 9, 5) == []
    assert ledger.wanted_version() == 0
    assert ledger.version(0) == version(0, 0)


def test_nothing_is_wanted_when_nothing_is_open(ledger: Ledger):
    assert ledger.wanted_version() is None


def test_a_task_without_a_required_version_goes_to_any_worker(ledger: Ledger):
    ledger.admit(new_groups(ledger, 1, size=2, require_version=None))
    assert ledger.wanted_version() is None
    assert len(ledger.lease("w", 9, 7)) == 2


def test_a_restart_opens_all_leased_tasks_and_costs_no_attempt(ledger: Ledger):
    ledger.admit(new_groups(ledger, 1, size=2))
    for _ in range(10):
        assert len(ledger.lease("w", 9, 0)) == 2
        assert ledger.release() == 2
    assert len(work(ledger, 0)) == 2


def test_a_lost_worker_gives_its_tasks_back_until_their_attempts_are_used_up(ledger: Ledger):
    (group,) = ledger.admit(new_groups(ledger, 1, size=3))
    ledger.lease("other", 1, 0)
    ledger.lease("lost", 1, 0)
    assert ledger.release("lost") == 1
    assert len(ledger.lease("lost", 1, 0)) == 1
    assert ledger.release("lost") == 1
    assert ledger.counts().failed_tasks == {"lost": 1}
    assert [task.group for task in ledger.lease("w", 9, 0)] == [group]


def test_a_failed_attempt_opens_the_task_again_and_the_last_one_ends_it(ledger: Ledger):
    ledger.admit(new_groups(ledger, 1, size=3))
    task = ledger.lease("w", 1, 0)[0].id
    assert ledger.fail(task, "engine", "out of memory") is TaskState.OPEN
    assert ledger.lease("w", 1, 0)[0].id == task
    assert ledger.fail(task, "engine", "out of memory") is TaskState.FAILED
    assert ledger.fail(task, "engine", "told twice") is TaskState.FAILED
    assert ledger.counts().failed_tasks == {"engine": 1}


def test_a_hopeless_task_fails_at_once(ledger: Ledger):
    ledger.admit(new_groups(ledger, 1, size=3))
    task = ledger.lease("w", 1, 0)[0].id
    assert ledger.fail(task, "too long", is_final=True) is TaskState.FAILED


def test_only_what_was_issued_and_is_not_answered_can_fail(ledger: Ledger):
    with pytest.raises(Unknown, match="task 77: never issued"):
        ledger.fail(77, "engine")
    ledger.admit(new_groups(ledger, 1))
    (task, _) = work(ledger, 0)
    with pytest.raises(Refused, match="its trajectory is stored"):
        ledger.fail(task.id, "engine")


def test_a_group_trains_without_its_failed_members_while_enough_remain(ledger: Ledger):
    ledger.admit(new_groups(ledger, 1, size=3))
    ledger.fail(ledger.lease("w", 1, 0)[0].id, "engine", is_final=True)
    work(ledger, 0)
    score_all(ledger)
    batch = ledger.claim(0, 1, 0)
    assert batch is not None
    assert [member.index for member in batch.groups[0].members] == [1, 2]


def test_a_group_with_too_few_members_left_is_dropped_and_its_prompt_issued_once_more(ledger: Ledger):
    (first,) = ledger.admit(new_groups(ledger, 1, size=2))
    old = ledger.lease("w", 1, 0)[0]
    ledger.fail(old.id, "engine", is_final=True)
    again = ledger.lease("w", 9, 0)
    assert len(again) == 2
    assert {task.group for task in again} != {first}
    assert old.seed not in {task.seed for task in again}
    assert old.prompt.tolist() == again[0].prompt.tolist()
    assert ledger.cursor().next_ordinal == 1
    ledger.fail(again[0].id, "engine", is_final=True)
    assert ledger.lease("w", 9, 0) == []
    assert ledger.counts().dropped_groups == {"failed": 2}
    assert ledger.standing().num_alive == 0


def test_what_arrives_for_a_dropped_group_is_kept_as_wasted(ledger: Ledger):
    ledger.admit(new_groups(ledger, 1, size=2))
    failing, late = ledger.lease("w", 2, 0)
    ledger.fail(failing.id, "engine", is_final=True)
    trajectory = answer(late, [0])
    assert ledger.submit([(trajectory, "w")]) == [Outcome.LATE]
    assert ledger.submit([(trajectory, "w")]) == [Outcome.REPEATED]
    assert ledger.unscored(9) == []
    counts = ledger.counts()
    assert counts.tokens.wasted == {"failed": trajectory.num_tokens}
    assert (counts.trajectories.accepted, counts.trajectories.dropped) == (1, 1)
