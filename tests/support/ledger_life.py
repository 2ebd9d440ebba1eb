"""A whole run in small: admit, generate, score, claim, train, commit, checkpoint, until it is killed or done.

Generation is exact and rewards fail for some tokens, always for the same ones. So a run killed anywhere, any number of
times, must train the same data in the same order as one that nobody disturbed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from ledger_run import data_of, generate, new_groups, reward_of, train, version

from offbeat.ledger.ledger import Ledger
from offbeat.ledger.records import LedgerTerms, Scored, Submission, Unscored
from offbeat.rules.groups import AdmissionTarget, admit
from offbeat.trajectory import Reward

GROUPS_PER_STEP, NUM_STEPS = 2, 6


@dataclass
class Disk:
    """What survives a kill: the ledger's file, the checkpoint, and the record of what was trained."""

    path: Path
    checkpoint: tuple[int, int | None, str] = (0, None, "initial weights")
    """Step, version and weights."""
    trained: dict[int, list] = field(default_factory=dict)

    def save(self, step: int, number: int, weights: str) -> None:
        self.checkpoint = (step, number, weights)


def live(
    disk: Disk,
    *,
    save_every: int,
    saves_before_commit: bool,
    capacity: int,
    order: int,
    max_no_signal: float = 0,
    open_ledger: Callable[..., Ledger] = Ledger,
) -> Iterator[None]:
    """One life of a run: a kill may come at each `yield`."""
    with open_ledger(
        disk.path, LedgerTerms(GROUPS_PER_STEP, min_group=2, max_attempts=2, max_no_signal=max_no_signal)
    ) as ledger:
        ledger.release()
        yield
        step, saved_version, weights = disk.checkpoint
        resumed = ledger.reconcile(step, saved_version)
        yield
        number = ledger.next_version_number()
        ledger.publish(version(number, resumed.step, resumed.parent, digest=weights))
        yield
        while step < NUM_STEPS:
            while (batch := ledger.claim(step)) is None:
                yield from generate_some(ledger, number, weights, capacity, order)
            yield
            weights = train(weights, batch)
            disk.trained[step] = data_of(batch)
            parent, number = number, ledger.next_version_number()
            is_due = (step + 1) % save_every == 0
            if is_due and saves_before_commit:
                disk.save(step + 1, number, weights)
                yield
            ledger.commit(step, version(number, step + 1, parent, digest=weights))
            yield
            if is_due and not saves_before_commit:
                disk.save(step + 1, number, weights)
                yield
            step += 1
        disk.trained[NUM_STEPS] = [weights]
        assert ledger.verify().violations == ()


def generate_some(ledger: Ledger, number: int, weights: str, capacity: int, order: int) -> Iterator[None]:
    count = admit(ledger.admission_state(), AdmissionTarget(GROUPS_PER_STEP, NUM_STEPS))
    if count:
        ledger.admit(new_groups(ledger, count, size=3, require_version=number))
        yield
    tasks = ledger.lease("w", capacity, number)
    yield
    for task in sorted(tasks, key=lambda task: task.seed * order % 1009):
        ledger.submit([Submission(generate(task, weights, [number]), "w", task.fence)])
        yield
    ledger.score([judge(waiting) for waiting in ledger.unscored(10_000)])
    yield


def judge(waiting: Unscored) -> Scored:
    if int(waiting.response_tokens.sum()) % 10 < 4:
        return Scored(waiting.task, error="cannot be judged")
    return Scored(waiting.task, [Reward(reward_of(waiting.response_tokens))])


def undisturbed(path: Path, max_no_signal: float = 0) -> dict[int, list]:
    disk = Disk(path)
    for _ in live(disk, save_every=2, saves_before_commit=False, capacity=100, order=1, max_no_signal=max_no_signal):
        pass
    return disk.trained
