from hypothesis import given
from hypothesis import strategies as st

from offbeat.control.trust import MIN_FAILURES, is_believable


def test_a_few_odd_samples_are_nobodys_fault():
    assert is_believable(MIN_FAILURES - 1, MIN_FAILURES - 1)


def test_a_worker_who_is_often_wrong_is_not_believed():
    assert not is_believable(20, 10)


def test_a_large_number_of_samples_forgives_a_small_share():
    assert is_believable(1000, 50)
    assert not is_believable(1000, 101)


@given(st.integers(0, 10_000), st.integers(0, 10_000))
def test_one_more_failure_never_makes_a_worker_more_believable(num_audited, num_failures):
    if not is_believable(num_audited, num_failures):
        assert not is_believable(num_audited + 1, num_failures + 1)
