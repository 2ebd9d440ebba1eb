"""Whole runs in small whose groups wait for their step: whatever happens to workers and trainer, a run gets to its end
within its bound, whether work never stops or comes in rounds."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st
from ledger_run import answer, handed, new_groups, quick_folder, reward_of, version

from offbeat.ledger.ledger import Ledger
from offbeat.ledger.records import Arrival, LedgerTerms, Outcome, Scored
from offbeat.rules.groups import AdmissionTarget, admit
from offbeat.rules.leases import Lease
from offbeat.trajectory import End, Reward, Task

NUM_STEPS = 8
MAX_TURNS = 3000
"""Far more than any of these runs takes: one that needs them all stands still."""


@dataclass
class Worker:
    name: str
    version: int
    tasks: list[Task] = field(default_factory=list)


@dataclass
class Run:
    """A coordinator, a trainer and workers that take turns as chance has it."""

    ledger: Ledger
    rng: random.Random
    bound: int
    groups_per_step: int
    is_calm: bool
    """Nobody vanishes or fails, and the trainer never resumes."""
    factor: float
    """Groups under way over those that a step trains."""
    workers: list[Worker] = field(default_factory=list)
    claimed: set[int] = field(default_factory=set)
    num_resumes: int = 0

    def step(self) -> int:
        latest = self.ledger.latest_version()
        assert latest is not None
        return latest.step

    def turn(self) -> None:
        self.draw()
        for worker in self.workers:
            self.work(worker)
        self.judge()
        self.train()
        if not self.is_calm and self.rng.random() < 0.03 and self.num_resumes < 3:
            self.resume()

    def draw(self) -> None:
        count = admit(self.ledger.admission_state(), AdmissionTarget(self.groups_per_step, NUM_STEPS, self.factor))
        self.ledger.admit(new_groups(self.ledger, count, size=2, require_version=None))

    def work(self, worker: Worker) -> None:
        latest = self.ledger.latest_version()
        assert latest is not None
        if self.ledger.terms.in_rounds and self.ledger.current_round() is None:
            self.stop(worker)
            return
        if self.rng.random() < 0.3:
            worker.version = latest.number
        slots = sum(3 for _ in self.workers)
        given = self.ledger.lease(worker.name, 3 - len(worker.tasks), worker.version, total_slots=slots)
        if not given:
            worker.version = latest.number  # what a coordinator hands to one for whom it has nothing
        worker.tasks += given
        if not self.is_calm and self.rng.random() < 0.05:
            self.vanish(worker)
        for task in [task for task in worker.tasks if self.rng.random() < 0.4]:
            worker.tasks.remove(task)
            self.hand_in(worker, task)

    def stop(self, worker: Worker) -> None:
        """The round is over: what has a token is handed back, what has none is given back, and nothing is begun."""
        if self.rng.random() < 0.2:
            return  # it has not heard of it yet
        for task in worker.tasks:
            if self.rng.random() < 0.3:
                self.ledger.give_back([Lease(task.id, task.fence, worker.name)], untouched=True)
            else:
                self.hand_back(worker, task)
        worker.tasks.clear()
        assert self.ledger.lease(worker.name, 3, worker.version) == []

    def hand_back(self, worker: Worker, task: Task) -> None:
        sent = answer(task, [worker.version], salt=str(self.rng.random()), worker=worker.name, end=None)
        (outcome,) = self.ledger.submit([handed(sent, worker.name, task.fence)])
        if not isinstance(outcome, Outcome):
            assert not self.is_calm, outcome
            self.ledger.release(worker.name)

    def hand_in(self, worker: Worker, task: Task) -> None:
        if not self.is_calm and self.rng.random() < 0.1:
            self.ledger.fail(worker.name, task.id, task.fence, "engine")
            return
        end = None if self.rng.random() < 0.2 else End.STOP
        sent = answer(task, [worker.version], salt=str(self.rng.random()), worker=worker.name, end=end)
        (outcome,) = self.ledger.submit([handed(sent, worker.name, task.fence)])
        if not isinstance(outcome, Outcome):
            assert not self.is_calm, outcome
            self.ledger.release(worker.name)
            worker.tasks.clear()

    def vanish(self, worker: Worker) -> None:
        self.ledger.lose([held for held in self.ledger.leased() if held.worker == worker.name])
        worker.tasks.clear()

    def judge(self) -> None:
        waiting = [u for u in self.ledger.unscored(1000) if self.rng.random() < 0.6]
        self.ledger.score([Scored(u.task, [Reward(reward_of(u.response_tokens))]) for u in waiting])

    def train(self) -> None:
        """Claims a step ahead where it can, and commits a step now and then."""
        step = self.step()
        for wanted in (step,) if self.ledger.terms.in_rounds else (step, step + 1):
            if wanted not in self.claimed and wanted < NUM_STEPS and (wanted == step or step in self.claimed):
                batch = self.ledger.claim(wanted, in_order=False)
                self.claimed |= {wanted} if batch is not None else set()
        if step in self.claimed and self.rng.random() < 0.5:
            latest = self.ledger.latest_version()
            assert latest is not None
            made = version(self.ledger.next_version_number(), step + 1, latest.number, f"{step} {self.num_resumes}")
            self.ledger.commit(step, made)

    def resume(self) -> None:
        step = max(0, self.step() - self.rng.randint(0, 2))
        self.num_resumes += 1
        resumed = self.ledger.reconcile(step, None, Arrival(from_scratch=True))
        assert resumed.parent is not None
        digest = self.ledger.version(resumed.parent).digest
        self.ledger.publish(version(self.ledger.next_version_number(), step, resumed.parent, digest))
        self.claimed = {s for s in self.claimed if s < step} | ({step} if resumed.replays_batch else set())


@settings(max_examples=40, deadline=None)
@given(
    bound=st.integers(0, 3),
    groups_per_step=st.integers(1, 3),
    num_workers=st.integers(1, 3),
    share=st.sampled_from([0.0, 0.4, 1.0]),
    stops=st.booleans(),
    is_calm=st.booleans(),
    rng=st.integers(0, 2**32).map(random.Random),
)
def test_a_run_ends_within_its_bound_whatever_happens(bound, groups_per_step, num_workers, share, stops, is_calm, rng):
    with quick_folder() as folder:
        ledger = Ledger(
            folder / "ledger.sqlite",
            LedgerTerms(
                min_group=1, max_attempts=3, max_staleness=bound, groups_per_step=groups_per_step, in_rounds=stops
            ),
        )
        with ledger:
            ledger.publish(version(0, 0))
            run = Run(ledger, rng, bound, groups_per_step, is_calm, 1 + share * bound)
            run.workers = [Worker(f"w{i}", 0) for i in range(num_workers)]
            for _ in range(MAX_TURNS):
                run.turn()
                if run.step() == NUM_STEPS:
                    break
            assert run.step() == NUM_STEPS, f"it stands still: {ledger.waiting_for()}"
            counts = ledger.counts()
            assert counts.max_staleness_trained <= bound
            assert counts.groups["trained"] == NUM_STEPS * groups_per_step
            if is_calm:
                assert counts.dropped_groups == {}
                assert counts.tokens.masked["stale"] == 0, "a token was trained too late"
            assert ledger.verify().violations == ()
