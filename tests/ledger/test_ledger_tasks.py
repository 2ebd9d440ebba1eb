from __future__ import annotations

from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ledger_run import answer, claim, eval_groups, full_step, handed, new_groups, quick_folder, score_all, version, work

from offbeat.ledger import leasing
from offbeat.ledger.errors import Fenced, Forbidden, Unknown
from offbeat.ledger.ledger import Ledger
from offbeat.ledger.records import LedgerTerms, Outcome, TaskState
from offbeat.rules.leases import Lease
from offbeat.trajectory import Task


def fail(ledger: Ledger, task: Task, reason: str = "engine", worker: str = "w") -> TaskState:
    return ledger.fail(worker, task.id, task.fence, reason, "out of memory")


def fail_for_good(ledger: Ledger) -> Task:
    """Fails the first open task until its two attempts are used up; returns its last lease."""
    first = ledger.lease("w", 1, 0)[0]
    assert fail(ledger, first) is TaskState.OPEN
    last = ledger.lease("w", 1, 0)[0]
    assert last.id == first.id
    assert fail(ledger, last) is TaskState.FAILED
    return last


def vanish(ledger: Ledger, worker: str) -> int:
    return ledger.lose([held for held in ledger.leased() if held.worker == worker])


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


def test_a_task_without_a_required_version_goes_to_any_worker_whose_version_is_alive(ledger: Ledger):
    full_step(ledger, 0)
    ledger.admit(new_groups(ledger, 1, size=2, require_version=None))
    assert ledger.wanted_version() is None
    assert ledger.lease("never published", 1, 7) == []
    assert ledger.lease("none", 1, None) == []
    assert len(ledger.lease("behind", 1, 0)) == 1
    assert len(ledger.lease("latest", 1, 1)) == 1


def test_a_group_begun_with_a_newer_version_is_not_carried_on_with_an_older_one(ledger: Ledger):
    full_step(ledger, 0)
    ledger.admit(new_groups(ledger, 1, size=2, require_version=None))
    assert len(ledger.lease("latest", 1, 1)) == 1
    assert ledger.lease("behind", 1, 0) == []


def test_pacing_lets_a_lagging_worker_begin_only_what_can_be_trained_in_time(tmp_path):
    with Ledger(tmp_path / "ledger.sqlite", LedgerTerms(max_staleness=2, groups_per_step=1)) as ledger:
        ledger.publish(version(0, 0))
        for step in range(2):
            full_step(ledger, step, count=1)
        ledger.admit(new_groups(ledger, 4, size=1, require_version=None))
        begun = {have: len(ledger.lease(f"with {have}", 9, have)) for have in (0, 1, 2)}
        assert begun == {0: 1, 1: 1, 2: 1}, "one for each of the steps 2, 3 and 4"
        assert ledger.lease("more", 9, 2) == []


def test_each_of_several_workers_is_given_its_share(ledger: Ledger):
    ledger.admit(new_groups(ledger, 4, size=2))
    assert len(ledger.lease("a", 8, 0, total_slots=16)) == 4
    assert len(ledger.lease("b", 8, 0, total_slots=16)) == 2
    assert len(ledger.lease("b", 6, 0, total_slots=16)) == 1


def test_a_restart_opens_all_leased_tasks_and_costs_no_attempt(ledger: Ledger):
    ledger.admit(new_groups(ledger, 1, size=2))
    for _ in range(10):
        assert len(ledger.lease("w", 9, 0)) == 2
        assert ledger.release() == 2
    assert len(work(ledger, 0)) == 2


def test_a_fence_grows_with_every_lease_and_the_holder_is_known(ledger: Ledger):
    ledger.admit(new_groups(ledger, 1, size=1))
    for fence, worker in enumerate("abc", start=1):
        (task,) = ledger.lease(worker, 9, 0)
        assert task.fence == fence
        assert ledger.leased() == [Lease(task.id, fence, worker)]
        assert ledger.still_held(worker, [(task.id, fence)]) == [Lease(task.id, fence, worker)]
        assert ledger.still_held(worker, [(task.id, fence - 1), (77, 1)]) == []
        assert ledger.still_held("stranger", [(task.id, fence)]) == []
        ledger.release(worker)
        assert ledger.leased() == []


def test_a_worker_that_leaves_costs_no_attempt_and_takes_nobody_along(ledger: Ledger):
    ledger.admit(new_groups(ledger, 1, size=3))
    ledger.lease("other", 1, 0)
    for _ in range(5):
        assert len(ledger.lease("leaving", 9, 0)) == 2
        assert ledger.release("leaving") == 2
    assert [held.worker for held in ledger.leased()] == ["other"]
    assert ledger.report().tasks == {"leased": 1, "open": 2}


def test_a_task_that_worker_after_worker_vanishes_with_alone_ends_as_failed(ledger: Ledger):
    (group,) = ledger.admit(new_groups(ledger, 1, size=3))
    ledger.lease("other", 1, 0)
    for _ in range(2):
        assert len(ledger.lease("lost", 1, 0)) == 1
        assert vanish(ledger, "lost") == 1
    assert ledger.counts().failed_tasks == {"lost": 1}
    assert [task.group for task in ledger.lease("w", 9, 0)] == [group]


def test_many_tasks_that_vanish_together_are_suspects_and_none_is_blamed(ledger: Ledger):
    ledger.admit(new_groups(ledger, 2, size=8))
    assert len(ledger.lease("lost", 16, 0)) == 16
    assert vanish(ledger, "lost") == 16
    assert ledger.counts().failed_tasks == {}
    suspects = ledger.lease("w", 16, 0)
    assert len(suspects) == 2, "an eighth of the slots"
    assert ledger.lease("w", 14, 0) == [], "the same slots hold no more of them later"
    assert len(ledger.lease("v", 16, 0)) == 2


def test_the_one_that_was_there_at_every_loss_is_blamed_and_its_neighbours_go_free(ledger: Ledger):
    ledger.admit(new_groups(ledger, 1, size=8))
    poison = ledger.lease("lost", 8, 0)[5].id
    vanish(ledger, "lost")
    for death in range(100):
        if ledger.counts().failed_tasks:
            break
        tasks = ledger.lease(f"w{death}", 8, 0)
        if poison in [task.id for task in tasks]:
            vanish(ledger, f"w{death}")
        else:
            ledger.submit([handed(answer(task, [0]), f"w{death}", task.fence) for task in tasks])
    assert ledger.counts().failed_tasks == {"lost": 1}
    assert ledger.report().tasks["failed"] == 1
    (failed,) = ledger.execute("SELECT id FROM tasks WHERE state = 'failed'").fetchone()
    assert failed == poison


def test_two_workers_that_vanish_at_once_are_judged_apart(ledger: Ledger):
    """The group of one is dropped by the loss of the other; what it held ends once, as dropped."""
    ledger.admit(new_groups(ledger, 1, size=2))
    fail_once = [ledger.lease(name, 1, 0)[0] for name in "ab"]
    assert vanish(ledger, "a") + vanish(ledger, "b") == 2
    again = [ledger.lease(name, 1, 0)[0] for name in "ab"]
    assert {task.id for task in again} == {task.id for task in fail_once}
    assert ledger.lose(ledger.leased()) == 1, "the second was dropped with its group"
    states = ledger.execute("SELECT state FROM tasks WHERE group_id = 1 ORDER BY state").fetchall()
    assert states == [("dropped",), ("failed",)]


def test_a_lease_that_is_over_cannot_be_lost(ledger: Ledger):
    ledger.admit(new_groups(ledger, 1, size=2))
    ledger.lease("a", 1, 0)
    old = ledger.leased()
    ledger.release("a")
    ledger.lease("b", 1, 0)
    assert ledger.lose(old) == 0
    assert [held.worker for held in ledger.leased()] == ["b"]
    ledger.release("b")
    ledger.lease("a", 1, 0)
    assert ledger.lose(old) == 0, "the same worker under a newer fence"
    assert len(ledger.leased()) == 1


def test_a_failed_attempt_opens_the_task_again_and_the_last_one_ends_it(ledger: Ledger):
    ledger.admit(new_groups(ledger, 1, size=3))
    last = fail_for_good(ledger)
    assert fail(ledger, last) is TaskState.FAILED, "told twice"
    assert ledger.counts().failed_tasks == {"engine": 1}


def test_a_failure_that_is_told_twice_counts_once(ledger: Ledger):
    ledger.admit(new_groups(ledger, 1, size=3))
    (task,) = ledger.lease("w", 1, 0)
    for _ in range(5):
        assert fail(ledger, task) is TaskState.OPEN
    assert ledger.lease("w", 1, 0)[0].fence == 2


def test_a_worker_given_up_for_lost_that_tells_of_its_failure_counts_once(ledger: Ledger):
    ledger.admit(new_groups(ledger, 1, size=3))
    (task,) = ledger.lease("w", 1, 0)
    vanish(ledger, "w")
    assert fail(ledger, task) is TaskState.OPEN


def test_only_who_holds_a_task_can_fail_it(ledger: Ledger):
    with pytest.raises(Unknown, match="task 77 does not exist"):
        ledger.fail("w", 77, 1, "engine")
    ledger.admit(new_groups(ledger, 1, size=3))
    (task,) = ledger.lease("w", 1, 0)
    with pytest.raises(Forbidden, match="leased by w, not by thief"):
        fail(ledger, task, worker="thief")
    with pytest.raises(Forbidden, match=r"lease 2 of task . was never granted"):
        ledger.fail("w", task.id, 2, "engine")
    ledger.release("w")
    (again,) = ledger.lease("v", 1, 0)
    with pytest.raises(Fenced, match="lease 1 of task 1 is over"):
        fail(ledger, task)
    ledger.submit([handed(answer(again, [0]), "v", again.fence)])
    with pytest.raises(Fenced, match="its trajectory is already stored"):
        fail(ledger, again, worker="v")


def test_a_group_trains_without_its_failed_members_while_enough_remain(ledger: Ledger):
    ledger.admit(new_groups(ledger, 1, size=3))
    fail_for_good(ledger)
    work(ledger, 0)
    score_all(ledger)
    batch = claim(ledger, 0, 1, 0)
    assert batch is not None
    assert [member.index for member in batch.groups[0].members] == [1, 2]


def test_a_group_with_too_few_members_left_is_dropped_and_its_prompt_issued_once_more(ledger: Ledger):
    (first,) = ledger.admit(new_groups(ledger, 1, size=2))
    old = fail_for_good(ledger)
    again = ledger.lease("v", 9, 0)
    assert len(again) == 2
    assert {task.group for task in again} != {first}
    assert old.seed not in {task.seed for task in again}
    assert old.prompt.tolist() == again[0].prompt.tolist()
    assert ledger.cursor().next_ordinal == 1
    ledger.release()
    fail_for_good(ledger)
    assert ledger.lease("w", 9, 0) == []
    assert ledger.counts().dropped_groups == {"failed": 2}
    assert ledger.admission_state().num_alive == 0


def test_what_arrives_for_a_dropped_group_is_kept_as_wasted(ledger: Ledger):
    ledger.admit(new_groups(ledger, 1, size=2))
    (late,) = [task for task in ledger.lease("v", 2, 0) if task.id == 2]
    ledger.release("v")
    fail_for_good(ledger)
    trajectory = answer(late, [0])
    assert ledger.submit([handed(trajectory, "v")]) == [Outcome.LATE]
    assert ledger.submit([handed(trajectory, "v")]) == [Outcome.REPEATED]
    assert ledger.unscored(9) == []
    counts = ledger.counts()
    assert counts.tokens.wasted == {"failed": trajectory.num_tokens}
    assert (counts.trajectories.accepted, counts.trajectories.dropped) == (1, 1)


@settings(max_examples=60, deadline=None)
@given(
    num_near=st.integers(0, 4),
    capacity=st.integers(1, 12),
    total_slots=st.one_of(st.none(), st.integers(1, 60)),
    have_version=st.integers(0, 1),
    num_lost=st.integers(0, 4),
    groups_per_step=st.integers(1, 4),
)
def test_a_worker_is_given_the_same_tasks_however_few_groups_are_looked_at_first(
    num_near, capacity, total_slots, have_version, num_lost, groups_per_step
):
    def given_when_looking_at(num_groups: int) -> list[int]:
        terms = LedgerTerms(groups_per_step, max_staleness=1)
        with quick_folder() as folder, Ledger(folder / "l.sqlite", terms) as ledger:
            ledger.publish(version(0, 0))
            ledger.admit(new_groups(ledger, 9, size=3, require_version=None))
            early = ledger.lease("early", 4, 0)
            ledger.lose([Lease(task.id, task.fence, "early") for task in early[:num_lost]])
            ledger.admit(new_groups(ledger, 2, size=3, require_version=0))
            with mock.patch.object(leasing, "NUM_NEAR", num_groups):
                return [task.id for task in ledger.lease("w", capacity, have_version, total_slots=total_slots)]

    assert given_when_looking_at(num_near) == given_when_looking_at(1000)


def failures_of(ledger: Ledger) -> dict[int, int]:
    return dict(ledger.execute("SELECT id, num_failures FROM tasks WHERE num_failures > 0"))


def test_failures_of_a_worker_that_is_set_aside_cost_no_attempt(ledger: Ledger):
    ledger.admit(new_groups(ledger, 3, size=3))
    broken = ledger.lease("broken", 3, 0)
    for task in broken:
        fail(ledger, task, worker="broken")
    fine = ledger.lease("w", 1, 0)[0]
    fail(ledger, fine)
    assert fine.id == broken[0].id
    assert failures_of(ledger) == {fine.id: 2, broken[1].id: 1, broken[2].id: 1}
    assert ledger.counts().failed_tasks == {"engine": 1}, "what has ended, has"
    assert ledger.set_aside("broken", "CUDA error", 300.0) == 2
    assert failures_of(ledger) == {fine.id: 2}
    late = ledger.lease("broken", 9, 0)
    for task in late:
        assert ledger.fail("broken", task.id, task.fence, "engine", counts=False) is TaskState.OPEN
    assert failures_of(ledger) == {fine.id: 2}


def test_a_task_that_a_worker_failed_is_left_to_others(ledger: Ledger):
    ledger.admit(new_groups(ledger, 2, size=2))
    first, second = ledger.lease("broken", 2, 0)
    fail(ledger, first, worker="broken")
    fail(ledger, second, worker="broken")
    others = ledger.lease("broken", 9, 0, skips_failed=True)
    assert {task.id for task in others} == {3, 4}
    assert ledger.lease("broken", 9, 0, skips_failed=True) == []
    assert [task.id for task in ledger.lease("w", 1, 0, skips_failed=True)] == [first.id]
    assert [task.id for task in ledger.lease("broken", 9, 0)] == [second.id], "unless there is nobody else"
