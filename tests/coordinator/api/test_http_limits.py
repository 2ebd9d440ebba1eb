"""Token buckets, with a clock of our own."""

from hypothesis import given
from hypothesis import strategies as st

from offbeat.coordinator.api.limits import Buckets


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_a_burst_is_let_through_and_then_a_steady_rate():
    clock = Clock()
    buckets = Buckets(per_s=2.0, burst=3.0, clock=clock)
    assert [buckets.take("a") for _ in range(4)] == [0.0, 0.0, 0.0, 0.5]
    clock.now_s += 0.5
    assert buckets.take("a") == 0.0
    assert buckets.take("a") == 0.5


def test_one_callers_bucket_is_not_anothers():
    buckets = Buckets(per_s=1.0, burst=1.0, clock=Clock())
    assert (buckets.take("a"), buckets.take("b")) == (0.0, 0.0)
    assert (buckets.take("a"), buckets.take("b")) == (1.0, 1.0)


@given(
    per_s=st.floats(0.1, 100.0),
    burst=st.floats(1.0, 50.0),
    pauses_s=st.lists(st.floats(0.0, 5.0), min_size=1, max_size=200),
)
def test_nobody_is_ever_let_through_more_often_than_burst_and_rate_allow(per_s, burst, pauses_s):
    clock, taken = Clock(), []
    buckets = Buckets(per_s, burst, clock)
    for pause_s in pauses_s:
        clock.now_s += pause_s
        wait_s = buckets.take("a")
        assert wait_s >= 0.0
        if wait_s == 0.0:
            taken.append(clock.now_s)
    for i, start_s in enumerate(taken):
        for j in range(i, len(taken)):
            assert j - i + 1 <= burst + (taken[j] - start_s) * per_s + 1e-6


@given(per_s=st.floats(0.1, 100.0), burst=st.floats(1.0, 20.0), num_calls=st.integers(0, 60))
def test_who_waits_as_long_as_told_is_let_through(per_s, burst, num_calls):
    clock = Clock()
    buckets = Buckets(per_s, burst, clock)
    for _ in range(num_calls):
        clock.now_s += buckets.take("a") * (1 + 1e-9) + 1e-9
    wait_s = buckets.take("a")
    if wait_s:
        clock.now_s += wait_s * (1 + 1e-9) + 1e-9
        assert buckets.take("a") == 0.0


def test_strangers_without_number_do_not_fill_the_memory():
    clock = Clock()
    buckets = Buckets(per_s=1.0, burst=2.0, clock=clock, max_keys=100)
    for number in range(10_000):
        clock.now_s += 0.001
        buckets.take(f"address {number}")
        assert len(buckets) <= 100


def test_who_is_busy_is_not_forgotten_for_strangers_that_came_before():
    clock = Clock()
    buckets = Buckets(per_s=0.001, burst=2.0, clock=clock, max_keys=10)
    for number in range(9):
        buckets.take(f"stranger {number}")
    clock.now_s += 1.0
    buckets.take("busy"), buckets.take("busy")
    buckets.take("one more")
    assert buckets.take("busy") > 0.0


def test_a_bucket_in_use_is_kept_until_there_are_too_many_keys():
    buckets = Buckets(per_s=0.001, burst=1.0, clock=Clock(), max_keys=10)
    assert [buckets.take(str(key)) for key in range(10)] == [0.0] * 10
    assert all(buckets.take(str(key)) > 0 for key in range(10))
