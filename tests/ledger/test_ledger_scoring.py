from __future__ import annotations

import math

import pytest
from ledger_run import claim, eval_groups, new_groups, score_all, version, work

from offbeat.ledger.errors import Unknown
from offbeat.ledger.ledger import Ledger
from offbeat.ledger.records import GroupState, Purpose, Scored
from offbeat.trajectory import End, Reward


def test_what_waits_for_a_reward_carries_all_that_a_reward_needs(ledger: Ledger):
    (group,) = ledger.admit(new_groups(ledger, 1, size=1))
    (task,) = work(ledger, 0)
    (waiting,) = ledger.unscored(9)
    assert (waiting.task, waiting.group, waiting.purpose) == (task.id, group, Purpose.TRAIN)
    assert waiting.problem == {"prompt": "0+1=", "answer": "1", "info": {}}
    assert (waiting.reward, waiting.end) == ("number", End.STOP)
    assert len(waiting.response_tokens) >= 1


def test_what_was_seen_once_need_not_be_seen_again(ledger: Ledger):
    ledger.admit(new_groups(ledger, 2, size=2))
    work(ledger, 0, capacity=3)
    first = ledger.unscored(2)
    rest = ledger.unscored(9, after=first[-1].seq)
    assert len(first) == 2
    assert len(rest) == 1
    work(ledger, 0)
    assert len(ledger.unscored(9, after=rest[-1].seq)) == 1
    assert len(ledger.unscored(9)) == 4


def test_a_reward_is_stored_once_and_never_changed(ledger: Ledger):
    ledger.admit(new_groups(ledger, 1, size=2))
    tasks = work(ledger, 0)
    parts = [Reward(0.5, "right"), Reward(-0.25, "length", position=0)]
    assert ledger.score([Scored(task.id, parts) for task in tasks]).num_tasks == 2
    assert ledger.score([Scored(task.id, [Reward(9.0)]) for task in tasks]).num_tasks == 0
    assert ledger.score([Scored(task.id, error="late") for task in tasks]).num_tasks == 0
    batch = claim(ledger, 0, 1, 0)
    assert batch is not None
    assert [member.reward for member in batch.groups[0].members] == [0.25, 0.25]
    assert batch.groups[0].members[0].rewards == tuple(parts)


def test_a_reward_survives_to_the_last_bit(ledger: Ledger):
    ledger.admit(new_groups(ledger, 1, size=2))
    values = (0.1 + 0.2, 1 / 3)
    ledger.score([Scored(task.id, [Reward(v)]) for task, v in zip(work(ledger, 0), values, strict=True)])
    batch = claim(ledger, 0, 1, 0)
    assert batch is not None
    assert tuple(member.reward for member in batch.groups[0].members) == values
    assert tuple(member.rewards[0].value for member in batch.groups[0].members) == values


@pytest.mark.parametrize(
    ("result", "detail"),
    [
        (Scored(0, error="ZeroDivisionError: division by zero"), "division by zero"),
        (Scored(0, [Reward(math.nan, "style")]), "'style' is nan"),
        (Scored(0, [Reward(1.0), Reward(math.inf)]), "'reward' is inf"),
        (Scored(0, [Reward(1e200, "style")]), "'style' is 1e+200"),
        (Scored(0, [Reward(6e5), Reward(6e5, "style")]), "the weighted sum is 1200000.0"),
        (Scored(0, [Reward(2.0, weight=-1e6)]), "the weighted sum is -2000000.0"),
        (Scored(0, []), "returned no reward"),
        (Scored(0), "returned no reward"),
    ],
)
def test_what_is_no_reward_makes_a_failed_member_and_never_a_zero(ledger: Ledger, result: Scored, detail: str):
    ledger.admit(new_groups(ledger, 1, size=3))
    bad, *good = work(ledger, 0)
    ledger.score([Scored(bad.id, result.rewards, result.error), *(Scored(t.id, [Reward(1.0)]) for t in good)])
    assert ledger.counts().failed_tasks == {"reward": 1}
    stored = ledger.execute("SELECT detail FROM tasks WHERE id = ?", (bad.id,)).fetchone()[0]
    assert detail in stored
    batch = claim(ledger, 0, 1, 0)
    assert batch is not None
    assert [member.task for member in batch.groups[0].members] == [task.id for task in good]


def test_tokens_of_a_failed_member_of_a_trained_group_are_wasted_by_that_reason(ledger: Ledger):
    ledger.admit(new_groups(ledger, 1, size=3))
    bad = work(ledger, 0)[0]
    (size,) = [len(u.response_tokens) for u in ledger.unscored(9) if u.task == bad.id]
    score_all(ledger, failing=[bad.id])
    claim(ledger, 0, 1, 0)
    ledger.commit(0, version(1, 1, 0))
    counts = ledger.counts()
    assert counts.tokens.wasted == {"reward": size}
    assert (counts.trajectories.trained, counts.trajectories.dropped) == (2, 1)


def test_failing_rewards_drop_the_group_and_the_prompt_is_tried_once_more(ledger: Ledger):
    ledger.admit(new_groups(ledger, 1, size=2))
    first = work(ledger, 0)
    score_all(ledger, failing=[first[0].id])
    assert ledger.counts().groups == {"dropped": 1, "open": 1}
    again = work(ledger, 0)
    assert {task.seed for task in again}.isdisjoint({task.seed for task in first})
    score_all(ledger)
    batch = claim(ledger, 0, 1, 0)
    assert batch is not None
    assert batch.groups[0].ordinal == 0


def test_a_result_for_an_unknown_task_is_an_error(ledger: Ledger):
    with pytest.raises(Unknown):
        ledger.score([Scored(5, [Reward(1.0)])])


def test_an_evaluation_is_complete_when_all_its_members_ended_and_is_never_trained(ledger: Ledger):
    ledger.admit(eval_groups(2, size=2))
    tasks = work(ledger, 0)
    ledger.score([Scored(task.id, [Reward(float(i))]) for i, task in enumerate(tasks[:3])])
    (early,) = ledger.eval_results(0)
    assert not early.is_complete
    score_all(ledger, failing=[tasks[3].id])
    done = ledger.eval_round(0)
    assert done is not None
    assert done.is_complete
    assert not done.is_abandoned
    assert [(group.ordinal, group.rewards, group.num_failed) for group in done.groups] == [
        (0, (0.0, 1.0), 0),
        (1, (2.0,), 1),
    ]
    assert claim(ledger, 0, 1, 0) is None
    assert ledger.eval_results(7) == []


def test_an_evaluation_prompt_that_fails_altogether_is_visible_and_not_issued_again(ledger: Ledger):
    ledger.admit(eval_groups(1, size=2))
    score_all(ledger, failing=[task.id for task in work(ledger, 0)])
    done = ledger.eval_round(0)
    assert done is not None
    assert done.is_complete
    assert (done.groups[0].state, done.groups[0].reason) == (GroupState.DROPPED, "failed")
    assert ledger.lease("w", 9, 0) == []
