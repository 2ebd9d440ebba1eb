"""One trainer at a time: the one that came last, and never one that would undo a run unasked."""

from __future__ import annotations

from pathlib import Path

import pytest
from ledger_run import claim, data_of, full_step, version

from offbeat.errors import RunStopped, UserError
from offbeat.ledger.batches import TrainerRecord, why_not_from_scratch
from offbeat.ledger.ledger import Ledger
from offbeat.ledger.records import Arrival

FIRST, SECOND = Arrival("first", "box-1", "home of the first"), Arrival("second", "box-2", "home of the second")


def rows(ledger: Ledger) -> dict[str, list]:
    """Everything that the ledger holds."""
    tables = [name for (name,) in ledger.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
    return {table: ledger.execute(f"SELECT * FROM {table}").fetchall() for table in tables}


def test_a_trainer_that_was_replaced_can_not_commit_and_is_told_by_whom(ledger: Ledger):
    full_step(ledger, 0)
    old = ledger.reconcile(1, 1, FIRST)
    ledger.reconcile(1, 1, SECOND)
    ledger.publish(version(2, 1, 1))
    before = rows(ledger)
    with pytest.raises(RunStopped, match=r"this run: second on box-2, since \d{4}-.*generation 2; this trainer has 1"):
        ledger.as_trainer(old.generation, ledger.commit, 0, version(3, 1, 2))
    assert rows(ledger) == before


def test_every_start_of_a_trainer_takes_a_new_generation_and_the_latest_goes_on(ledger: Ledger):
    generations = [ledger.reconcile(0, 0, FIRST).generation for _ in range(3)]
    assert generations == [1, 2, 3]
    assert ledger.as_trainer(3, ledger.next_version_number) == 1
    for generation in (0, 1, 2):
        with pytest.raises(RunStopped):
            ledger.check_generation(generation)


def test_a_ledger_that_is_not_the_one_a_trainer_began_with_refuses_it(tmp_path: Path):
    with Ledger(tmp_path / "l.sqlite") as other:
        other.check_generation(0)
        with pytest.raises(RunStopped, match=r"this trainer has generation 1, .*l\.sqlite is 0: "):
            other.check_generation(1)


def test_a_call_that_fails_under_its_generation_changes_nothing(ledger: Ledger):
    generation = ledger.reconcile(0, 0, FIRST).generation
    before = rows(ledger)

    def half_a_call() -> None:
        ledger.publish(version(1, 0, 0))
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        ledger.as_trainer(generation, half_a_call)
    assert rows(ledger) == before


def test_a_trainer_without_a_checkpoint_is_refused_by_a_run_past_step_0_and_changes_nothing(ledger: Ledger):
    ledger.reconcile(0, None, FIRST)
    for step in range(2):
        full_step(ledger, step)
    ledger.checkpointed(1)
    before = rows(ledger)
    with pytest.raises(
        UserError, match=r"at step 2, .*no checkpoint; .*first on box-1.*of step 1, or .*--from-scratch"
    ):
        ledger.reconcile(0, None, SECOND)
    assert rows(ledger) == before


def test_a_trainer_whose_checkpoints_are_gone_is_told_to_bring_them_back(ledger: Ledger):
    ledger.reconcile(0, None, FIRST)
    for step in range(2):
        full_step(ledger, step)
    ledger.checkpointed(1)
    with pytest.raises(
        UserError, match=r"at step 2, but its checkpoint of step 1 is gone .*: bring it back, or .*scratch"
    ):
        ledger.reconcile(0, None, FIRST)


def test_told_to_begin_from_scratch_it_undoes_the_run_and_may_be_killed_before_its_first_checkpoint(ledger: Ledger):
    ledger.reconcile(0, None, FIRST)
    first = full_step(ledger, 0)
    full_step(ledger, 1)
    ledger.checkpointed(2)
    daring = Arrival("second", "box-2", SECOND.home, from_scratch=True)
    assert ledger.reconcile(0, None, daring).abandoned_versions == (1, 2)
    ledger.publish(version(3, 0, 0))
    again = claim(ledger, 0, 2, 0)
    assert data_of(again) == data_of(first)
    ledger.commit(0, version(4, 1, 3))
    assert ledger.reconcile(0, None, SECOND).abandoned_versions == (4,), "started again, without having to be told"
    assert ledger.verify().violations == ()


def test_a_trainer_with_an_older_checkpoint_goes_on_from_it_as_ever(ledger: Ledger):
    ledger.reconcile(0, None, FIRST)
    for step in range(3):
        full_step(ledger, step)
    ledger.checkpointed(2)
    assert ledger.reconcile(1, 1, SECOND).abandoned_versions == (2, 3)


def before(checkpoint_step: int | None) -> TrainerRecord:
    return TrainerRecord(1, "first", "", "a", 0.0, checkpoint_step)


@pytest.mark.parametrize(
    ("one_before", "arrival", "step", "is_refused"),
    [
        (None, Arrival(home="b"), 5, False),
        (before(None), Arrival(home="a"), 5, False),
        (before(None), Arrival(home="b"), 0, False),
        (before(4), Arrival(home="b", from_scratch=True), 5, False),
        (before(None), Arrival(home="b"), 5, True),
        (before(4), Arrival(home="a"), 5, True),
        (before(4), Arrival(home="b"), 5, True),
    ],
)
def test_who_may_begin_from_scratch(one_before, arrival, step, is_refused):
    assert (why_not_from_scratch(one_before, arrival, step) is not None) == is_refused
