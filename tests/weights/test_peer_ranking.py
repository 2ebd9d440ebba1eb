import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.weights.peers import DAMAGED_REST_S, FORGOTTEN_AFTER_S, LONGEST_REST_S, ROOT, Ranking

MIB = 1024 * 1024


class Clock:
    now_s = 1000.0

    def __call__(self):
        return self.now_s


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def ranking(clock):
    ranking = Ranking(clock)
    ranking.use(["parent", "grandparent"])
    return ranking


def test_sources_are_asked_in_the_order_that_was_given_and_the_root_last(ranking):
    assert ranking.order() == ["parent", "grandparent", ROOT]


def test_without_peers_there_is_the_root(clock):
    assert Ranking(clock).order() == [ROOT]


def test_a_peer_that_fails_rests_longer_each_time_and_is_the_last_resort_meanwhile(ranking, clock):
    for rest_s in (1.0, 2.0, 4.0):
        ranking.failed("parent")
        assert ranking.order() == ["grandparent", ROOT, "parent"]
        clock.now_s += rest_s - 0.1
        assert ranking.order()[0] == "grandparent"
        clock.now_s += 0.2
        assert ranking.order()[0] == "parent"


def test_a_success_ends_the_rest_and_its_growth(ranking, clock):
    for _ in range(5):
        ranking.failed("parent")
    ranking.gave("parent", MIB, 1.0)
    assert ranking.order()[0] == "parent"
    ranking.failed("parent")
    clock.now_s += 1.1
    assert ranking.order()[0] == "parent"


def test_a_peer_that_sent_damage_is_not_even_the_last_resort(ranking, clock):
    ranking.damaged("parent")
    assert ranking.order() == ["grandparent", ROOT]
    clock.now_s += DAMAGED_REST_S - 1.0
    assert ranking.order() == ["grandparent", ROOT]
    clock.now_s += 2.0
    assert ranking.order()[0] == "parent"


def test_the_root_never_rests(ranking):
    ranking.failed(ROOT)
    ranking.damaged(ROOT)
    assert ranking.order() == ["parent", "grandparent", ROOT]


def test_a_peer_that_is_far_slower_than_the_root_comes_after_it(ranking, clock):
    ranking.gave(ROOT, 8 * MIB, 1.0)
    ranking.gave("parent", 3 * MIB, 1.0)
    assert ranking.order() == ["parent", "grandparent", ROOT]  # slower, but near
    ranking.gave("grandparent", MIB, 1.0)
    assert ranking.order() == ["parent", ROOT, "grandparent"]
    clock.now_s += FORGOTTEN_AFTER_S + 1.0
    assert ranking.order() == ["parent", "grandparent", ROOT]


def test_speed_counts_times_success(ranking, clock):
    ranking.gave(ROOT, 8 * MIB, 1.0)
    ranking.gave("parent", 3 * MIB, 1.0)
    for _ in range(2):
        ranking.failed("parent")
    clock.now_s += 3.0
    assert ranking.order() == ["grandparent", ROOT, "parent"]  # 3 * 0.49 is less than a quarter of 8


def test_a_speed_is_a_moving_average(ranking):
    ranking.gave("parent", 10 * MIB, 1.0)
    ranking.gave("parent", 20 * MIB, 1.0)
    assert ranking.score("parent") == pytest.approx(13 * MIB)


def test_what_is_small_says_nothing_of_speed(ranking):
    ranking.gave("parent", 100, 10.0)
    assert ranking.score("parent") is None


def test_the_least_pace_is_a_share_of_the_best_other_that_can_be_asked(ranking):
    least = ranking.least_bytes_per_s("parent")
    assert least > 0
    ranking.gave("parent", 100 * MIB, 1.0)
    assert ranking.least_bytes_per_s("parent") == least  # its own past does not count
    ranking.gave("grandparent", 8 * MIB, 1.0)
    assert ranking.least_bytes_per_s("parent") == 2 * MIB
    ranking.failed("grandparent")
    assert ranking.least_bytes_per_s("parent") == least


def test_a_new_order_keeps_what_is_known_of_those_who_stay(ranking):
    ranking.damaged("parent")
    ranking.use(["uncle", "parent", "uncle"])
    assert ranking.order() == ["uncle", ROOT]
    ranking.use(["uncle"])
    ranking.failed("parent")  # it was still being asked
    ranking.use(["parent"])
    assert ranking.order() == ["parent", ROOT]


@given(st.lists(st.tuples(st.sampled_from(["gave", "failed", "damaged"]), st.sampled_from(["a", "b", ROOT]))))
def test_whatever_happens_everyone_is_asked_once_the_root_always_and_after_a_while_all_again(events):
    clock = Clock()
    ranking = Ranking(clock)
    ranking.use(["a", "b"])
    for what, url in events:
        getattr(ranking, what)(url, *((MIB, 1.0) if what == "gave" else ()))
        order = ranking.order()
        assert len(set(order)) == len(order)
        assert ROOT in order
        clock.now_s += 0.5
    clock.now_s += DAMAGED_REST_S + LONGEST_REST_S
    assert ranking.order() == ["a", "b", ROOT]
