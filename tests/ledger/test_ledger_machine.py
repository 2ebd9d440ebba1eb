"""The ledger against its oracle, under any order of calls, reopenings and resumes."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from ledger_oracle import Oracle, OracleGroup
from ledger_run import answer, claim, eval_groups, new_groups, quick_folder, version

from offbeat.ledger import bodies, leasing
from offbeat.ledger.errors import Fenced, Forbidden, LedgerError
from offbeat.ledger.ledger import Ledger
from offbeat.ledger.records import Arrival, LedgerTerms, Outcome, Scored, Submission, derive_seed
from offbeat.rules.leases import Lease
from offbeat.trajectory import End, Reward, Task, Trajectory

WORKERS = st.sampled_from(["a", "b"])
CHANCE = st.integers(0, 2**32).map(random.Random)


class LedgerMachine(RuleBasedStateMachine):
    @initialize(
        bound=st.integers(0, 2), groups_per_step=st.sampled_from([None, 2]), max_no_signal=st.sampled_from([0, 1.5, 3])
    )
    def begin(self, bound: int, groups_per_step: int | None, max_no_signal: float):
        self._folder = quick_folder()
        self.path = self._folder.__enter__() / "ledger.sqlite"
        self.oracle = Oracle(2, 2, bound, groups_per_step, max_no_signal)
        self.given: list[tuple[Task, str]] = []
        """Every lease that was ever given, and to whom."""
        self.sent: list[Submission] = []
        self.num_answers = 0
        self.ledger = self.open()
        self.ledger.publish(version(0, 0))
        self.oracle.publish(0, 0)

    def open(self) -> Ledger:
        return Ledger(
            self.path,
            LedgerTerms(
                min_group=2,
                max_attempts=2,
                max_staleness=self.oracle.bound,
                groups_per_step=self.oracle.groups_per_step,
                max_no_signal=self.oracle.max_no_signal,
            ),
        )

    def teardown(self):
        if hasattr(self, "ledger"):
            self.ledger.close()
            self._folder.__exit__(None, None, None)

    # Groups and leases

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

    @rule(
        worker=WORKERS,
        capacity=st.integers(1, 20),
        back=st.integers(0, 2),
        total_slots=st.one_of(st.none(), st.integers(1, 60)),
    )
    def lease(self, worker: str, capacity: int, back: int, total_slots: int | None = None):
        have = max(0, self.oracle.latest - back)
        expected = self.oracle.lease(worker, capacity, have, total_slots)
        given = self.ledger.lease(worker, capacity, have, total_slots=total_slots)
        assert [(task.id, task.fence) for task in given] == [(task.id, task.fence) for task in expected]
        for leased, task in zip(given, expected, strict=True):
            group, _ = self.oracle.task(task.id)
            assert leased.seed == derive_seed(group.seed, group.tasks.index(task))
            assert leased.require_version == group.require_version
            assert leased.prefix == task.prefix
            self.given.append((leased, worker))

    @rule(rng=CHANCE, is_replayed=st.booleans())
    def fail(self, rng: random.Random, is_replayed: bool):
        leased = self.oracle.leased()
        if leased:
            task = rng.choice(leased)
            self.oracle.fail(task, "engine")
            for _ in range(1 + is_replayed):
                assert self.ledger.fail(task.worker or "", task.id, task.fence, "engine") == task.state

    @rule(rng=CHANCE)
    def fail_what_is_not_ones_own(self, rng: random.Random):
        if self.given:
            task = rng.choice(self.given)[0].id
            known = self.oracle.task(task)[1]
            for worker, fence, error in [
                (known.worker, known.fence - 1, Fenced),
                (known.worker, known.fence + 1, Forbidden),
                ("thief", known.fence, Forbidden),
            ]:
                with pytest.raises(error):
                    self.ledger.fail(worker or "", task, fence, "engine")

    @rule(worker=WORKERS)
    def lose_worker(self, worker: str):
        self.lose([task.id for task in self.oracle.leased(worker)])

    @rule(rng=CHANCE)
    def lose_some(self, rng: random.Random):
        self.lose([task.id for task in self.oracle.leased() if rng.random() < 0.5])

    def lose(self, numbers: list[int]):
        tasks = [self.oracle.task(number)[1] for number in numbers]
        leases = [Lease(task.id, task.fence, task.worker or "") for task in tasks]
        expected = self.oracle.lose(tasks)
        assert self.ledger.lose(leases) == expected
        assert self.ledger.lose(leases) == 0, "a lease is lost once"

    @rule(worker=WORKERS)
    def leave(self, worker: str):
        assert self.ledger.release(worker) == self.oracle.release(worker)

    @rule()
    def kill_and_reopen(self):
        self.ledger.close()
        self.ledger = self.open()
        leased = [Lease(task.id, task.fence, task.worker or "") for task in self.oracle.leased()]
        assert sorted(self.ledger.leased()) == leased
        assert self.ledger.release() == self.oracle.release()

    # What is handed in

    @rule(rng=CHANCE, count=st.integers(1, 4))
    def hand_in(self, rng: random.Random, count: int):
        """Anything that a worker may send, honest or not, several things in one call and some of them twice."""
        if self.given:
            self.send([submission for _ in range(count) for submission in self.something(rng)])

    def something(self, rng: random.Random) -> list[Submission]:
        if self.sent and rng.random() < 0.2:
            return [rng.choice(self.sent)]
        newest = [given for given in self.given if self.is_newest(given[0])]
        task, worker = rng.choice(newest if newest and rng.random() < 0.9 else self.given)
        submission = Submission(self.answer(rng, task), worker, task.fence)
        liar = rng.random()
        if liar < 0.05:
            submission = submission._replace(worker="thief")
        elif liar < 0.1:
            submission = submission._replace(fence=task.fence + rng.choice([-1, 1]))
        return [submission] * (2 if rng.random() < 0.1 else 1)

    def is_newest(self, task: Task) -> bool:
        return self.oracle.task(task.id)[1].fence == task.fence

    def answer(self, rng: random.Random, task: Task) -> Trajectory:
        group, _ = self.oracle.task(task.id)
        lowest = 0 if task.prefix is None else int(task.prefix.versions[-1])
        fitting = [n for n in self.oracle.living if group.require_step in (None, self.oracle.versions[n][0])]
        numbers = [n for n in (fitting if rng.random() < 0.9 else [*self.oracle.versions, 999]) if n >= lowest]
        if rng.random() < 0.05:
            task = replace(task, prefix=None)  # a worker that began anew
        versions = sorted(rng.choices(numbers, k=rng.randint(1, 2))) if numbers else []
        self.num_answers += 1
        end = None if rng.random() < 0.3 else End.STOP
        return answer(task, versions, salt=str(self.num_answers), end=end)

    def send(self, submissions: list[Submission]):
        expected = [self.oracle.hand_in(submission) for submission in submissions]
        outcomes = self.ledger.submit(submissions)
        assert [type(o) if isinstance(o, LedgerError) else o for o in outcomes] == expected
        self.sent += [s for s, o in zip(submissions, outcomes, strict=True) if isinstance(o, Outcome)]

    @rule(rng=CHANCE, is_old=st.booleans())
    def finish_everything(self, rng: random.Random, is_old: bool):
        """Chance alone would rarely see a group through."""
        self.lease(worker="a", capacity=1000, back=0)
        for task, worker in [given for given in self.given if self.is_newest(given[0])]:
            group, known = self.oracle.task(task.id)
            lowest = 0 if task.prefix is None else int(task.prefix.versions[-1])
            fitting = [n for n in self.oracle.living if group.require_step in (None, self.oracle.versions[n][0])]
            fitting = [n for n in fitting if n >= lowest]
            if fitting and known.state in ("open", "leased"):
                number = min(fitting) if is_old else max(fitting)
                self.send([Submission(answer(task, [number]), worker, task.fence)])
        self.score(rng=rng, count=100)

    @rule(rng=CHANCE, count=st.integers(0, 9))
    def score(self, rng: random.Random, count: int):
        waiting = self.ledger.unscored(100)
        accepted = {t.id for g in self.oracle.groups for t in g.having("accepted")}
        assert {u.task for u in waiting} == accepted
        results = []
        for u in waiting[:count]:
            _, task = self.oracle.task(u.task)
            assert task.whole is not None
            assert u.response_tokens.tolist() == task.whole.trajectory.tokens.tolist()
            task.reward = rng.choice([0.0, 0.5, 1.0, 1.0, 1.0, 1.0, 1.0, None])
            task.state, task.reason = ("failed", "reward") if task.reward is None else ("scored", None)
            results.append(Scored(u.task, None if task.reward is None else [Reward(task.reward)], None))
        num_dropped = self.oracle.num_dropped()
        self.oracle.settle()
        assert self.ledger.score(results) == (len(results), self.oracle.num_dropped() - num_dropped)
        assert self.ledger.score(results) == (0, 0)

    # Batches and resumes

    @rule(count=st.integers(1, 2), in_order=st.booleans(), is_ahead=st.booleans())
    def claim(self, count: int, in_order: bool, is_ahead: bool):
        step = self.oracle.claimable()[-1 if is_ahead else 0]
        expected = self.oracle.claim(step, count, in_order)
        batch = claim(self.ledger, step, count, self.oracle.bound, in_order=in_order)
        if expected is None:
            assert batch is None
            return
        assert batch is not None
        assert (batch.step, batch.from_version) == (step, self.oracle.latest if step == self.oracle.step else None)
        assert batch.num_no_signal == sum(group.dropped_at_step == step for group in self.oracle.groups)
        assert [group.group for group in batch.groups] == [group.id for group in expected]
        for got, group in zip(batch.groups, expected, strict=True):
            scored = group.having("scored")
            assert [m.task for m in got.members] == [t.id for t in scored]
            assert [m.reward for m in got.members] == [t.reward for t in scored]
            assert [m.staleness.tolist() for m in got.members] == [self.oracle.ages(t, step) for t in scored]
            for member, task in zip(got.members, scored, strict=True):
                assert task.whole is not None
                assert member.trajectory == task.whole.trajectory

    @precondition(lambda self: self.oracle.step in self.oracle.batches)
    @rule(is_told_twice=st.booleans(), rng=CHANCE)
    def commit(self, is_told_twice: bool, rng: random.Random):
        step, parent = self.oracle.step, self.oracle.latest
        made = version(self.ledger.next_version_number(), step + 1, parent)
        members = [task.id for group in self.oracle.batches[step][1] for task in group.having("scored")]
        audited = {task for task in members if rng.random() < 0.2}
        for _ in range(1 + is_told_twice):
            self.ledger.commit(step, made, sorted(audited))
        self.oracle.commit(made.number, audited)

    @rule(rng=CHANCE, num_steps=st.integers(1, 3), is_bound=st.booleans())
    def train(self, rng: random.Random, num_steps: int, is_bound: bool):
        """Whole steps in a row: chance alone would rarely come that far."""
        for _ in range(num_steps):
            self.admit(count=1, is_bound=is_bound)
            self.finish_everything(rng=rng, is_old=False)
            self.claim(count=1, in_order=is_bound, is_ahead=False)
            if self.oracle.step in self.oracle.batches:
                self.commit(is_told_twice=False, rng=rng)

    @rule(back=st.integers(0, 3), is_published=st.booleans())
    def resume(self, back: int, is_published: bool):
        step = max(0, self.oracle.step - back)
        resumed = self.ledger.reconcile(step, None, Arrival(from_scratch=True))
        self.oracle.reconcile(step)
        assert resumed.parent == self.oracle.latest
        assert resumed.replays_batch == (step in self.oracle.batches)
        if is_published:
            number = self.ledger.next_version_number()
            self.ledger.publish(version(number, step, resumed.parent))
            self.oracle.publish(number, step)

    @precondition(lambda self: self.oracle.step in self.oracle.batches)
    @rule()
    def resume_ahead_of_a_lost_commit(self):
        step = self.oracle.step
        resumed = self.ledger.reconcile(step + 1, None)
        assert (resumed.completed_step, resumed.parent) == (step, self.oracle.latest)
        number = self.ledger.next_version_number()
        self.ledger.publish(version(number, step + 1, resumed.parent))
        self.oracle.commit(number, set())

    # What must hold after every one of them

    @invariant()
    def the_ledger_agrees_with_the_oracle(self):
        if not hasattr(self, "ledger"):
            return
        groups, query = self.oracle.groups, self.ledger.execute
        columns = (
            "id, ordinal, seed, retry, reissue_of, require_step, require_version, first_step, state, reason, "
            "dropped_at_step"
        )
        assert query(f"SELECT {columns} FROM groups ORDER BY id").fetchall() == [
            tuple(getattr(group, name) for name in columns.split(", ")) for group in groups
        ]
        columns = "id, state, reason, worker, fence, num_failures, num_losses"
        assert query(f"SELECT {columns} FROM tasks ORDER BY id").fetchall() == [
            tuple(getattr(task, name) for name in columns.split(", ")) for group in groups for task in group.tasks
        ]
        columns = "state, reason, worker, fence"
        assert query(f"SELECT task, num_sampled_tokens, {columns} FROM partials ORDER BY task, seq").fetchall() == [
            (task.id, partial.num_tokens, *(getattr(partial, name) for name in columns.split(", ")))
            for group in groups
            for task in group.tasks
            for partial in task.partials
        ]
        drawn = {g.ordinal for g in groups if not g.is_eval}
        assert self.ledger.cursor().next_ordinal == len(drawn)

    @invariant()
    def every_token_has_its_place(self):
        if hasattr(self, "ledger"):
            assert self.ledger.counts().tokens == self.oracle.tokens()

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


def likely(rng: random.Random, share: float) -> bool:
    return rng.random() < share


CALLS = {
    "admit": (3, lambda rng: {"count": rng.randint(1, 2), "is_bound": likely(rng, 0.3)}),
    "evaluate": (1, lambda rng: {}),
    "lease": (
        5,
        lambda rng: {
            "worker": rng.choice("ab"),
            "capacity": rng.randint(1, 20),
            "back": rng.choice([0, 0, 0, 1, 2]),
            "total_slots": rng.choice([None, None, 20, 40]),
        },
    ),
    "hand_in": (8, lambda rng: {"rng": rng, "count": rng.randint(1, 6)}),
    "finish_everything": (1, lambda rng: {"rng": rng, "is_old": likely(rng, 0.5)}),
    "score": (5, lambda rng: {"rng": rng, "count": rng.randint(0, 20)}),
    "fail": (1, lambda rng: {"rng": rng, "is_replayed": likely(rng, 0.5)}),
    "fail_what_is_not_ones_own": (1, lambda rng: {"rng": rng}),
    "lose_worker": (2, lambda rng: {"worker": rng.choice("ab")}),
    "lose_some": (1, lambda rng: {"rng": rng}),
    "leave": (1, lambda rng: {"worker": rng.choice("ab")}),
    "kill_and_reopen": (1, lambda rng: {}),
    "claim": (
        5,
        lambda rng: {"count": rng.randint(1, 2), "in_order": likely(rng, 0.3), "is_ahead": likely(rng, 0.5)},
    ),
    "commit": (4, lambda rng: {"is_told_twice": likely(rng, 0.5), "rng": rng}),
    "train": (1, lambda rng: {"rng": rng, "num_steps": rng.randint(1, 3), "is_bound": likely(rng, 0.5)}),
    "resume": (1, lambda rng: {"back": rng.randint(0, 3), "is_published": likely(rng, 0.5)}),
    "resume_ahead_of_a_lost_commit": (0.3, lambda rng: {}),
}
"""How often each call comes in a long walk, and with what."""
WANT_A_BATCH = ("commit", "resume_ahead_of_a_lost_commit")


@pytest.mark.parametrize("seed", range(8))
def test_the_ledger_agrees_with_its_oracle_on_a_long_walk(seed: int, monkeypatch: pytest.MonkeyPatch):
    """Hypothesis finds small surprises; a weighted walk gets to histories with many steps and several resumes. On every
    other one most bodies are files, and the ledger looks at as few groups as it may before it looks at all."""
    monkeypatch.setattr(bodies, "MAX_ROW_BYTES", 193 if seed % 2 else bodies.MAX_ROW_BYTES)
    monkeypatch.setattr(leasing, "NUM_NEAR", 0 if seed % 2 else leasing.NUM_NEAR)
    rng = random.Random(seed)
    machine = LedgerMachine()
    machine.begin(bound=seed % 3, groups_per_step=None if seed < 4 else 2, max_no_signal=(0, 1, 2.5, 4)[seed % 4])
    try:
        for at in range(150):
            (name,) = rng.choices(list(CALLS), [weight for weight, _ in CALLS.values()])
            if name not in WANT_A_BATCH or machine.oracle.step in machine.oracle.batches:
                getattr(machine, name)(**CALLS[name][1](rng))
            machine.the_ledger_agrees_with_the_oracle()
            machine.every_token_has_its_place()
            machine.no_ordinal_is_trained_twice()
            if at % 10 == 9:
                machine.every_law_holds()
        assert machine.ledger.verify().violations == ()
        assert ("no_signal" in machine.ledger.counts().dropped_groups) == (seed % 4 > 0)
    finally:
        machine.teardown()
