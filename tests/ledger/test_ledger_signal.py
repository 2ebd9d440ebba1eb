"""Groups whose members all earned the same: dropped, replaced, and taken as they are when too many of them came."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ledger_run import answer, claim, eval_groups, handed, new_groups, quick_folder, version, work

from offbeat.ledger.ledger import Ledger
from offbeat.ledger.records import GroupState, LedgerTerms, Scored, Scores
from offbeat.rules.groups import AdmissionTarget, admit
from offbeat.trajectory import Reward, Task


@pytest.fixture
def dropping(tmp_path: Path) -> Iterator[Ledger]:
    """A ledger that drops up to three groups a step; whatever a test did to it, its laws hold in the end."""
    with Ledger(tmp_path / "ledger.sqlite", LedgerTerms(min_group=2, max_attempts=1, max_no_signal=3)) as opened:
        opened.publish(version(0, 0))
        yield opened
        assert opened.verify().violations == ()


def score(ledger: Ledger, tasks: list[Task], *values: float) -> Scores:
    return ledger.score([Scored(task.id, [Reward(value)]) for task, value in zip(tasks, values, strict=True)])


def score_groups(ledger: Ledger, tasks: list[Task], value: float | None) -> None:
    """All equal, or each another."""
    ledger.score([Scored(task.id, [Reward(float(i) if value is None else value)]) for i, task in enumerate(tasks)])


def test_a_group_whose_rewards_are_all_equal_is_dropped_and_its_place_is_free(dropping: Ledger):
    dropping.admit(new_groups(dropping, 2, size=2))
    tasks = work(dropping, 0)
    assert admit(dropping.admission_state(), AdmissionTarget(groups_per_step=2)) == 0
    assert score(dropping, tasks[:2], 0.3, 0.1 + 0.2) == Scores(num_tasks=2, num_dropped=1)
    assert admit(dropping.admission_state(), AdmissionTarget(groups_per_step=2)) == 1
    assert dropping.lease("w", 9, 0) == [], "its prompt is not issued again"
    counts = dropping.counts()
    assert counts.dropped_groups == {"no_signal": 1}
    assert counts.tokens.wasted == {"no_signal": sum(len(look.tokens) for look in trajectories(dropping, tasks[:2]))}


def trajectories(ledger: Ledger, tasks: list[Task]):
    return [ledger.task_detail(task.id).trajectory for task in tasks]


def test_a_group_with_a_signal_is_ready_and_its_batch_tells_how_many_were_dropped_for_it(dropping: Ledger):
    dropping.admit(new_groups(dropping, 2, size=2))
    tasks = work(dropping, 0)
    assert score(dropping, tasks, 1.0, 1.0, 0.0, 1.0) == Scores(num_tasks=4, num_dropped=1)
    batch = claim(dropping, 0, 1, 0)
    assert batch is not None
    assert ([group.ordinal for group in batch.groups], batch.num_no_signal) == ([1], 1)
    dropping.commit(0, version(1, 1, 0))
    dropping.admit(new_groups(dropping, 1, size=2, require_version=1))
    score(dropping, work(dropping, 1), 0.0, 1.0)
    following = claim(dropping, 1, 1, 0)
    assert following is not None
    assert following.num_no_signal == 0


def test_without_the_rule_such_a_group_is_trained(tmp_path: Path):
    with Ledger(tmp_path / "ledger.sqlite", LedgerTerms(min_group=2)) as ledger:
        ledger.publish(version(0, 0))
        ledger.admit(new_groups(ledger, 1, size=2))
        score(ledger, work(ledger, 0), 1.0, 1.0)
        assert claim(ledger, 0, 1, 0) is not None


def test_members_that_failed_are_left_out_of_the_comparison(dropping: Ledger):
    dropping.admit(new_groups(dropping, 2, size=3))
    first, second = (dropping.lease("w", 3, 0) for _ in range(2))
    dropping.fail("w", first[0].id, first[0].fence, "engine")
    submit(dropping, first[1:])
    assert score(dropping, first[1:], 1.0, 1.0).num_dropped == 1
    submit(dropping, second[1:])
    assert score(dropping, second[1:], 0.0, 0.0).num_dropped == 0
    dropping.fail("w", second[0].id, second[0].fence, "engine")
    assert dropping.counts().dropped_groups == {"no_signal": 2}, "the last member to end may also be one that failed"


def submit(ledger: Ledger, tasks: list[Task]) -> None:
    ledger.submit([handed(answer(task, [0]), "w", task.fence) for task in tasks])


def test_a_group_of_too_few_members_has_failed_and_is_issued_again(dropping: Ledger):
    dropping.admit(new_groups(dropping, 1, size=2))
    tasks = work(dropping, 0)
    results = [Scored(tasks[0].id, [Reward(1.0)]), Scored(tasks[1].id, error="raised")]
    assert dropping.score(results).num_dropped == 1
    assert dropping.counts().dropped_groups == {"failed": 1}
    assert len(dropping.lease("w", 9, 0)) == 2


def test_an_evaluation_is_never_dropped_for_it(dropping: Ledger):
    dropping.admit(eval_groups(1, size=2))
    score(dropping, work(dropping, 0), 1.0, 1.0)
    held = dropping.eval_round(0)
    assert held is not None
    assert [group.state for group in held.groups] == [GroupState.EVALUATED]


def test_a_step_that_dropped_enough_takes_what_is_left_as_it_is(dropping: Ledger):
    drawn = 0
    while (batch := claim(dropping, 0, 2, 0)) is None:
        count = admit(dropping.admission_state(), AdmissionTarget(groups_per_step=2))
        assert count, "the run would stand still"
        dropping.admit(new_groups(dropping, count, size=2))
        drawn += count
        for tasks in by_group(work(dropping, 0)).values():
            score_groups(dropping, tasks, value=1.0)
    assert (drawn, batch.num_no_signal) == (5, 3)
    assert [group.ordinal for group in batch.groups] == [3, 4]


def by_group(tasks: list[Task]) -> dict[int, list[Task]]:
    found: dict[int, list[Task]] = {}
    for task in tasks:
        found.setdefault(task.group, []).append(task)
    return found


@settings(max_examples=40, deadline=None)
@given(signals=st.lists(st.booleans(), min_size=12, max_size=12), order=st.integers(0, 2**32))
def test_in_order_a_batch_does_not_depend_on_what_was_scored_first(signals: list[bool], order: int):
    """Whether a prompt has a signal is its own affair, and the batch is that of the prompts taken one by one."""
    expected = [ordinal for ordinal, signal in enumerate(signals) if signal or ordinal >= 5][:3]
    rng = random.Random(order)
    with (
        quick_folder() as folder,
        Ledger(folder / "ledger.sqlite", LedgerTerms(min_group=2, max_no_signal=5)) as ledger,
    ):
        ledger.publish(version(0, 0))
        waiting: list[list[Task]] = []
        ordinals: Mapping[int, int] = {}
        while (batch := claim(ledger, 0, 3, 0)) is None:
            if count := admit(ledger.admission_state(), AdmissionTarget(groups_per_step=3)):
                groups = new_groups(ledger, count, size=2)
                ordinals = {**ordinals, **dict(zip(ledger.admit(groups), (g.ordinal for g in groups), strict=True))}
                waiting += by_group(work(ledger, 0)).values()
            tasks = waiting.pop(rng.randrange(len(waiting)))
            score_groups(ledger, tasks, value=None if signals[ordinals[tasks[0].group]] else 1.0)
        assert [group.ordinal for group in batch.groups] == expected
        assert batch.num_no_signal == ledger.cursor().next_ordinal - 3 == expected[-1] - 2
        assert ledger.verify().violations == ()


def test_where_groups_require_no_version_drops_are_counted_since_the_last_batch(dropping: Ledger):
    dropping.admit(new_groups(dropping, 10, size=2, require_version=None))
    groups = list(by_group(work(dropping, 0)).values())
    for tasks in groups[:5]:
        score_groups(dropping, tasks, value=0.0)
    assert dropping.counts().groups == {"dropped": 3, "ready": 2, "open": 5}
    batch = claim(dropping, 0, 2, 2, in_order=False)
    assert batch is not None
    assert batch.num_no_signal == 3
    score(dropping, groups[5] + groups[6] + groups[7] + groups[8], *[1.0] * 8)
    assert dropping.counts().dropped_groups == {"no_signal": 6}, "the next step has drops of its own"
    assert dropping.counts().groups["ready"] == 1


def test_what_was_dropped_in_a_forgotten_step_stays_so_and_the_rest_is_judged_as_before(dropping: Ledger):
    dropping.admit(new_groups(dropping, 1, size=2))
    score_groups(dropping, work(dropping, 0), value=None)
    claim(dropping, 0, 1, 0)
    dropping.commit(0, version(1, 1, 0))
    dropping.admit(new_groups(dropping, 4, size=2, require_version=1))
    for tasks in by_group(work(dropping, 1)).values():
        score_groups(dropping, tasks, value=1.0)
    claim(dropping, 1, 1, 0)
    before = dropping.counts()
    assert (before.groups, before.dropped_groups) == ({"trained": 1, "dropped": 3, "claimed": 1}, {"no_signal": 3})

    dropping.reconcile(0, 0)
    dropping.commit(0, version(2, 1, 0))
    assert admit(dropping.admission_state(), AdmissionTarget(groups_per_step=1)) == 0, (
        "the group that was taken is issued again, alone"
    )
    tasks = work(dropping, 2)
    assert len(tasks) == 2
    score_groups(dropping, tasks, value=1.0)
    batch = claim(dropping, 1, 1, 0)
    assert batch is not None
    assert ([group.ordinal for group in batch.groups], batch.num_no_signal) == ([4], 3)
