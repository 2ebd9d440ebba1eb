from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ledger_life import GROUPS_PER_STEP, NUM_STEPS, Disk, live, undisturbed
from ledger_run import (
    answer,
    claim,
    data_of,
    eval_groups,
    full_step,
    handed,
    new_groups,
    quick_folder,
    score_all,
    version,
    work,
)

from offbeat.errors import UserError
from offbeat.ledger.ledger import Ledger
from offbeat.ledger.records import GroupState, Outcome, Reconciled
from offbeat.rules.groups import AdmissionTarget, admit


def test_a_fresh_run_has_nothing_to_take_back(tmp_path: Path):
    with Ledger(tmp_path / "ledger.sqlite") as fresh:
        assert fresh.reconcile(0, None) == Reconciled(step=0, parent=None, replays_batch=False)


def test_a_checkpoint_at_the_latest_step_takes_nothing_back(ledger: Ledger):
    full_step(ledger, 0)
    ledger.admit(new_groups(ledger, 2, require_version=1))
    work(ledger, 1, capacity=3)
    before = ledger.counts()
    assert ledger.reconcile(1, 1) == Reconciled(step=1, parent=1, replays_batch=False)
    assert ledger.counts() == before


def test_open_tasks_of_the_checkpoints_step_move_to_the_new_number_and_accept_both(ledger: Ledger):
    ledger.admit(new_groups(ledger, 1, size=3))
    early, late, _ = ledger.lease("w", 3, 0)
    ledger.submit([handed(answer(early, [0]))])
    ledger.release()
    resumed = ledger.reconcile(0, 0)
    ledger.publish(version(1, resumed.step, resumed.parent))
    assert ledger.wanted_version() == 1
    assert ledger.lease("w", 9, 0) == []
    assert ledger.submit([handed(answer(late, [0]))]) == [Outcome.STORED], "the same weights under the old number"
    work(ledger, 1)
    score_all(ledger)
    batch = claim(ledger, 0, 1, 0)
    assert batch is not None
    assert batch.from_version == 1
    assert all(member.mask.all() for member in batch.groups[0].members)
    assert [int(member.trajectory.versions[0]) for member in batch.groups[0].members] == [0, 0, 1]


def test_the_batch_of_the_checkpoints_step_is_claimed_again_with_the_same_data(ledger: Ledger):
    first = full_step(ledger, 0)
    full_step(ledger, 1)
    resumed = ledger.reconcile(0, None)
    assert resumed == Reconciled(0, 0, True, abandoned_versions=(1, 2), undone_steps=(1,), num_reissued_groups=2)
    ledger.publish(version(3, 0, 0))
    batch = claim(ledger, 0, 2, 0)
    assert batch is not None
    assert data_of(batch) == data_of(first)
    assert batch.from_version == 3
    ledger.commit(0, version(4, 1, 3))
    assert ledger.latest_version() == version(4, 1, 3)


def test_later_groups_are_issued_again_with_the_same_seeds_once_their_step_is_published(ledger: Ledger):
    batches = [full_step(ledger, step) for step in range(3)]
    ledger.reconcile(0, 0)
    ledger.publish(version(4, 0, 0))
    assert ledger.lease("w", 99, 4) == [], "step 1 is not published yet"
    assert ledger.wanted_version() is None
    for step in range(3):
        if step:
            assert admit(ledger.admission_state(), AdmissionTarget(2)) == 0
            work(ledger, 4 + step)
            score_all(ledger)
        batch = claim(ledger, step, 2, 0)
        assert batch is not None
        assert data_of(batch) == data_of(batches[step])
        ledger.commit(step, version(5 + step, step + 1, 4 + step))
    assert ledger.cursor().next_ordinal == 6
    assert ledger.counts().dropped_groups == {"abandoned": 4}


def test_unfinished_groups_of_an_abandoned_version_are_issued_again(ledger: Ledger):
    full_step(ledger, 0)
    ledger.admit(new_groups(ledger, 2, require_version=1))
    done, leased, *_ = ledger.lease("w", 3, 1)
    ledger.submit([handed(answer(done, [1]))])
    assert ledger.reconcile(0, 0).num_reissued_groups == 2
    late = answer(leased, [1])
    assert ledger.submit([handed(late)]) == [Outcome.LATE]
    assert ledger.unscored(9) == []
    ledger.commit(0, version(2, 1, 0))
    again = ledger.lease("w", 9, 2)
    assert len(again) == 4
    assert again[0].seed == done.seed


def test_what_was_begun_with_an_abandoned_version_can_be_begun_with_the_checkpoints(ledger: Ledger):
    full_step(ledger, 0)
    ledger.admit(new_groups(ledger, 2, require_version=None))
    held, _ = ledger.lease("w", 2, 1)
    ledger.release("w")
    (kept,) = ledger.lease("w", 1, 1)
    ledger.reconcile(0, 0)
    ledger.publish(version(2, 0, 0))
    assert kept.id == held.id
    assert {task.id for task in ledger.lease("v", 9, 2)} == {held.id + 1, held.id + 2, held.id + 3}
    begun = ledger.execute("SELECT first_step FROM groups WHERE state = 'open'").fetchall()
    assert begun == [(0,), (0,)]


def test_reconciling_twice_changes_nothing_more(ledger: Ledger):
    for step in range(3):
        full_step(ledger, step)
    ledger.reconcile(1, 1)
    before = ledger.counts()
    assert ledger.reconcile(1, 1) == Reconciled(step=1, parent=1, replays_batch=True)
    assert ledger.counts() == before


def test_a_second_resume_from_the_same_checkpoint_may_name_the_old_or_the_new_number(ledger: Ledger):
    full_step(ledger, 0)
    ledger.reconcile(0, 0)
    ledger.publish(version(2, 0, 0))
    assert ledger.reconcile(0, 0).parent == 2
    ledger.publish(version(3, 0, 0))
    assert ledger.reconcile(0, 2).parent == 3
    ledger.publish(version(4, 0, 3))


def test_a_checkpoint_ahead_of_its_lost_commit_completes_the_step(ledger: Ledger):
    ledger.admit(new_groups(ledger, 2))
    work(ledger, 0)
    score_all(ledger)
    claim(ledger, 0, 2, 0)
    assert ledger.reconcile(1, 1) == Reconciled(1, 0, replays_batch=False, completed_step=0)
    ledger.publish(version(1, 1, 0))
    assert ledger.counts().groups == {"trained": 2}
    assert ledger.admission_state().step == 1
    full_step(ledger, 1)


def test_a_lost_commit_may_also_be_repeated(ledger: Ledger):
    ledger.admit(new_groups(ledger, 2))
    work(ledger, 0)
    score_all(ledger)
    claim(ledger, 0, 2, 0)
    ledger.reconcile(1, 1)
    ledger.commit(0, version(1, 1, 0))
    full_step(ledger, 1)


def test_a_checkpoint_of_another_run_is_refused(ledger: Ledger, tmp_path: Path):
    with pytest.raises(UserError, match="ends at step 0, but the checkpoint is of step 3"):
        ledger.reconcile(3, 9)
    with pytest.raises(UserError, match="ends at step 0"):
        ledger.reconcile(1, None)
    full_step(ledger, 0)
    with pytest.raises(UserError, match="has no version 7"):
        ledger.reconcile(1, 7)
    with pytest.raises(UserError, match=r"version 0 is of step 0 in ledger .*, but of step 1 in the checkpoint"):
        ledger.reconcile(1, 0)
    with Ledger(tmp_path / "empty.sqlite") as empty, pytest.raises(UserError, match=r"is empty, .* of the same run"):
        empty.reconcile(4, 2)


def test_a_checkpoint_of_an_abandoned_history_is_refused(ledger: Ledger):
    full_step(ledger, 0)
    full_step(ledger, 1)
    ledger.reconcile(0, 0)
    ledger.publish(version(3, 0, 0))
    ledger.commit(0, version(4, 1, 3))
    work(ledger, 4)
    score_all(ledger)
    assert claim(ledger, 1, 2, 0) is not None
    with pytest.raises(UserError, match="which an earlier resume abandoned"):
        ledger.reconcile(1, 1)
    with pytest.raises(UserError, match="which an earlier resume abandoned"):
        ledger.reconcile(2, 2)


def test_evaluations_of_later_steps_are_abandoned_and_can_be_held_again(ledger: Ledger):
    ledger.admit(eval_groups(1))
    work(ledger, 0)
    score_all(ledger)
    full_step(ledger, 0)
    ledger.admit(eval_groups(2, require_version=1))
    work(ledger, 1, capacity=2)
    score_all(ledger)
    ledger.reconcile(0, 0)
    kept, lost = ledger.eval_results()
    assert (kept.step, kept.is_abandoned, kept.is_complete) == (0, False, True)
    assert (lost.step, lost.is_abandoned, lost.is_complete) == (1, True, True)
    assert [group.state for group in lost.groups] == [GroupState.EVALUATED, GroupState.DROPPED]
    assert lost.groups[1].reason == "abandoned"
    assert ledger.eval_round(1) is None
    ledger.commit(0, version(2, 1, 0))
    ledger.admit(eval_groups(2, require_version=2))
    work(ledger, 2)
    score_all(ledger)
    held = ledger.eval_round(1)
    assert held is not None
    assert held.is_complete
    assert len(ledger.eval_results(1)) == 2


def test_an_evaluation_under_way_goes_on_after_a_resume(ledger: Ledger):
    ledger.admit(eval_groups(2))
    work(ledger, 0, capacity=3)
    ledger.reconcile(0, 0)
    ledger.publish(version(1, 0, 0))
    assert len(work(ledger, 1)) == 1
    score_all(ledger)
    assert len(ledger.eval_results(0)) == 1
    assert ledger.eval_results(0)[0].is_complete


# A whole run, killed anywhere any number of times, trains the same data in the same order.


MAX_NO_SIGNAL = 2


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[float, dict[int, list]]:
    """By the groups without a signal that a step drops."""
    folder = tmp_path_factory.mktemp("undisturbed")
    return {most: undisturbed(folder / f"{most}.sqlite", most) for most in (0, MAX_NO_SIGNAL)}


def test_the_example_run_has_failures_and_retries_to_survive(tmp_path: Path):
    undisturbed(tmp_path / "ledger.sqlite")
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        counts = ledger.counts()
        assert counts.failed_tasks["reward"] > 0
        assert counts.groups["trained"] == GROUPS_PER_STEP * NUM_STEPS
        num_dead = ledger.cursor().next_ordinal - GROUPS_PER_STEP * NUM_STEPS
        assert counts.dropped_groups["failed"] > 2 * num_dead > 0, "some failed once, some twice"


def test_the_example_run_drops_groups_without_a_signal_up_to_its_limit(expected, tmp_path: Path):
    undisturbed(tmp_path / "ledger.sqlite", MAX_NO_SIGNAL)
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        dropped = "SELECT COUNT(*) FROM groups WHERE reason = 'no_signal' GROUP BY dropped_at_step"
        most_in_a_step = max(count for (count,) in ledger.execute(dropped))
    groups: dict[tuple[int, int], set[float]] = {}
    for step in range(NUM_STEPS):
        for ordinal, _, _, reward in expected[MAX_NO_SIGNAL][step]:
            groups.setdefault((step, ordinal), set()).add(reward)
    num_without_signal = sum(len(rewards) == 1 for rewards in groups.values())
    assert most_in_a_step == MAX_NO_SIGNAL
    assert 0 < num_without_signal < len(groups), "some were taken as they are"
    assert expected[0] != expected[MAX_NO_SIGNAL]


@settings(max_examples=25, deadline=None)
@given(
    max_no_signal=st.sampled_from([0, MAX_NO_SIGNAL]),
    lives=st.lists(st.integers(0, 60), max_size=6),
    save_every=st.integers(1, 4),
    saves_before_commit=st.booleans(),
    capacity=st.integers(1, 9),
    order=st.integers(1, 1000),
)
def test_a_run_killed_anywhere_trains_the_same_data_in_the_same_order(
    expected, max_no_signal, lives, save_every, saves_before_commit, capacity, order
):
    how = {
        "save_every": save_every,
        "saves_before_commit": saves_before_commit,
        "capacity": capacity,
        "order": order,
        "max_no_signal": max_no_signal,
    }
    with quick_folder() as folder:
        disk = Disk(folder / "ledger.sqlite")
        for num_events in lives:
            life = live(disk, **how)
            for _, _ in zip(range(num_events), life, strict=False):
                pass
            life.close()
        for _ in live(disk, **how):
            pass
        assert disk.trained == expected[max_no_signal]
