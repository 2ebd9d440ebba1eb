from hypothesis import given
from hypothesis import strategies as st

from offbeat.rewards.pool import FailureWatch


def watch_after(outcomes, **options):
    watch = FailureWatch(**options)
    for failed in outcomes:
        watch.record(failed, "timeout" if failed else None)
    return watch


def test_a_few_failures_do_not_stop_a_run():
    assert watch_after([True] * 10 + [False] * 90, max_share=0.2).verdict() is None


def test_too_large_a_share_stops_it_and_names_numbers_key_and_reason():
    verdict = watch_after([False] * 60 + [True] * 40, max_share=0.2).verdict()
    assert verdict == (
        "40 of the latest 100 rewards failed (40%; reward.max_failure_share = 0.2), 40 of them with the reason: timeout"
    )


def test_reasons_that_differ_only_in_what_they_quote_count_together():
    watch = FailureWatch(max_share=0.2)
    for n in range(40):
        watch.record(True, f"raised: ValueError: bad {n} (of 9) (rewards.py:26)")
        watch.record(True, f"raised: ValueError: bad {n} (rewards.py:{100 + n})")
        watch.record(True, "timeout: no reward within 1 s")
    assert watch.verdict().endswith("with reasons such as: raised: ValueError: bad 39 (of 9) (rewards.py:26)")
    for n in range(50):
        watch.record(True, f"value: the reward returned 'answer {n}', a str; return a finite number")
    assert "), 50 of them with reasons such as: value: the reward returned 'answer 49', a str" in watch.verdict()


def test_the_first_few_decide_nothing():
    assert watch_after([True] * 63, max_share=0.2).verdict() is None
    assert watch_after([True] * 64, max_share=0.2).verdict()


def test_a_small_window_decides_once_it_is_full():
    assert watch_after([True] * 7, max_share=0.5, window=8).verdict() is None
    assert watch_after([True] * 8, max_share=0.5, window=8).verdict()


def test_a_share_of_one_allows_everything():
    assert watch_after([True] * 1000, max_share=1.0).verdict() is None


def test_old_failures_are_forgotten():
    watch = watch_after([True] * 100 + [False] * 100, max_share=0.0, window=100)
    assert watch.verdict() is None
    watch.record(True, "raised: late")
    assert "raised: late" in watch.verdict()


@given(st.lists(st.booleans()), st.integers(1, 20))
def test_the_share_is_that_of_the_latest(outcomes, window):
    latest = outcomes[-window:]
    watch = watch_after(outcomes, max_share=0.5, window=window)
    assert watch.share == (sum(latest) / len(latest) if latest else 0.0)
