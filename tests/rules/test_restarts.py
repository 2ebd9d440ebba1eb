"""Whether a process is started again: kills are accidents, errors come again, and health forgives."""

import pytest

from offbeat.rules.restarts import HEALTHY_S, HOPELESS, MAX_FAILURES, MAX_KILLS, MAX_PAUSE_S, Restarts, RestartVerdict


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def lives(restarts: Restarts, clock: Clock, status: int, lived_s: float = 1.0) -> tuple[RestartVerdict, float]:
    restarts.started()
    clock.now_s += lived_s
    return restarts.ended(status)


def test_whoever_is_done_is_left_alone_and_whoever_needs_a_person_is_given_up():
    clock = Clock()
    assert lives(Restarts(clock), clock, 0) == (RestartVerdict.DONE, 0.0)
    for status in HOPELESS:
        assert lives(Restarts(clock), clock, status) == (RestartVerdict.GIVE_UP, 0.0)


def test_the_killed_are_started_again_at_once_until_it_is_no_accident_any_more():
    clock = Clock()
    restarts = Restarts(clock)
    for _ in range(MAX_KILLS):
        assert lives(restarts, clock, -9) == (RestartVerdict.RESTART, 0.0)
    assert lives(restarts, clock, -9)[0] is RestartVerdict.GIVE_UP


def test_errors_wait_longer_each_time_and_are_given_up_in_the_end():
    clock = Clock()
    restarts = Restarts(clock)
    told = [lives(restarts, clock, 1) for _ in range(MAX_FAILURES)]
    assert [verdict for verdict, _ in told] == [RestartVerdict.RESTART] * (MAX_FAILURES - 1) + [RestartVerdict.GIVE_UP]
    pauses_s = [pause_s for _, pause_s in told[:-1]]
    assert pauses_s == sorted(set(pauses_s))
    assert pauses_s[-1] <= MAX_PAUSE_S


@pytest.mark.parametrize("status, limit", [(1, MAX_FAILURES), (-9, MAX_KILLS)])
def test_a_healthy_life_forgives_what_was_before(status, limit):
    clock = Clock()
    restarts = Restarts(clock)
    for _ in range(limit - 1):
        lives(restarts, clock, status)
    assert lives(restarts, clock, status, HEALTHY_S)[0] is RestartVerdict.RESTART
    for _ in range(limit - 2):
        assert lives(restarts, clock, status)[0] is RestartVerdict.RESTART


def test_a_process_is_as_old_as_its_restarts_until_it_is_started_again():
    """On a machine that has been up for a while: the clock does not begin at 0."""
    now_s = 1e6
    restarts = Restarts(lambda: now_s)
    pauses = [restarts.ended(1)[1] for _ in range(2)]
    assert pauses[1] == 2 * pauses[0], "failures in a row, none after a healthy life"
