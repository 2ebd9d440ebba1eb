"""Who holds tasks and hands nothing in for too long, and who is merely slow."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.rules.leases import Lease
from offbeat.rules.quarantine import FLEET_MARGIN, MAX_ENDED, MIN_FLEET_ANSWERS, OWN_MARGIN, HandInPace

TTL_S, MAX_NEW_TOKENS = 10.0, 100


class Clocked:
    """A pace by a clock that only `answer` moves; every task is another one."""

    def __init__(self):
        self.now_s, self.last_task = 0.0, 0
        self.pace = HandInPace(TTL_S, MAX_NEW_TOKENS, lambda: self.now_s)

    def lease(self, worker: str, num_sampled: int = 0) -> Lease:
        self.last_task += 1
        held = Lease(self.last_task, 1, worker)
        self.pace.granted(held, num_sampled)
        return held

    def answer(self, worker: str, seconds: float, num_tokens: int, num_before: int = 0) -> None:
        """One task, from its grant to its answer."""
        held = self.lease(worker, num_before)
        self.now_s += seconds
        self.pace.handed_in(held, num_before + num_tokens)

    def fleet(self, num_answers: int = MIN_FLEET_ANSWERS, s_per_token: float = 1.0) -> None:
        for number in range(num_answers):
            self.answer(f"w{number % 3}", s_per_token * 10, 10)


@pytest.fixture
def clocked() -> Clocked:
    return Clocked()


def test_a_worker_has_four_times_its_longest_answer_at_its_slowest(clocked: Clocked):
    clocked.answer("w", 20.0, 10)
    clocked.answer("w", 1.0, 10)
    assert clocked.pace.bound_s("w") == OWN_MARGIN * 2.0 * MAX_NEW_TOKENS
    clocked.fleet()
    assert clocked.pace.bound_s("w") == OWN_MARGIN * 2.0 * MAX_NEW_TOKENS, "the others' pace is not its own"


def test_tokens_that_others_sampled_before_do_not_make_a_worker_fast(clocked: Clocked):
    clocked.answer("w", 20.0, 10, num_before=80)
    assert clocked.pace.bound_s("w") == OWN_MARGIN * 2.0 * MAX_NEW_TOKENS


def test_nobody_is_overdue_within_twice_the_time_of_a_lease(clocked: Clocked):
    clocked.answer("w", 0.01, 100)
    assert clocked.pace.bound_s("w") == 2 * TTL_S


def test_a_newcomer_is_measured_by_the_median_of_the_others_once_they_have_answered_enough(clocked: Clocked):
    clocked.fleet(MIN_FLEET_ANSWERS - 1)
    assert clocked.pace.bound_s("new") is None
    clocked.answer("w0", 1000.0, 10)
    assert clocked.pace.bound_s("new") == FLEET_MARGIN * 1.0 * MAX_NEW_TOKENS


def test_a_hoarder_is_overdue_past_its_bound_and_not_before(clocked: Clocked):
    clocked.fleet()
    held, bound_s = clocked.lease("hoarder"), FLEET_MARGIN * MAX_NEW_TOKENS
    clocked.pace.add_quiet_time(bound_s, [held])
    assert clocked.pace.overdue() == {}
    clocked.pace.add_quiet_time(1.0, [held])
    assert clocked.pace.overdue() == {
        "hoarder": f"hoarder has held tasks for {bound_s + 1:.0f} s and handed in nothing; its limit is {bound_s:.0f} s"
    }
    clocked.pace.reset_quiet_time("hoarder")
    assert clocked.pace.overdue() == {}


def test_without_others_to_compare_with_a_newcomer_may_take_for_ever(clocked: Clocked):
    clocked.pace.add_quiet_time(1e9, [clocked.lease("w")])
    assert clocked.pace.overdue() == {}


def test_only_time_with_tasks_counts(clocked: Clocked):
    clocked.answer("w", 0.01, 100)
    clocked.pace.add_quiet_time(1000.0, [])
    clocked.pace.add_quiet_time(2 * TTL_S, [clocked.lease("w")])
    assert clocked.pace.overdue() == {}


def test_who_gives_tasks_back_and_takes_others_has_handed_in_nothing(clocked: Clocked):
    clocked.answer("w", 0.01, 100)
    for _ in range(3):
        clocked.pace.add_quiet_time(TTL_S, [clocked.lease("w")])
        clocked.pace.add_quiet_time(TTL_S, [])
    assert set(clocked.pace.overdue()) == {"w"}


def test_what_holds_no_new_token_is_no_answer(clocked: Clocked):
    clocked.answer("w", 0.01, 100)
    held = clocked.lease("w", num_sampled=7)
    clocked.pace.add_quiet_time(3 * TTL_S, [held])
    clocked.pace.handed_in(held, 7)
    assert set(clocked.pace.overdue()) == {"w"}
    clocked.pace.handed_in(held, 8)
    assert clocked.pace.overdue() == {}


def test_an_answer_that_comes_after_its_lease_has_ended_tells_its_pace_all_the_same(clocked: Clocked):
    clocked.fleet()
    held = clocked.lease("slow")
    clocked.now_s += 3000.0
    clocked.pace.add_quiet_time(1.0, [])
    clocked.pace.handed_in(held, 100)
    assert clocked.pace.bound_s("slow") == OWN_MARGIN * 30.0 * MAX_NEW_TOKENS


@given(
    slowness=st.floats(0.01, FLEET_MARGIN),
    fleet_s_per_token=st.floats(1e-4, 10.0),
    lengths=st.lists(st.integers(1, MAX_NEW_TOKENS), min_size=1, max_size=8),
)
def test_a_slow_worker_that_goes_on_working_is_never_overdue(slowness, fleet_s_per_token, lengths):
    """Sixteen times slower than the fleet from its first task on, and at a pace of its own afterwards."""
    clocked = Clocked()
    clocked.fleet(s_per_token=fleet_s_per_token)
    for num_tokens in lengths:
        held = clocked.lease("slow")
        for _ in range(num_tokens):
            seconds = slowness * fleet_s_per_token * 0.999
            clocked.now_s += seconds
            clocked.pace.add_quiet_time(seconds, [held])
            assert clocked.pace.overdue() == {}
        clocked.pace.handed_in(held, num_tokens)


def test_memory_grows_neither_with_workers_that_left_nor_with_leases_that_ended(clocked: Clocked):
    for number in range(10 * MAX_ENDED):
        clocked.pace.add_quiet_time(0.1, [clocked.lease(f"w{number % 5}")])
    assert len(clocked.pace._begun) <= MAX_ENDED + 3
    for number in range(5):
        clocked.pace.forget(f"w{number}")
    assert (clocked.pace._begun, clocked.pace._records) == ({}, {})
