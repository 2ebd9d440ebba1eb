"""The ledger tells who made what, how stale it was trained, and what is waited for."""

from __future__ import annotations

from ledger_run import answer, claim, full_step, handed, new_groups, score_all, version, work

from offbeat.ledger.ledger import Ledger
from offbeat.ledger.records import ComparedSegment
from offbeat.ledger.reports import OldestLease


def test_an_empty_ledger_has_little_to_tell(tmp_path):
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        told = ledger.report()
    assert (told.step, told.version, told.producers, told.staleness, told.tasks) == (None, None, (), {}, {})


def test_each_worker_is_told_with_what_it_made_and_holds(ledger: Ledger):
    now = [100.0]
    ledger.wall_clock = lambda: now[0]
    ledger.admit(new_groups(ledger, 2, size=2))
    first = ledger.lease("fast", 2, 0)
    for task in first:
        now[0] += 2.0
        ledger.submit([handed(answer(task, [0], worker="fast"), "fast")])
    ledger.lease("slow", 1, 0)
    fast, slow = ledger.report().producers
    num_tokens = sum(answer(task, [0]).num_tokens for task in first)
    assert (fast.worker, fast.num_trajectories, fast.num_tokens, fast.num_leased) == ("fast", 2, num_tokens, 0)
    assert fast.tokens_per_second == num_tokens / 2.0
    assert (slow.worker, slow.num_trajectories, slow.num_leased, slow.tokens_per_second) == ("slow", 0, 1, None)


def test_trained_tokens_are_told_by_their_staleness(ledger: Ledger):
    full_step(ledger, 0)
    ledger.admit(new_groups(ledger, 1, size=2, require_version=None))
    tasks = ledger.lease("w", 2, 1)
    sent = [answer(tasks[0], [0, 1]), answer(tasks[1], [1])]
    ledger.submit([handed(trajectory) for trajectory in sent])
    score_all(ledger)
    before = ledger.report().staleness
    assert claim(ledger, 1, 1, 1) is not None
    assert ledger.report().staleness == before, "claimed is not trained"
    ledger.commit(1, version(2, 2, 1))
    after = ledger.report().staleness
    fresh = sum(len(s.tokens) for trajectory in sent for s in trajectory.segments if s.version == 1)
    assert after == {0: before[0] + fresh, 1: len(sent[0].segments[0].tokens)}
    assert sum(after.values()) == ledger.counts().tokens.trained


def test_tokens_past_the_bound_are_not_told_as_trained(ledger: Ledger):
    full_step(ledger, 0)
    ledger.admit(new_groups(ledger, 1, size=2, require_version=None))
    tasks = ledger.lease("w", 2, 1)
    ledger.submit([handed(answer(tasks[0], [0, 1])), handed(answer(tasks[1], [1]))])
    score_all(ledger)
    claim(ledger, 1, 1, 0)
    ledger.commit(1, version(2, 2, 1))
    told = ledger.report()
    assert set(told.staleness) == {0}
    assert told.counts.tokens.masked["stale"] > 0
    assert told.staleness[0] == told.counts.tokens.trained


def test_tasks_are_told_by_state_and_evaluation_is_apart(ledger: Ledger):
    ledger.admit(new_groups(ledger, 2, size=2))
    work(ledger, 0, capacity=1)
    ledger.lease("other", 1, 0)
    told = ledger.report()
    assert told.tasks == {"accepted": 1, "leased": 1, "open": 2}
    assert "1 by other" in told.waits_for


def test_the_oldest_lease_is_told_with_who_holds_it_and_how_long(ledger: Ledger):
    now = [100.0]
    ledger.wall_clock = lambda: now[0]
    ledger.admit(new_groups(ledger, 2, size=2))
    assert ledger.report().oldest_lease is None
    (first,) = ledger.lease("slow", 1, 0)
    now[0] += 40
    ledger.lease("quick", 1, 0)
    now[0] += 2
    assert ledger.report().oldest_lease == OldestLease(first.id, "slow", 42.0)
    ledger.release("slow")
    assert ledger.report().oldest_lease == OldestLease(first.id + 1, "quick", 2.0)


def test_beginnings_and_suspects_are_told(ledger: Ledger):
    ledger.admit(new_groups(ledger, 2, size=2))
    begun, *lost = ledger.lease("w", 4, 0)
    ledger.submit([handed(answer(begun, [0], end=None))])
    ledger.lose(ledger.leased())
    told = ledger.report()
    assert (told.num_partials, told.suspects) == (1, {1: 3})
    assert [(made.worker, made.num_partials) for made in told.producers] == [("w", 1)]
    assert len(lost) == 3


def test_audits_are_told_by_the_worker_that_handed_in_what_they_found(ledger: Ledger):
    ledger.admit(new_groups(ledger, 1, size=2))
    first, other = ledger.lease("liar", 2, 0)
    begun = answer(first, [0], end=None)
    ledger.submit([handed(begun, "liar"), handed(answer(other, [0]), "liar")])
    (again,) = ledger.lease("honest", 1, 0)
    whole = answer(again, [0], worker="honest")
    ledger.submit([handed(whole, "honest", again.fence)])
    score_all(ledger)
    claim(ledger, 0, 1, 0)
    sizes = [(segment.start, len(segment.tokens)) for segment in whole.segments]
    found = [ComparedSegment(first.id, *sizes[0], sizes[0][1]), ComparedSegment(first.id, *sizes[1], 0)]
    ledger.commit(0, version(1, 1, 0), audited=[first.id], compared=found)
    told = {made.worker: (made.num_compared, made.num_off) for made in ledger.report().producers}
    assert told == {"honest": (sizes[1][1], 0), "liar": (sizes[0][1], sizes[0][1])}


def test_workers_that_are_set_aside_are_told_with_their_reason_and_their_failures(ledger: Ledger):
    ledger.admit(new_groups(ledger, 1, size=2))
    (task,) = ledger.lease("broken", 1, 0)
    ledger.fail("broken", task.id, task.fence, "engine", "CUDA error")
    ledger.set_aside("broken", "8 of its latest 8 tasks failed: CUDA error", 300.0)
    told = ledger.report()
    assert told.set_aside == {"broken": "for another 300 s, 8 of its latest 8 tasks failed: CUDA error"}
    assert [(made.worker, made.num_failed) for made in told.producers] == [("broken", 1)]
    ledger.set_aside("back", "a flicker", -1.0)
    assert "back" not in ledger.report().set_aside


def test_versions_are_told_with_what_was_sampled_from_them_and_which_are_abandoned(ledger: Ledger):
    for step in range(2):
        full_step(ledger, step)
    ledger.reconcile(1, None)
    told = ledger.report()
    assert [(made.number, made.step, made.is_abandoned) for made in told.versions] == [
        (0, 0, False),
        (1, 1, False),
        (2, 2, True),
    ]
    assert told.num_abandoned_versions == 1
    assert sum(made.num_tokens for made in told.versions) == told.counts.tokens.generated


def test_answers_in_hand_are_those_of_groups_in_no_batch_yet(ledger: Ledger):
    full_step(ledger, 0)
    assert ledger.answers_in_hand() == (0, 0, 0), "what is trained is in no hand"
    ledger.admit(new_groups(ledger, 2, size=2, require_version=None))
    whole, _, half, _ = ledger.lease("w", 4, 1)
    ledger.submit([handed(answer(whole, [1]))])
    assert ledger.answers_in_hand().num_train == 1, "a group that is not whole yet counts"
    ledger.submit([handed(answer(half, [1]))])
    assert ledger.answers_in_hand() == (2, 0, 0)
