"""The ledger against its oracle, under any order of calls, reopenings and resumes."""

from __future__ import annotations

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from ledger_oracle import Oracle, OracleGroup, OracleTask
from ledger_run import answer, eval_groups, new_groups, quick_folder, version

from offbeat.ledger.errors import Conflict, Refused
from offbeat.ledger.ledger import Ledger
from offbeat.ledger.records import Outcome, Scored, derive_seed
from offbeat.trajectory import Reward, Task

WORKERS = st.sampled_from(["a", "b"])
CHANCE = st.integers(0, 2**32).map(random.Random)


class LedgerMachine(RuleBasedStateMachine):
    @initialize(bound=st.integers(0, 2))
    def begin(self, bound: int):
        self._folder = quick_folder()
        self.path = self._folder.__enter__() / "ledger.sqlite"
        self.oracle = Oracle(min_group=2, max_attempts=2, bound=bound)
        self.issued: dict[int, Task] = {}
        self.num_answers = 0
        self.ledger = Ledger(self.path, min_group=2, max_attempts=2)
        self.ledger.publish(version(0, 0))
        self.oracle.publish(0, 0)

    def teardown(self):
        if hasattr(self, "ledger"):
            self.ledger.close()
            self._folder.__exit__(None, None, None)

    # Calls

    @rule(count=st.integers(1, 2), is_bound=st.booleans())
    def admit(self, count: int, is_bound: bool):
        number = self.oracle.latest if is_bound else None
        groups = new_groups(self.ledger, count, size=3, require_version=number)
        for group_id, group in zip(self.ledger.admit(groups), groups, strict=True):
            step = self.oracle.step if is_bound else None
            self.oracle.add(OracleGroup(group_id, group.ordinal, group.seed, step, number), 3)

    @rule()
    def evaluate(self):
        if self.ledger.eval_round(self.oracle.step) is None:
            (group,) = groups = eval_groups(1, size=2, require_version=self.oracle.latest)
            (group_id,) = self.ledger.admit(groups)
            number, step = self.oracle.latest, self.oracle.step
            self.oracle.add(OracleGroup(group_id, 0, group.seed, step, number, is_eval=True), 2)

    @rule(worker=WORKERS, capacity=st.integers(1, 6), has_latest=st.booleans())
    def lease(self, worker: str, capacity: int, has_latest: bool):
        have = self.oracle.latest if has_latest else 0
        expected = self.oracle.leasable(capacity, have)
        tasks = self.ledger.lease(worker, capacity, have)
        assert [task.id for task in tasks] == [task.id for task in expected]
        for given, task in zip(tasks, expected, strict=True):
            group, _ = self.oracle.task(task.id)
            assert given.seed == derive_seed(group.seed, group.tasks.index(task))
            assert given.require_version == group.require_version
            self.issued[task.id] = given
            task.state, task.worker = "leased", worker

    def pick(self, rng: random.Random, *states: str) -> tuple[OracleGroup, OracleTask] | None:
        """One of the tasks that were handed out once and are in one of the states."""
        ids = sorted(number for number in self.issued if self.oracle.task(number)[1].state in states)
        return self.oracle.task(rng.choice(ids)) if ids else None

    def fitting_versions(self, group: OracleGroup) -> list[int]:
        living = self.oracle.living
        if group.require_step is None:
            return living
        return [number for number in living if self.oracle.versions[number][0] == group.require_step]

    @rule(rng=CHANCE, count=st.integers(1, 4))
    def submit(self, rng: random.Random, count: int):
        batch = []
        for _ in range(count):
            found = self.pick(rng, "leased", "open")
            if found is None or found[1].id in [task.id for task, _ in batch]:
                continue
            group, task = found
            fitting = self.fitting_versions(group)
            if not fitting:
                continue
            versions = sorted(rng.choices(fitting, k=rng.randint(1, 2)))
            self.num_answers += 1
            batch.append((task, answer(self.issued[task.id], versions, salt=str(self.num_answers))))
        sent = [(trajectory, task.worker or "late") for task, trajectory in batch]
        assert self.ledger.submit(sent) == [Outcome.STORED] * len(batch)
        for task, trajectory in batch:
            task.state, task.worker, task.trajectory = "accepted", None, trajectory

    @rule(rng=CHANCE, is_old=st.booleans())
    def finish_everything(self, rng: random.Random, is_old: bool):
        """Chance alone would rarely see a group through."""
        self.lease(worker="a", capacity=100, has_latest=True)
        for group in list(self.oracle.groups):
            fitting = self.fitting_versions(group)
            for task in [t for t in group.having("leased", "open") if t.id in self.issued]:
                number = min(fitting) if is_old else max(fitting)
                trajectory = answer(self.issued[task.id], [number])
                assert self.ledger.submit([(trajectory, task.worker or "late")]) == [Outcome.STORED]
                task.state, task.worker, task.trajectory = "accepted", None, trajectory
        self.score(rng=rng, count=100)

    @rule(rng=CHANCE)
    def submit_late(self, rng: random.Random):
        found = self.pick(rng, "dropped", "failed")
        if found is not None and found[1].trajectory is None:
            task = found[1]
            trajectory = answer(self.issued[task.id], [rng.choice(sorted(self.oracle.versions))])
            assert self.ledger.submit([(trajectory, "a")]) == [Outcome.LATE]
            task.trajectory = trajectory

    @rule(rng=CHANCE, is_other=st.booleans())
    def submit_again(self, rng: random.Random, is_other: bool):
        ids = sorted(number for number in self.issued if self.oracle.task(number)[1].trajectory is not None)
        if not ids:
            return
        _, task = self.oracle.task(rng.choice(ids))
        assert task.trajectory is not None
        if not is_other:
            assert self.ledger.submit([(task.trajectory, "a")]) == [Outcome.REPEATED]
            return
        other = answer(self.issued[task.id], [task.steps[0][1]], salt="another")
        assert isinstance(self.ledger.submit([(other, "a")])[0], Conflict)

    @rule(rng=CHANCE)
    def submit_from_an_unfit_version(self, rng: random.Random):
        found = self.pick(rng, "leased", "open")
        if found is None:
            return
        unfit = sorted(set(self.oracle.versions) - set(self.fitting_versions(found[0])))
        number = rng.choice([*unfit, 999])
        sent = answer(self.issued[found[1].id], [number])
        assert isinstance(self.ledger.submit([(sent, found[1].worker or "a")])[0], Refused)

    @rule(rng=CHANCE, count=st.integers(0, 9))
    def score(self, rng: random.Random, count: int):
        waiting = self.ledger.unscored(100)
        accepted = {t.id for g in self.oracle.groups for t in g.having("accepted")}
        assert {u.task for u in waiting} == accepted
        results = []
        for u in waiting[:count]:
            _, task = self.oracle.task(u.task)
            assert task.trajectory is not None
            assert u.response_tokens.tolist() == task.trajectory.tokens.tolist()
            task.reward = rng.choice([0.0, 0.5, 1.0, 1.0, 1.0, 1.0, 1.0, None])
            task.state = "failed" if task.reward is None else "scored"
            results.append(Scored(u.task, None if task.reward is None else [Reward(task.reward)], None))
        assert self.ledger.score(results) == len(results)
        assert self.ledger.score(results) == 0
        self.oracle.settle()

    @rule(rng=CHANCE)
    def fail(self, rng: random.Random):
        found = self.pick(rng, "leased")
        if found is not None:
            self.oracle.fail(found[1])
            assert self.ledger.fail(found[1].id, "engine") == found[1].state
            self.oracle.settle()

    @rule(worker=WORKERS)
    def lose_worker(self, worker: str):
        lost = [t for g in self.oracle.groups for t in g.having("leased") if t.worker == worker]
        for task in lost:
            self.oracle.fail(task)
        assert self.ledger.release(worker) == len(lost)
        self.oracle.settle()

    @rule()
    def kill_and_reopen(self):
        self.ledger.close()
        self.ledger = Ledger(self.path, min_group=2, max_attempts=2)
        leased = [t for g in self.oracle.groups for t in g.having("leased")]
        for task in leased:
            task.state, task.worker = "open", None
        assert self.ledger.release() == len(leased)

    @rule(count=st.integers(1, 2))
    def claim(self, count: int):
        step = self.oracle.step
        expected = self.oracle.claim(count)
        batch = self.ledger.claim(step, count, self.oracle.bound)
        if expected is None:
            assert batch is None
            return
        assert batch is not None
        assert (batch.step, batch.from_version) == (step, self.oracle.latest)
        assert [group.group for group in batch.groups] == [group.id for group in expected]
        for got, group in zip(batch.groups, expected, strict=True):
            scored = group.having("scored")
            assert [m.task for m in got.members] == [t.id for t in scored]
            assert [m.reward for m in got.members] == [t.reward for t in scored]
            assert [m.mask.tolist() for m in got.members] == [self.oracle.mask(t, step) for t in scored]
            assert all(m.trajectory == t.trajectory for m, t in zip(got.members, scored, strict=True))

    @precondition(lambda self: self.oracle.step in self.oracle.batches)
    @rule(is_told_twice=st.booleans())
    def commit(self, is_told_twice: bool):
        step, parent = self.oracle.step, self.oracle.latest
        made = version(self.ledger.next_version_number(), step + 1, parent)
        self.ledger.commit(step, made)
        self.oracle.commit(made.number)
        if is_told_twice:
            self.ledger.commit(step, made)

    @rule(rng=CHANCE, num_steps=st.integers(1, 3), is_bound=st.booleans())
    def train(self, rng: random.Random, num_steps: int, is_bound: bool):
        """Whole steps in a row: chance alone would rarely come that far."""
        for _ in range(num_steps):
            self.admit(count=1, is_bound=is_bound)
            self.finish_everything(rng=rng, is_old=False)
            self.claim(count=1)
            if self.oracle.step in self.oracle.batches:
                self.commit(is_told_twice=False)

    @rule(back=st.integers(0, 3), is_published=st.booleans())
    def resume(self, back: int, is_published: bool):
        step = max(0, self.oracle.step - back)
        resumed = self.ledger.reconcile(step, None)
        self.oracle.reconcile(step)
        assert resumed.parent == self.oracle.latest
        assert resumed.replays_batch == (step in self.oracle.batches)
        if is_published:
            number = self.ledger.next_version_number()
            self.ledger.publish(version(number, step, resumed.parent))
            self.oracle.publish(number, step)

    # What must hold after every one of them

    @invariant()
    def the_ledger_agrees_with_the_oracle(self):
        if not hasattr(self, "ledger"):
            return
        rows = self.ledger._db.execute(
            "SELECT id, ordinal, seed, retry, reissue_of, require_step, require_version, state, reason FROM groups"
        ).fetchall()
        expected = [
            (g.id, g.ordinal, g.seed, g.retry, g.reissue_of, g.require_step, g.require_version, g.state, g.reason)
            for g in self.oracle.groups
        ]
        assert sorted(rows) == sorted(expected)
        tasks = self.ledger._db.execute("SELECT id, group_id, state, worker FROM tasks ORDER BY id").fetchall()
        assert tasks == [(t.id, g.id, t.state, t.worker) for g in self.oracle.groups for t in g.tasks]
        drawn = {g.ordinal for g in self.oracle.groups if not g.is_eval}
        assert self.ledger.cursor().next_ordinal == len(drawn)

    @invariant()
    def every_law_holds(self):
        if hasattr(self, "ledger"):
            assert self.ledger.verify(with_bodies=False).violations == ()

    @invariant()
    def no_ordinal_is_trained_twice(self):
        if hasattr(self, "ledger"):
            trained = [g.ordinal for _, groups in self.oracle.batches.values() for g in groups]
            assert len(trained) == len(set(trained))


TestLedgerMachine = LedgerMachine.TestCase
TestLedgerMachine.settings = settings(max_examples=15, stateful_step_count=30, deadline=None)


CALLS = {
    "admit": (3, lambda rng: {"count": rng.randint(1, 2), "is_bound": rng.random() < 0.5}),
    "evaluate": (1, lambda rng: {}),
    "lease": (
        4,
        lambda rng: {"worker": rng.choice("ab"), "capacity": rng.randint(1, 9), "has_latest": rng.random() < 0.9},
    ),
    "submit": (5, lambda rng: {"rng": rng, "count": rng.randint(1, 9)}),
    "finish_everything": (1, lambda rng: {"rng": rng, "is_old": rng.random() < 0.5}),
    "submit_late": (1, lambda rng: {"rng": rng}),
    "submit_again": (1, lambda rng: {"rng": rng, "is_other": rng.random() < 0.5}),
    "submit_from_an_unfit_version": (1, lambda rng: {"rng": rng}),
    "score": (5, lambda rng: {"rng": rng, "count": rng.randint(0, 20)}),
    "fail": (1, lambda rng: {"rng": rng}),
    "lose_worker": (1, lambda rng: {"worker": rng.choice("ab")}),
    "kill_and_reopen": (1, lambda rng: {}),
    "claim": (4, lambda rng: {"count": rng.randint(1, 2)}),
    "commit": (4, lambda rng: {"is_told_twice": rng.random() < 0.5}),
    "train": (1, lambda rng: {"rng": rng, "num_steps": rng.randint(1, 3), "is_bound": rng.random() < 0.5}),
    "resume": (1, lambda rng: {"back": rng.randint(0, 3), "is_published": rng.random() < 0.5}),
}
"""How often each call comes in a long walk, and with what."""


@pytest.mark.parametrize("seed", range(6))
def test_the_ledger_agrees_with_its_oracle_on_a_long_walk(seed: int):
    """Hypothesis finds small surprises; a weighted walk gets to histories with many steps and several resumes."""
    rng = random.Random(seed)
    machine = LedgerMachine()
    machine.begin(bound=seed % 3)
    try:
        for at in range(150):
            (name,) = rng.choices(list(CALLS), [weight for weight, _ in CALLS.values()])
            if name != "commit" or machine.oracle.step in machine.oracle.batches:
                getattr(machine, name)(**CALLS[name][1](rng))
            machine.the_ledger_agrees_with_the_oracle()
            machine.no_ordinal_is_trained_twice()
            if at % 10 == 9:
                machine.every_law_holds()
        assert machine.ledger.verify().violations == ()
    finally:
        machine.teardown()
