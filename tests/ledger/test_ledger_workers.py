"""Join tokens, workers and their secrets: one use, hashes only, and seen at once by every process."""

import multiprocessing
import sqlite3
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ledger_run import new_groups

from offbeat.errors import UserError
from offbeat.ledger.errors import Forbidden, Unknown
from offbeat.ledger.ledger import Ledger
from offbeat.ledger.workers import MOVES, NAME, Role, WorkerState, new_secret, secret_hash

ACTIVE, LEFT, QUARANTINED, REVOKED = WorkerState
MINUTES = 15


class Clock:
    def __init__(self) -> None:
        self.now_s = 1_000_000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def timed(tmp_path, clock):
    with Ledger(tmp_path / "timed.sqlite", wall_clock=clock) as opened:
        yield opened


class Member(NamedTuple):
    name: str
    secret: str


def redeem(ledger, token, name, capabilities=None, secret=None) -> Member:
    secret = secret or new_secret()
    return Member(ledger.redeem(token, name, capabilities or {}, secret_hash(secret)).name, secret)


def join(ledger, name="w", role=Role.ROLLOUT) -> Member:
    return redeem(ledger, ledger.issue_token(role, MINUTES), name)


def test_a_token_becomes_a_worker_that_its_secret_finds(ledger):
    token = ledger.issue_token(Role.TRAINER, MINUTES)
    joined = redeem(ledger, token, "box.local", {"slots": 8})
    found = ledger.worker_by_secret(joined.secret)
    assert (found.name, found.role, found.state) == ("box.local", Role.TRAINER, ACTIVE)
    assert found.capabilities == {"slots": 8}
    assert found.joined_at == 1_000_000.0


def test_a_token_is_used_once_and_says_who_used_it(ledger):
    token = ledger.issue_token(Role.ROLLOUT, MINUTES)
    redeem(ledger, token, "first")
    with pytest.raises(Forbidden, match="already used by worker first"):
        redeem(ledger, token, "second")
    assert [worker.name for worker in ledger.list_workers()] == ["first"]


def test_a_token_used_again_with_the_same_secret_is_the_same_worker(timed, clock):
    """As where the answer was lost: whatever name is wished for, and however late."""
    token, secret = timed.issue_token(Role.TRAINER, 1), new_secret()
    first = redeem(timed, token, "first", {"slots": 8}, secret)
    clock.now_s += 61.0
    assert redeem(timed, token, "first", {"slots": 8}, secret) == redeem(timed, token, "another", {}, secret) == first
    (worker,) = timed.list_workers()
    assert (worker.name, worker.role, worker.capabilities) == ("first", Role.TRAINER, {"slots": 8})
    assert timed.worker_by_secret(secret).name == "first"


def test_a_secret_is_one_workers(ledger):
    first = join(ledger)
    with pytest.raises(Forbidden, match="secret already belongs to worker w; join with a newly drawn secret"):
        redeem(ledger, ledger.issue_token(Role.ROLLOUT, MINUTES), "second", secret=first.secret)
    assert [worker.name for worker in ledger.list_workers()] == ["w"]


def test_a_token_is_known_before_and_after_it_is_used(ledger):
    token = ledger.issue_token(Role.ROLLOUT, MINUTES)
    assert ledger.is_token(token)
    redeem(ledger, token, "w")
    assert ledger.is_token(token)
    assert not ledger.is_token("x" * 43)


def test_a_token_of_nobody_is_refused(ledger):
    join(ledger)
    with pytest.raises(Forbidden, match="never issued"):
        redeem(ledger, "x" * 43, "w")
    assert len(ledger.list_workers()) == 1


def test_a_token_ends_with_its_time(timed, clock):
    token = timed.issue_token(Role.ROLLOUT, 1)
    clock.now_s += 59.9
    other = timed.issue_token(Role.ROLLOUT, 1)
    redeem(timed, token, "in-time")
    clock.now_s += 60.0
    with pytest.raises(Forbidden, match="expired"):
        redeem(timed, other, "late")


@pytest.mark.parametrize("minutes", [0, -1, float("nan"), float("inf"), 8 * 24 * 60])
def test_a_token_must_live_a_sensible_time(ledger, minutes):
    with pytest.raises(UserError, match="minutes"):
        ledger.issue_token(Role.ROLLOUT, minutes)


def test_a_name_in_use_gets_a_number(ledger):
    assert [join(ledger, "gpu").name for _ in range(3)] == ["gpu", "gpu-2", "gpu-3"]


def test_a_name_that_was_given_a_task_is_in_use_even_if_it_never_joined(ledger):
    ledger.admit(new_groups(ledger, 1))
    ledger.lease("beside-us", 1, 0)
    assert join(ledger, "beside-us").name == "beside-us-2"


@given(name=st.text(max_size=70))
def test_names_are_plain_or_refused(tmp_path_factory, name):
    with Ledger(tmp_path_factory.mktemp("names") / "l.sqlite") as ledger:
        if NAME.fullmatch(name):
            assert join(ledger, name).name == name
        else:
            with pytest.raises(UserError, match="worker name"):
                join(ledger, name)
            assert ledger.list_workers() == []


def test_secrets_and_tokens_are_nowhere_in_the_file(ledger, tmp_path):
    token = ledger.issue_token(Role.ROLLOUT, MINUTES)
    joined = redeem(ledger, token, "w")
    ledger.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    for file in tmp_path.iterdir():
        data = file.read_bytes()
        assert token.encode() not in data
        assert joined.secret.encode() not in data


def test_secrets_and_tokens_are_256_bits_and_never_the_same(ledger):
    tokens = {ledger.issue_token(Role.ROLLOUT, MINUTES) for _ in range(50)}
    secrets = {redeem(ledger, token, "w").secret for token in tokens}
    assert len(tokens) == len(secrets) == 50
    assert {len(text) for text in tokens | secrets} == {43}  # 32 bytes in base 64


def test_a_wrong_secret_finds_nobody(ledger):
    joined = join(ledger)
    assert ledger.worker_by_secret(joined.secret[:-1]) is None
    assert ledger.worker_by_secret("") is None


@pytest.mark.parametrize("start", WorkerState)
@pytest.mark.parametrize("to", WorkerState)
def test_workers_move_as_the_table_says_and_not_otherwise(ledger, start, to):
    secret = join(ledger).secret
    ledger.execute("UPDATE workers SET state = ?", (start.value,))
    expected = to if to in MOVES[start] else start
    assert ledger.move_worker("w", to, "because") == expected
    assert ledger.worker_by_secret(secret).state == expected


def test_leaving_does_not_end_a_quarantine(ledger):
    secret = join(ledger).secret
    ledger.move_worker("w", QUARANTINED, "log-probs could not be believed")
    ledger.move_worker("w", LEFT)
    found = ledger.worker_by_secret(secret)
    assert (found.state, found.reason) == (QUARANTINED, "log-probs could not be believed")


def test_a_worker_that_never_joined_cannot_be_moved(ledger):
    with pytest.raises(Unknown, match="never joined"):
        ledger.move_worker("nobody", REVOKED)


def test_the_list_tells_how_many_tasks_each_holds(ledger):
    ledger.admit(new_groups(ledger, 2))
    join(ledger, "a"), join(ledger, "b")
    ledger.lease("a", 3, 0)
    assert {worker.name: worker.num_leased for worker in ledger.list_workers()} == {"a": 3, "b": 0}
    assert ledger.num_leased() == {"a": 3}


def test_a_revocation_by_another_process_is_seen_at_once(ledger, tmp_path):
    joined = join(ledger)
    with Ledger(tmp_path / "ledger.sqlite", read_only=True) as reader:
        assert reader.worker_by_secret(joined.secret).state is ACTIVE
        script = """
            import sys
            from offbeat.ledger.ledger import Ledger
            from offbeat.ledger.workers import WorkerState
            with Ledger(sys.argv[1]) as ledger:
                ledger.move_worker("w", WorkerState.REVOKED, "lost")
        """
        subprocess.run([sys.executable, "-c", textwrap.dedent(script), tmp_path / "ledger.sqlite"], check=True)
        found = reader.worker_by_secret(joined.secret)
        assert (found.state, found.reason) == (REVOKED, "lost")


def _race(path: Path, token: str, number: int, start, answers) -> None:
    with Ledger(path, wall_clock=lambda: 1_000_000.0) as ledger:
        start.wait()
        try:
            answers.put(redeem(ledger, token, f"racer-{number}").name)
        except Forbidden:
            answers.put(None)


@pytest.mark.full
def test_a_token_that_processes_race_for_makes_exactly_one_worker(ledger, tmp_path):
    token = ledger.issue_token(Role.ROLLOUT, MINUTES)
    context = multiprocessing.get_context("spawn")
    start, answers = context.Barrier(4), context.Queue()
    racers = [
        context.Process(target=_race, args=(tmp_path / "ledger.sqlite", token, number, start, answers))
        for number in range(4)
    ]
    for racer in racers:
        racer.start()
    won = [name for name in (answers.get(timeout=120) for _ in racers) if name is not None]
    for racer in racers:
        racer.join()
    assert [worker.name for worker in ledger.list_workers()] == won
    assert len(won) == 1


def test_a_token_that_threads_race_for_makes_exactly_one_worker(ledger, tmp_path):
    token = ledger.issue_token(Role.ROLLOUT, MINUTES)

    def attempt(number: int) -> bool:
        with Ledger(tmp_path / "ledger.sqlite", wall_clock=lambda: 1_000_000.0) as mine:
            try:
                redeem(mine, token, f"w{number}")
            except Forbidden:
                return False
            return True

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(attempt, range(8))) == 1
    assert len(ledger.list_workers()) == 1


def test_half_a_redemption_leaves_nothing(ledger):
    token = ledger.issue_token(Role.ROLLOUT, MINUTES)
    ledger.execute(
        "CREATE TRIGGER stop BEFORE UPDATE ON join_tokens BEGIN SELECT RAISE(ABORT, 'the machine died'); END"
    )
    with pytest.raises(sqlite3.IntegrityError, match="the machine died"):
        redeem(ledger, token, "w")
    assert ledger.list_workers() == []
    ledger.execute("DROP TRIGGER stop")
    assert redeem(ledger, token, "w").name == "w"


def test_a_fleet_token_lets_in_as_many_workers_as_it_says_and_then_nobody(ledger):
    token = ledger.issue_token(Role.ROLLOUT, MINUTES, uses=3)
    secrets = [new_secret() for _ in range(3)]
    for number, secret in enumerate(secrets):
        assert ledger.redeem(token, f"w{number}", {}, secret_hash(secret)).name == f"w{number}"
    with pytest.raises(Forbidden, match="this join token was for 3 workers, and all of them have joined"):
        redeem(ledger, token, "late")
    for number, secret in enumerate(secrets):  # an answer was lost
        assert ledger.redeem(token, "again", {}, secret_hash(secret)).name == f"w{number}"
    assert len(ledger.list_workers()) == 3


def test_a_fleet_token_expires_and_its_uses_are_bounded(timed, clock):
    token = timed.issue_token(Role.ROLLOUT, MINUTES, uses=2)
    redeem(timed, token, "w")
    clock.now_s += 60 * MINUTES
    with pytest.raises(Forbidden, match="expired"):
        redeem(timed, token, "late")
    for uses in (0, 1001):
        with pytest.raises(UserError, match=rf"uses is {uses}; .* at least 1 and at most 1000"):
            timed.issue_token(Role.ROLLOUT, MINUTES, uses=uses)
