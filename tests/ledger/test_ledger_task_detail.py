"""A person who looks at one trajectory sees all that happened to it; one who looks at many finds what was asked for."""

from __future__ import annotations

import pytest
from ledger_run import answer, claim, eval_groups, full_step, handed, new_groups, score_all, version, work

from offbeat.ledger import reports
from offbeat.ledger.bodies import Bodies
from offbeat.ledger.errors import Unknown
from offbeat.ledger.ledger import Ledger
from offbeat.ledger.records import Scored
from offbeat.ledger.reports import TrajectoryFilter
from offbeat.trajectory import Reward


@pytest.fixture
def ledger(ledger: Ledger) -> Ledger:
    now = iter(range(1000, 10**9))
    ledger.wall_clock = lambda: float(next(now))
    return ledger


def what(ledger: Ledger, task: int) -> list[str]:
    return [event.what for event in ledger.task_detail(task).history]


def test_the_latest_come_first_and_the_best_and_the_worst_by_reward(ledger: Ledger):
    ledger.admit(new_groups(ledger, 2, size=3))
    tasks = [task.id for task in work(ledger, 0)]
    values = [0.5, 2.0, -1.0, 1.0]
    ledger.score([Scored(task, [Reward(value)]) for task, value in zip(tasks, values, strict=False)])
    ledger.score([Scored(tasks[4], error="raised")])
    assert [row.task for row in ledger.list_trajectories(3)] == tasks[:-4:-1]
    assert [row.reward for row in ledger.list_trajectories(2, "best")] == [2.0, 1.0]
    assert [row.reward for row in ledger.list_trajectories(9, "worst")] == sorted(values), "without failures"
    failed = next(row for row in ledger.list_trajectories(9) if row.task == tasks[4])
    assert (failed.reward, failed.error) == (None, "raised")


def test_a_step_is_told_apart(ledger: Ledger):
    batches = [full_step(ledger, step) for step in range(3)]
    ledger.admit(new_groups(ledger, 1, require_version=3))
    work(ledger, 3)
    rows = ledger.list_trajectories(99, which=TrajectoryFilter(step=2))
    assert {row.task for row in rows} == {member.task for group in batches[1].groups for member in group.members}
    assert {(row.step, row.state, row.first_version, row.last_version) for row in rows} == {(2, "trained", 1, 1)}
    assert {row.step for row in ledger.list_trajectories(2)} == {None}


def test_rows_come_with_their_trajectories_unless_those_were_pruned(ledger: Ledger):
    full_step(ledger, 0)
    full_step(ledger, 1)
    ledger.prune(1)
    rows = ledger.list_trajectories(99)
    found = ledger.load_trajectories(rows)
    assert [row.is_pruned for row in rows] == [trajectory is None for trajectory in found]
    assert sum(row.is_pruned for row in rows) == 4
    assert all(t is None or (t.task, t.num_tokens) == (r.task, r.num_tokens) for r, t in zip(rows, found, strict=True))


def test_a_walk_sees_every_trajectory_once(ledger: Ledger, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(reports, "SLICE", 3)
    for step in range(3):
        full_step(ledger, step)
    assert [row.task for row, _ in ledger.walk_trajectories()] == list(range(1, 13))
    assert [row.task for row, _ in ledger.walk_trajectories(TrajectoryFilter(step=2))] == list(range(5, 9))


def test_a_task_tells_its_story_from_the_issue_to_the_step_that_trained_it(ledger: Ledger):
    ledger.admit(new_groups(ledger, 1, size=2))
    first, _ = ledger.lease("a", 2, 0)
    ledger.submit([handed(answer(first, [0], worker="a", end=None), "a")])
    ledger.release("a")
    for task in ledger.lease("b", 2, 0):
        ledger.submit([handed(answer(task, [0], worker="b"), "b", task.fence)])
    score_all(ledger)
    claim(ledger, 0, 1, 0)
    ledger.commit(0, version(1, 1, 0))
    seen = ledger.task_detail(first.id)
    assert seen.trajectory is not None
    assert (seen.state, seen.group_state, seen.step) == ("scored", "trained", 1)
    assert [(s.version, s.staleness) for s in seen.segments] == [(0, 0), (0, 0)]
    told = what(ledger, first.id)
    assert told[0] == "issued"
    assert told[1].startswith("handed back unfinished by a")
    assert told[2] == "leased by b; number of earlier leases: 1"
    assert told[3].startswith("accepted from b")
    assert told[4].startswith("scored")
    assert told[5] == "claimed for step 1"
    assert told[6].startswith("trained at step 1 from version 0: ")


def test_a_task_that_is_not_answered_tells_how_far_it_came(ledger: Ledger):
    ledger.admit(new_groups(ledger, 1, size=3))
    begun, lost, fresh = ledger.lease("w", 3, 0)
    partial = answer(begun, [0], end=None)
    ledger.submit([handed(partial)])
    ledger.lose([held for held in ledger.leased() if held.task == lost.id])
    assert ledger.task_detail(begun.id).trajectory == partial
    assert [segment.version for segment in ledger.task_detail(begun.id).segments] == [0]
    assert any("workers lost while they held the task: 1" in line for line in what(ledger, lost.id))
    waiting = ledger.task_detail(fresh.id)
    assert (waiting.state, waiting.trajectory, waiting.reward, waiting.segments) == ("leased", None, None, ())
    assert waiting.prompt.tolist() == fresh.prompt.tolist()


def test_a_resume_and_an_audit_are_part_of_the_story(ledger: Ledger):
    full_step(ledger, 0)
    ledger.reconcile(0, None)
    ledger.commit(0, version(2, 1, 0), audited=[1])
    assert what(ledger, 1)[-1].startswith("trained at step 1 from version 0: 0 tokens; an audit left out ")
    full_step(ledger, 1)
    dropped = max(row.task for row in ledger.list_trajectories(99))
    ledger.reconcile(0, None)
    told = what(ledger, dropped)
    assert "claimed for step 2 (undone by a resume)" in told
    assert any(line.startswith("its group was dropped; issued again as group ") for line in told)
    assert all(segment.is_abandoned for segment in ledger.task_detail(dropped).segments)


def test_a_reward_is_told_with_its_parts_or_its_error(ledger: Ledger):
    ledger.admit(eval_groups(1))
    good, bad = work(ledger, 0)
    ledger.score([Scored(good.id, [Reward(1.0, "right"), Reward(-0.25, "length", 0)]), Scored(bad.id, error="raised")])
    seen = ledger.task_detail(good.id)
    assert (seen.reward, [part.name for part in seen.rewards], seen.error) == (0.75, ["right", "length"], None)
    assert ledger.task_detail(bad.id).error == "raised"
    assert what(ledger, bad.id)[-1] == "could not be scored: raised"


def test_what_was_pruned_is_told_without_its_tokens(ledger: Ledger):
    full_step(ledger, 0)
    full_step(ledger, 1)
    ledger.prune(1)
    ledger.bodies = Bodies(ledger.execute, ledger.blobs)
    seen = ledger.task_detail(1)
    assert (seen.is_pruned, seen.trajectory) == (True, None)
    assert seen.segments
    assert seen.reward is not None


def test_a_task_that_was_never_issued_is_told_so(ledger: Ledger):
    with pytest.raises(Unknown, match="task 1 does not exist; this run has no tasks yet"):
        ledger.task_detail(1)
    ledger.admit(new_groups(ledger, 1, size=2))
    with pytest.raises(Unknown, match="task 9 does not exist; this run has tasks 1 to 2"):
        ledger.task_detail(9)
