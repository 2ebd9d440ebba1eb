"""Answers that are claimed without their siblings: what a batch knows of those, and that it never knows more."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ledger_run import answer, claim, handed, quick_folder, released_groups, score_all, version

from offbeat.ledger.errors import Refused
from offbeat.ledger.ledger import Ledger
from offbeat.ledger.records import Arrival, Batch, DrawCursor, LedgerTerms, Outcome, Scored
from offbeat.trajectory import Reward, Task
from offbeat.weights.version import Version

NUM_SIBLINGS = 3


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    """A fresh ledger whose tokens may be some steps old; whatever a test did to it, its laws hold in the end."""
    with Ledger(tmp_path / "ledger.sqlite", LedgerTerms(min_group=2, max_attempts=1, max_staleness=4)) as opened:
        opened.publish(version(0, 0))
        yield opened
        assert opened.verify().violations == ()


def kin(batch: Batch | None) -> dict[int, tuple[float, ...]]:
    """What a batch knows, by ordinal."""
    assert batch is not None
    return {group.ordinal: group.earlier for group in batch.groups}


def drawn(ledger: Ledger, count: int, **how) -> list[Task]:
    """Draws answers and hands them all to one worker, by ordinal."""
    ledger.admit(released_groups(ledger, count, NUM_SIBLINGS, **how))
    return ledger.lease("w", count, 0)


def finish(ledger: Ledger, earned: Sequence[tuple[Task, float]], number: int = 0) -> None:
    outcomes = ledger.submit([handed(answer(task, [number]), "w", task.fence) for task, _ in earned])
    assert outcomes == [Outcome.STORED] * len(earned)
    ledger.score([Scored(task.id, [Reward(reward)]) for task, reward in earned])


def test_a_prompts_siblings_are_drawn_one_after_the_other_in_any_portions(ledger: Ledger):
    for count in (2, 3, 1):
        ledger.admit(released_groups(ledger, count, NUM_SIBLINGS))
    cursor = ledger.cursor()
    assert (cursor.next_ordinal, cursor.drawn, cursor.last) == (6, {"sums": 2}, DrawCursor("sums", 1, 2))


@pytest.mark.parametrize("change", [{"sibling": 2}, {"source_ordinal": 1}, {"sibling": 0}])
def test_a_sibling_that_does_not_follow_the_one_before_is_refused(ledger: Ledger, change: dict):
    ledger.admit(released_groups(ledger, 1, NUM_SIBLINGS))
    (following,) = released_groups(ledger, 1, NUM_SIBLINGS)
    with pytest.raises(Refused, match=r"does not follow|was drawn already"):
        ledger.admit([replace(following, **change)])


def test_an_answer_is_claimed_alone_and_knows_siblings_in_later_batches_and_earlier_ones(ledger: Ledger):
    tasks = drawn(ledger, 6, require_version=None)
    finish(ledger, [(tasks[0], 1.0), (tasks[3], 5.0)])
    first = claim(ledger, 0, 1, 4, in_order=False)
    assert kin(first) == {0: ()}
    ledger.commit(0, version(1, 1, 0))
    finish(ledger, [(tasks[1], 2.0)])
    second = claim(ledger, 1, 2, 4, in_order=False)
    assert kin(second) == {1: (1.0,), 3: ()}
    ledger.commit(1, version(2, 2, 1))
    finish(ledger, [(tasks[5], 6.0), (tasks[4], 7.0), (tasks[2], 3.0)])
    third = claim(ledger, 2, 1, 4, in_order=False)
    assert kin(third) == {2: (1.0, 2.0)}
    ledger.commit(2, version(3, 3, 2))
    fourth = claim(ledger, 3, 1, 4, in_order=False)
    assert kin(fourth) == {4: (5.0, 6.0)}, "by ordinal, whether claimed or not, whoever was first"
    prompts = [group.prompt for batch in (first, second, third, fourth) for group in batch.groups]
    assert prompts == [1, 1, 4, 1, 4]


def test_siblings_in_one_batch_know_each_other_without_being_told(ledger: Ledger):
    tasks = drawn(ledger, 3, require_version=None)
    finish(ledger, [(task, float(i)) for i, task in enumerate(tasks)])
    batch = claim(ledger, 0, 3, 4, in_order=False)
    assert kin(batch) == dict.fromkeys(range(3), ())
    assert {group.prompt for group in batch.groups} == {1}


def test_a_batch_that_is_replayed_knows_what_it_knew_and_no_later_reward(ledger: Ledger):
    tasks = drawn(ledger, 3, require_version=None)
    finish(ledger, [(tasks[0], 1.0), (tasks[1], 2.0)])
    claimed = claim(ledger, 0, 1, 4, in_order=False)
    assert kin(claimed) == {0: (2.0,)}
    finish(ledger, [(tasks[2], 3.0)])
    assert kin(claim(ledger, 0, 1, 4, in_order=False)) == kin(claimed)
    ledger.commit(0, version(1, 1, 0))
    assert ledger.reconcile(0, 0).replays_batch
    ledger.publish(version(2, 0, 0))
    assert kin(claim(ledger, 0, 1, 4, in_order=False)) == kin(claimed)


def test_the_answer_of_an_abandoned_version_does_not_count_beside_the_one_that_replaces_it(ledger: Ledger):
    finish(ledger, [(task, 1.0) for task in drawn(ledger, 2)])
    claim(ledger, 0, 2, 0)
    ledger.commit(0, version(1, 1, 0))
    ledger.admit(released_groups(ledger, 1, NUM_SIBLINGS, require_version=1))
    finish(ledger, [(task, 9.0) for task in ledger.lease("w", 1, 1)], 1)
    assert kin(claim(ledger, 1, 1, 0)) == {2: (1.0, 1.0)}
    ledger.reconcile(0, 0)
    ledger.publish(version(2, 0, 0))
    ledger.commit(0, version(3, 1, 2, "other weights"))
    again = ledger.lease("w", 9, 3)
    finish(ledger, [(task, 2.0) for task in again], 3)
    assert kin(claim(ledger, 1, 1, 0)) == {2: (1.0, 1.0)}


def test_an_answer_that_came_too_late_to_be_trained_keeps_its_reward_for_the_others(ledger: Ledger):
    tasks = drawn(ledger, 3, require_version=None)
    finish(ledger, [(tasks[0], 1.0), (tasks[1], 2.0)])
    claim(ledger, 0, 1, 0, in_order=False)
    ledger.commit(0, version(1, 1, 0))
    assert claim(ledger, 1, 1, 0, in_order=False) is None, "the second answer is a step old"
    ledger.release()
    (fresh, *_) = ledger.lease("w", 1, 1)
    finish(ledger, [(fresh, 5.0)], 1)
    (known,) = kin(claim(ledger, 1, 1, 0, in_order=False)).values()
    assert known == (1.0, 2.0)


def test_an_answer_that_failed_is_not_known_and_not_waited_for(ledger: Ledger):
    tasks = drawn(ledger, 2, require_version=None)
    ledger.submit([handed(answer(task, [0]), "w", task.fence) for task in tasks])
    score_all(ledger, failing=[tasks[0].id])
    (again,) = ledger.lease("w", 9, 0)
    assert kin(claim(ledger, 0, 1, 4, in_order=False)) == {1: ()}
    ledger.submit([handed(answer(again, [0]), "w", again.fence)])
    score_all(ledger, failing=[again.id])
    ledger.commit(0, version(1, 1, 0))
    third = drawn(ledger, 1, require_version=None)
    finish(ledger, [(task, 1.0) for task in third])
    (known,) = kin(claim(ledger, 1, 1, 4, in_order=False)).values()
    assert len(known) == 1


NUM_STEPS, MAX_TURNS = 6, 2000


@dataclass
class Run:
    """Workers, judges and a trainer that take turns as chance has it, and what each batch was first told."""

    ledger: Ledger
    rng: random.Random
    bound: int
    groups_per_step: int
    known: dict[int, dict[int, tuple[float, ...]]] = field(default_factory=dict)
    num_resumes: int = 0

    def latest(self) -> Version:
        found = self.ledger.latest_version()
        assert found is not None
        return found

    def turn(self) -> None:
        count = (self.bound + 1) * self.groups_per_step - self.ledger.admission_state().num_alive
        self.ledger.admit(released_groups(self.ledger, max(count, 0), NUM_SIBLINGS, require_version=None))
        self.work(self.latest().number)
        waiting = [u.task for u in self.ledger.unscored(1000) if self.rng.random() < 0.5]
        self.ledger.score([self.judged(task) for task in waiting])
        self.train()
        if self.rng.random() < 0.1 and self.num_resumes < 3:
            self.resume(max(0, self.latest().step - self.rng.randint(0, 2)))

    def work(self, number: int) -> None:
        for task in self.ledger.lease("w", 4, number):
            if self.rng.random() < 0.6:
                salt = str(self.rng.random())
                self.ledger.submit([handed(answer(task, [number], salt=salt), "w", task.fence)])
        self.ledger.release("w")

    def judged(self, task: int) -> Scored:
        return Scored(task, error="raised") if self.rng.random() < 0.1 else Scored(task, [Reward(self.rng.random())])

    def claim(self, step: int) -> Batch | None:
        return self.ledger.claim(step, in_order=False)

    def train(self) -> None:
        """Claims a step ahead where it can, and commits a step now and then."""
        latest = self.latest()
        for step in (latest.step, latest.step + 1):
            if step == latest.step or latest.step in self.known:
                batch = self.claim(step)
                if batch is not None:
                    self.known.setdefault(step, kin(batch))
        for step, told in self.known.items():
            assert kin(self.claim(step)) == told
        if latest.step in self.known and self.rng.random() < 0.5:
            digest = f"{latest.step} {self.num_resumes}"
            self.ledger.commit(
                latest.step, version(self.ledger.next_version_number(), latest.step + 1, latest.number, digest)
            )

    def resume(self, step: int) -> None:
        self.num_resumes += 1
        resumed = self.ledger.reconcile(step, None, Arrival(from_scratch=True))
        assert resumed.parent is not None
        digest = self.ledger.version(resumed.parent).digest
        self.ledger.publish(version(self.ledger.next_version_number(), step, resumed.parent, digest))
        self.known = {claimed: told for claimed, told in self.known.items() if claimed <= step}


@settings(max_examples=25, deadline=None)
@given(bound=st.integers(0, 3), groups_per_step=st.integers(1, 7), rng=st.integers(0, 2**32).map(random.Random))
def test_whatever_happens_to_a_run_its_batches_know_what_they_knew_and_its_sums_hold(bound, groups_per_step, rng):
    with quick_folder() as folder:
        path = folder / "ledger.sqlite"
        with Ledger(path, LedgerTerms(min_group=2, max_staleness=bound, groups_per_step=groups_per_step)) as ledger:
            ledger.publish(version(0, 0))
            run = Run(ledger, rng, bound, groups_per_step)
            for _ in range(MAX_TURNS):
                run.turn()
                if run.latest().step == NUM_STEPS:
                    break
            assert run.latest().step == NUM_STEPS, f"it stands still: {ledger.waiting_for()}"
            assert ledger.counts().max_staleness_trained <= bound
            assert ledger.verify().violations == ()
