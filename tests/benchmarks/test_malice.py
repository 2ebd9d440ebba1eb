"""The attack benchmark: who its adversaries are, and whose tokens it finds in a ledger."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from itertools import count
from pathlib import Path

import numpy as np
import pytest
from ledger_run import claim

from benchmarks.malice import adversary, forgers, members, strangers
from benchmarks.malice.account import Account, Trained, account
from benchmarks.malice.adversaries import ADVERSARIES
from benchmarks.malice.adversary import Adversary
from benchmarks.malice.arena import Outcome
from benchmarks.malice.verdicts import bars_of, found_out
from offbeat.ledger.ledger import Ledger
from offbeat.ledger.records import LedgerTerms, NewGroup, Scored, Submission
from offbeat.ledger.workers import Role, WorkerState, secret_hash
from offbeat.trajectory import End, Reward, Sampling, Segment, Task, Trajectory
from offbeat.weights.version import Version

ROOT = Path(__file__).parents[2]
BOUND = 1
HONEST, FORGER = "honest", "forger"
TARGETS = {
    "honest tokens/s, attacked over calm": 0.9,
    "coordinator's peak memory, attacked over calm": 1.5,
    "honest workers set aside": 0,
    "share of trained tokens that are forged": 0.01,
    "answers of one who forges a fifth, until it is set aside": 300,
    "broken laws of the ledger": 0,
    "honest workers' share of a core (the set-up counts)": 0.4,
}


def kinds_of(module) -> set[type[Adversary]]:
    """Adversaries that a module defines and that know how to attack: all but the bases of others."""
    found = {kind for kind in vars(module).values() if isinstance(kind, type) and issubclass(kind, Adversary)}
    return {kind for kind in found if not kind.__subclasses__()}


def test_every_adversary_is_listed_once_with_a_name_and_a_sentence_of_its_own():
    written = set.union(*map(kinds_of, (strangers, members, forgers)))
    assert set(ADVERSARIES) == written
    assert len(ADVERSARIES) == len(written) >= 30
    assert len({kind.title() for kind in ADVERSARIES}) == len({kind.attacks() for kind in ADVERSARIES}) == len(written)
    for kind in ADVERSARIES:
        assert kind.__dict__.get("__doc__"), f"{kind.__name__} does not say what it attacks"
        assert kind.attacks().endswith("."), kind.title()
        assert len(kind.attacks()) > len(kind.title()) + 20, kind.attacks()


def test_adversaries_are_bounded_in_number_and_pace():
    for kind in ADVERSARIES:
        assert kind.pause_s >= 0.05, kind.title()
        assert kind.max_attempts <= 1000, kind.title()
    assert {kind.num_tokens for kind in ADVERSARIES if issubclass(kind, adversary.Stranger)} == {0}


def test_forgers_alone_are_said_to_forge():
    assert {kind for kind in ADVERSARIES if kind.forges} == set(forgers.FORGERS)


def test_a_stranger_s_request_is_well_formed_unless_told_otherwise():
    whole = adversary.request("POST", "/v1/join", b"body").decode("latin-1")
    assert whole.startswith("POST /v1/join HTTP/1.1\r\n")
    assert "\r\nContent-Length: 4\r\n" in whole
    assert whole.endswith("\r\n\r\nbody")
    assert "Content-Length" not in adversary.request("POST", "/", b"", {"Content-Length": None}).decode("latin-1")


# A made-up ledger


class Life:
    """A ledger in which workers answer tasks of eight tokens, by a clock that tells one second more at every look."""

    def __init__(self, folder: Path, min_group: int = 1, max_attempts: int = 3):
        self.path, seconds = folder / "ledger.sqlite", count(1)
        self.ledger = Ledger(
            self.path,
            LedgerTerms(min_group=min_group, max_attempts=max_attempts, max_staleness=BOUND),
            wall_clock=lambda: float(next(seconds)),
        )
        self.ledger.reconcile(0, None)
        self.ledger.publish(Version(1, 0, None, "digest", Path("weights/1")))

    def draw(self, num_tasks: int) -> int:
        """A group; returns how many there were before."""
        ordinal = self.ledger.cursor().next_ordinal
        group = NewGroup(
            ordinal=ordinal,
            source="sums",
            source_ordinal=ordinal,
            prompt_tokens=np.array([1, 2], np.int32),
            problem={"prompt": "1+1=", "answer": "2", "info": {}},
            reward="number",
            seed=ordinal,
            size=num_tasks,
            sampling=Sampling(max_new_tokens=8, stop_token_ids=(0,)),
        )
        self.ledger.admit([group])
        return ordinal

    def hand_in(self, worker: str, num_tokens: int, *, is_whole: bool = True) -> int:
        """The next task, carried on by a worker by so many tokens; returns its number."""
        task, version = self.lease(worker), self.latest().number
        self.submit(task, worker, num_tokens, version, End.LENGTH if is_whole else None)
        if is_whole:
            self.ledger.score([Scored(task.id, [Reward(float(task.id))])])
        return task.id

    def latest(self) -> Version:
        latest = self.ledger.latest_version()
        assert latest is not None
        return latest

    def lease(self, worker: str) -> Task:
        [task] = self.ledger.lease(worker, 1, self.latest().number)
        return task

    def submit(self, task: Task, worker: str, num_tokens: int, version: int, end: End | None = End.LENGTH) -> None:
        trajectory = longer(task, worker, num_tokens, version, end)
        [outcome] = self.ledger.submit([Submission(trajectory, worker, task.fence)])
        assert not isinstance(outcome, Exception), outcome

    def train(self, audited: tuple[int, ...] = (), bound: int = BOUND) -> None:
        """One step of one group."""
        latest = self.latest()
        assert claim(self.ledger, latest.step, 1, bound) is not None
        number = latest.number + 1
        made = Version(number, latest.step + 1, latest.number, f"digest {number}", Path(f"weights/{number}"))
        self.ledger.commit(latest.step, made, audited)

    def ask(self, query: str) -> list:
        with closing(sqlite3.connect(self.path)) as db:
            return [value for (value,) in db.execute(query)]

    def account(self, since: float = 0.0, until: float = 1e9) -> Account:
        self.ledger.close()
        return account(self.path, {HONEST}, {FORGER}, since, until)


def longer(task: Task, worker: str, num_tokens: int, version: int, end: End | None) -> Trajectory:
    trajectory = task.new_trajectory() if task.prefix is None else Trajectory.decode(task.prefix.encode())
    tokens, logprobs = np.full(num_tokens, 5), np.full(num_tokens, -1.0)
    segment = Segment(
        trajectory.num_tokens, tokens, logprobs=logprobs, version=version, kv_version=version, worker=worker
    )
    trajectory.append(segment, end)
    return trajectory


@pytest.fixture
def life(tmp_path: Path) -> Life:
    return Life(tmp_path)


def by_one_worker(life: Life) -> None:
    life.draw(2)
    life.hand_in(HONEST, 8)
    life.hand_in(FORGER, 8)
    life.train()


def forged_beginning(life: Life) -> None:
    life.draw(1)
    life.hand_in(FORGER, 3, is_whole=False)
    life.hand_in(HONEST, 5)
    life.train()


def forged_end(life: Life) -> None:
    life.draw(1)
    life.hand_in(HONEST, 2, is_whole=False)
    life.hand_in(FORGER, 1, is_whole=False)
    life.hand_in(FORGER, 5)
    life.train()


def found_by_the_audit(life: Life) -> None:
    life.draw(2)
    life.hand_in(HONEST, 8)
    life.train(audited=(life.hand_in(FORGER, 8),))


def never_trained(life: Life) -> None:
    life.draw(1)
    life.hand_in(HONEST, 8)
    life.train()
    life.draw(1)
    life.hand_in(FORGER, 8)


def too_old_in_part(life: Life) -> None:
    life.draw(1)
    life.hand_in(HONEST, 8)
    life.draw(1)
    life.hand_in(FORGER, 4, is_whole=False)
    life.train()
    life.hand_in(HONEST, 4)
    life.train(bound=0)  # what the forger began is a step old


@pytest.mark.parametrize(
    "events, num_tokens, num_forged",
    [
        (by_one_worker, 16, 8),
        (forged_beginning, 8, 3),
        (forged_end, 8, 6),
        (found_by_the_audit, 8, 0),
        (never_trained, 8, 0),
        (too_old_in_part, 12, 0),
    ],
)
def test_trained_tokens_are_counted_as_their_author_s(
    life: Life, events: Callable[[Life], None], num_tokens: int, num_forged: int
):
    events(life)
    found = life.account()
    assert found.trained == Trained(num_tokens, num_forged)
    assert found.trained.forged_share == num_forged / num_tokens
    assert found.violations == ()


def test_steps_before_the_window_do_not_count(life: Life):
    by_one_worker(life)
    by_one_worker(life)
    [first, _] = life.ask("SELECT trained_at FROM batches ORDER BY step")
    found = life.account(since=first + 1)
    assert found.trained == Trained(16, 8)
    assert found.num_steps == 1


def test_honest_tokens_are_those_that_honest_workers_got_accepted_and_may_be_trained(tmp_path: Path):
    life = Life(tmp_path, min_group=2, max_attempts=1)
    life.draw(3)
    life.hand_in(FORGER, 3, is_whole=False)
    life.hand_in(HONEST, 5)  # counts, without what it carried on
    life.hand_in(HONEST, 8)  # counts
    unjudged = life.lease(HONEST)
    life.submit(unjudged, HONEST, 8, version=1)
    life.ledger.score([Scored(unjudged.id, error="the reward failed")])
    life.train()
    life.draw(2)
    life.train(audited=(life.hand_in(HONEST, 8), life.hand_in(FORGER, 8)))  # was not believed
    life.draw(2)
    life.hand_in(HONEST, 8)
    task = life.lease(FORGER)
    life.ledger.fail(FORGER, task.id, task.fence, "engine")  # its sibling is lost with it
    [ended] = life.ask("SELECT MAX(accepted_at) FROM trajectories")
    life.draw(2)
    life.hand_in(HONEST, 8)  # after the window
    assert life.account(until=ended).honest_tokens == 5 + 8


def test_workers_that_were_set_aside_and_what_they_had_handed_in_are_told(life: Life):
    by_one_worker(life)
    ledger = life.ledger
    for name in (HONEST, FORGER):
        ledger.redeem(ledger.issue_token(Role.ROLLOUT, 5), f"{name}-2", {}, secret_hash(name))
    ledger.move_worker(f"{FORGER}-2", WorkerState.QUARANTINED, "because")
    ledger.move_worker(f"{HONEST}-2", WorkerState.LEFT)
    found = life.account()
    assert found.set_aside == {f"{FORGER}-2": "quarantined: because"}
    assert found.submissions == {HONEST: 1, FORGER: 1}


# Verdicts


def outcome(num_answers: int = 0, set_aside: tuple[str, ...] = (), *, tokens: int = 600, forged: int = 0) -> Outcome:
    """A run in which `worker` is the one who forges a fifth."""
    found = Account(
        trained=Trained(1000, forged),
        honest_tokens=tokens,
        set_aside=dict.fromkeys(set_aside, "quarantined"),
        submissions={"worker": num_answers},
        violations=(),
        num_steps=1,
    )
    forger = {"name": forgers.ForgesAFifth.title(), "worker": "worker", "answers": {"201": 1}, "broken": ""}
    return Outcome(
        is_attacked=True,
        seconds=60.0,
        peak_bytes=10**8,
        honest_share=0.3,
        coordinator_share=0.1,
        account=found,
        adversaries=[forger | {"attempts": 1, "attacks": "", "forges": True}],
    )


@pytest.mark.parametrize(
    "attacked, holds",
    [
        ([outcome(120, ("worker",)), outcome(300, ("worker",))], True),
        ([outcome(120, ("worker",)), outcome(301, ("worker",))], False),
        ([outcome(120, ("worker",)), outcome(301)], False),
        ([outcome(120, ("worker",)), outcome(80)], None),
    ],
)
def test_a_forger_is_found_out_in_time_too_late_or_not_yet(attacked: list[Outcome], holds: bool | None):
    assert found_out(attacked).holds is holds


def test_one_forged_run_or_one_honest_worker_set_aside_misses_the_bar():
    calm = [outcome(), outcome(), outcome()]
    bars = bars_of(calm, [outcome(), outcome(), outcome(set_aside=("honest-2",), forged=11)], quick=False)
    held = {name for name, bar in bars.items() if bar.holds}
    assert {"honest workers set aside", "share of trained tokens that are forged"}.isdisjoint(held)
    assert "honest tokens/s, attacked over calm" in held


def test_a_quick_run_shows_what_is_wrong_and_never_that_nothing_is():
    good = bars_of([outcome()], [outcome(10, ("worker",))], quick=True)
    assert {bar.holds for name, bar in good.items() if "set-up" not in name} == {None}
    bad = bars_of([outcome()], [outcome(10, ("honest-1",), tokens=60)], quick=True)
    missed = {name for name, bar in bad.items() if bar.holds is False}
    assert missed == {"honest workers set aside", "honest tokens/s, attacked over calm"}


@pytest.mark.full
@pytest.mark.timeout(600)
def test_the_quick_form_prints_its_bars_and_no_adversary_stumbles():
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.malice", "--quick"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        timeout=540,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    line = json.loads(done.stdout.splitlines()[-1])
    assert line["benchmark"] == "malice"
    assert {name: bar["target"] for name, bar in line["bars"].items()} == TARGETS
    [attacked] = line["attacked"]
    assert [told["name"] for told in attacked["adversaries"]] == [kind.title() for kind in ADVERSARIES]
    assert {told["broken"] for told in attacked["adversaries"]} == {""}
