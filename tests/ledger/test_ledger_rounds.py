"""Where work comes in rounds: what is handed out when, and what becomes of what was unfinished."""

from __future__ import annotations

from pathlib import Path

import pytest
from ledger_run import answer, eval_groups, handed, new_groups, reward_of, version, work

from offbeat.ledger.errors import LedgerError
from offbeat.ledger.ledger import Ledger
from offbeat.ledger.records import LedgerTerms, Outcome, Scored
from offbeat.rules.leases import Lease
from offbeat.trajectory import Reward, Task


@pytest.fixture
def rounds(tmp_path: Path):
    """Two groups a step, four under way."""
    with Ledger(tmp_path / "l.sqlite", LedgerTerms(max_staleness=1, groups_per_step=2, in_rounds=True)) as ledger:
        ledger.publish(version(0, 0))
        ledger.admit(new_groups(ledger, 4, require_version=None))
        yield ledger
        assert ledger.verify().violations == ()


def finish_a_batch(ledger: Ledger, number: int, step: int):
    """Two groups are answered and scored, and the batch of the step is claimed."""
    work(ledger, number, capacity=4)
    ledger.score([Scored(u.task, [Reward(reward_of(u.response_tokens))]) for u in ledger.unscored(100)])
    return ledger.claim(step, in_order=False)


def test_a_round_lasts_from_a_version_until_the_batch_of_its_step_is_claimed(rounds: Ledger):
    assert rounds.current_round() == 0
    assert finish_a_batch(rounds, 0, 0) is not None
    assert rounds.current_round() is None
    rounds.commit(0, version(1, 1, 0))
    assert rounds.current_round() == 1


def test_while_a_batch_is_trained_nothing_but_evaluation_is_handed_out(rounds: Ledger):
    finish_a_batch(rounds, 0, 0)
    assert rounds.lease("w", 100, 0) == []
    rounds.admit(eval_groups(20, require_version=0))
    tasks = rounds.lease("w", 30, 0, total_slots=31)
    assert len(tasks) == 30
    assert {task.require_version for task in tasks} == {0}
    assert len(rounds.lease("v", 100, 0)) == 10
    assert rounds.lease("v", 100, 0) == []
    rounds.commit(0, version(1, 1, 0))
    assert {task.require_version for task in rounds.lease("w", 100, 1)} == {None}


def test_where_work_never_stops_a_claimed_batch_holds_nobody_up(tmp_path: Path):
    with Ledger(tmp_path / "l.sqlite", LedgerTerms(max_staleness=1, groups_per_step=2)) as ledger:
        ledger.publish(version(0, 0))
        ledger.admit(new_groups(ledger, 4, require_version=None))
        finish_a_batch(ledger, 0, 0)
        assert len(ledger.lease("w", 100, 0)) == 4


def test_who_must_load_first_is_given_evaluation_alone(rounds: Ledger):
    assert rounds.lease("w", 100, 0, only_eval=True) == []
    rounds.admit(eval_groups(1, require_version=0))
    assert {task.require_version for task in rounds.lease("w", 100, 0, only_eval=True)} == {0}


def test_what_was_handed_back_is_carried_on_in_the_next_round_and_costs_nobody_an_attempt(rounds: Ledger):
    work(rounds, 0, capacity=4)
    begun = rounds.lease("w", 4, 0)
    rounds.score([Scored(u.task, [Reward(1.0)]) for u in rounds.unscored(100)])
    assert rounds.claim(0, in_order=False) is not None
    *with_tokens, untouched = begun
    partials = [handed(answer(task, [0], end=None), "w", task.fence) for task in with_tokens]
    assert rounds.submit(partials) == [Outcome.PARTIAL] * 3
    assert rounds.give_back([Lease(untouched.id, untouched.fence, "w")], untouched=True) == 1
    assert rounds.counts().tokens.partial == sum(p.trajectory.num_tokens for p in partials)
    rounds.commit(0, version(1, 1, 0))

    again = {task.id: task for task in rounds.lease("v", 4, 1)}
    assert again.keys() == {task.id for task in begun}
    for sent in partials:
        assert again[sent.trajectory.task].prefix == sent.trajectory
    assert again[untouched.id].prefix is None
    rounds.submit([handed(answer(task, [1]), "v", task.fence) for task in again.values()])
    rounds.score([Scored(u.task, [Reward(1.0)]) for u in rounds.unscored(100)])
    batch = rounds.claim(1, in_order=False)
    assert batch is not None
    ages = {int(age) for group in batch.groups for member in group.members for age in member.staleness}
    assert ages == {0, 1}
    counts = rounds.counts()
    assert (counts.tokens.partial, counts.tokens.wasted, counts.failed_tasks) == (0, {}, {})
    failures = rounds.execute("SELECT SUM(num_failures), SUM(num_losses) FROM tasks").fetchone()
    assert failures == (0, 0)


def test_what_was_handed_back_goes_to_the_worker_where_its_keys_and_values_lie(tmp_path: Path):
    with Ledger(tmp_path / "l.sqlite", LedgerTerms(max_staleness=1, groups_per_step=4)) as ledger:
        ledger.publish(version(0, 0))
        ledger.admit(new_groups(ledger, 4, require_version=None))
        first = ledger.lease("v", 2, 0)
        second = ledger.lease("w", 2, 0)
        for worker, tasks in (("v", first), ("w", second)):
            ledger.submit([handed(answer(task, [0], end=None, worker=worker), worker, task.fence) for task in tasks])
        again = ledger.lease("w", 2, 0, total_slots=4)
        assert {task.id for task in again} == {task.id for task in second}
        rest = ledger.lease("w", 2, 0, total_slots=4)
        assert {task.id for task in rest} <= {task.id for task in first}, "but nobody waits for whoever had it"
        assert rest


def test_within_a_group_what_lies_with_somebody_else_is_handed_out_last(tmp_path: Path):
    with Ledger(tmp_path / "l.sqlite", LedgerTerms(max_staleness=1, groups_per_step=4)) as ledger:
        ledger.publish(version(0, 0))
        ledger.admit(new_groups(ledger, 1, size=4, require_version=None))
        for worker, task in zip("vw", ledger.lease("v", 1, 0) + ledger.lease("w", 1, 0), strict=True):
            ledger.submit([handed(answer(task, [0], end=None, worker=worker), worker, task.fence)])
        tasks = ledger.lease("w", 4, 0, total_slots=5)
        homes = [None if task.prefix is None else task.prefix.segments[0].worker for task in tasks]
        assert homes == ["w", None, None, "v"]


def first_steps(ledger: Ledger) -> list[int | None]:
    return [step for (step,) in ledger.execute("SELECT first_step FROM groups ORDER BY ordinal")]


def test_a_group_that_was_given_back_without_a_token_is_no_older_than_one_that_nobody_had(rounds: Ledger):
    tasks = rounds.lease("w", 4, 0)
    assert first_steps(rounds) == [0, 0, None, None]
    assert rounds.give_back([Lease(task.id, task.fence, "w") for task in tasks[:3]], untouched=True) == 3
    assert first_steps(rounds) == [None, 0, None, None], "somebody may have a token of the second"
    assert send_error(rounds, tasks[0]) is not None, "whoever gave a task back has nothing to hand in"


def test_what_a_worker_lost_sight_of_may_still_come_and_keeps_its_age(rounds: Ledger):
    first, second = rounds.lease("w", 2, 0)
    rounds.give_back([Lease(task.id, task.fence, "w") for task in (first, second)])
    assert first_steps(rounds)[0] == 0
    assert send_error(rounds, first) is None


def test_a_group_with_a_beginning_keeps_its_age_though_the_rest_is_given_back(rounds: Ledger):
    first, second = rounds.lease("w", 2, 0)
    rounds.submit([handed(answer(first, [0], end=None), "w", first.fence)])
    again = rounds.lease("v", 1, 0)[0]
    rounds.give_back([Lease(second.id, second.fence, "w")], untouched=True)
    rounds.give_back([Lease(again.id, again.fence, "v")], untouched=True)
    assert first_steps(rounds)[0] == 0


def send_error(ledger: Ledger, task: Task) -> LedgerError | None:
    (outcome,) = ledger.submit([handed(answer(task, [0]), "w", task.fence)])
    return outcome if isinstance(outcome, LedgerError) else None
