"""Lengths are learnt from answers that ended and from answers that did not: the long ones are not left out."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.rules.length_model import FORGET, MAX_RECORDS, LengthEstimator


def told(finished=(), running=(), max_tokens: int = 100) -> LengthEstimator:
    lengths = LengthEstimator(max_tokens)
    for index, num_tokens in enumerate(finished):
        lengths.finished(("finished", index), num_tokens)
    for index, num_tokens in enumerate(running):
        lengths.running(("running", index), num_tokens)
    return lengths


def test_it_is_the_estimate_of_the_textbook():
    # Remission times of leukaemia patients under 6-MP (Freireich et al. 1963), the example of most textbooks.
    ended = [6, 6, 6, 7, 10, 13, 16, 22, 23]
    censored = [6, 9, 10, 11, 17, 19, 20, 25, 32, 32, 34, 35]
    curve = told(ended, censored).law().survival
    known = {5: 1.0, 6: 0.857, 7: 0.807, 10: 0.753, 13: 0.690, 16: 0.627, 22: 0.538, 23: 0.448, 35: 0.448}
    assert {at: round(float(curve[at]), 3) for at in known} == known


@given(st.lists(st.integers(1, 99), min_size=1, max_size=60))
def test_where_all_ended_it_is_the_law_of_what_was_seen(finished):
    curve = told(finished).law().survival
    assert curve == pytest.approx([np.mean(np.array(finished) > at) for at in range(101)])


def test_it_recovers_a_known_law_from_half_censored_answers_where_the_finished_ones_are_far_too_short():
    rng = np.random.default_rng(0)
    true = np.exp(np.log(500) + rng.normal(size=4000)).clip(1, 4000).astype(int)
    stopped = rng.permutation(true)  # answers are stopped at lengths of the same law: half of them too early
    lengths = told(true[true <= stopped], stopped[true > stopped], max_tokens=4000)
    assert np.mean(true > stopped) == pytest.approx(0.5, abs=0.02)
    assert np.mean(true[true <= stopped]) < 0.6 * np.mean(true)
    assert lengths.law().mean == pytest.approx(np.mean(true), rel=0.05)
    assert lengths.law().survival[[200, 500, 1500]] == pytest.approx(
        [np.mean(true > at) for at in (200, 500, 1500)], abs=0.03
    )


def test_what_was_cut_at_the_cap_costs_the_cap_and_did_not_end():
    lengths = told([10, 20])
    lengths.finished("cut", 100)
    lengths.finished("cut as well", 250)
    assert lengths.law().survival[[9, 10, 20, 99]] == pytest.approx([1.0, 0.75, 0.5, 0.5])
    assert lengths.law().mean == pytest.approx((10 + 20 + 100 + 100) / 4)


def test_one_trajectory_is_one_record_however_often_it_is_interrupted():
    lengths = told([50] * 3)
    for num_tokens in (10, 20, 30):
        lengths.running("one", num_tokens)
    lengths.finished("one", 40)
    assert lengths.law().survival[[39, 40]] == pytest.approx([1.0, 0.75])


def test_before_anything_ended_everything_may_reach_the_cap():
    assert LengthEstimator(100).law().mean == 100


def test_where_nobody_has_ended_yet_the_curve_goes_on_as_the_longest_suggest():
    curve = told([10, 12, 15, 20, 24, 30], running=[32, 32]).law().survival
    assert 0 < curve[99] < curve[64] < curve[32] == pytest.approx(0.25)


def test_versions_forget_what_ended_and_never_what_is_under_way():
    lengths = told([10], running=[10])
    lengths.advance()
    assert lengths.num_ended == pytest.approx(FORGET)
    assert lengths.law().survival[10] == pytest.approx(1 / (1 + FORGET))
    for _ in range(100):
        lengths.advance()
    assert lengths.num_ended == 0
    assert lengths.law().survival[10] == 1.0


def test_what_changed_is_learnt_within_a_few_dozen_versions():
    lengths = LengthEstimator(100)
    for version in range(80):
        for index in range(8):
            lengths.finished((version, index), 10 if version < 40 else 80)
        lengths.advance()
    assert lengths.law().mean == pytest.approx(80, rel=0.15)


def test_what_was_dropped_stays_censored_and_is_forgotten_like_what_ended():
    lengths = told([10], running=[30])
    lengths.dropped(("running", 0))
    lengths.dropped("nobody")
    assert lengths.law().survival[10] == pytest.approx(0.5)
    for _ in range(100):
        lengths.advance()
    assert (lengths.law().survival == 1.0).all()


def test_a_bounded_number_of_records_is_kept():
    lengths = told([10] * (MAX_RECORDS + 50))
    lengths.advance()
    assert lengths.num_ended == pytest.approx(FORGET * MAX_RECORDS)


def alike_in_groups() -> LengthEstimator:
    """Groups that have four fifths of the log-variance in common."""
    rng = np.random.default_rng(0)
    lengths = LengthEstimator(4000)
    for group in range(40):
        own = rng.normal()
        for member in range(8):
            num_tokens = int(500 * np.exp(0.8**0.5 * own + 0.2**0.5 * rng.normal())) + 1
            lengths.finished((group, member), num_tokens, group)
    return lengths


def test_members_of_a_group_are_found_to_be_alike():
    assert alike_in_groups().law().shared > 0.6


@settings(deadline=None, max_examples=60)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["running", "finished", "dropped", "advance"]),
            st.integers(0, 5),
            st.integers(0, 30),
        ),
        max_size=40,
    )
)
def test_whatever_happens_the_curve_falls_from_one_and_never_below_zero(events):
    lengths = LengthEstimator(25)
    for kind, key, num_tokens in events:
        if kind in ("running", "finished"):
            getattr(lengths, kind)(key, num_tokens, key % 3)
        elif kind == "dropped":
            lengths.dropped(key)
        else:
            lengths.advance()
        curve = lengths.law().survival
        assert len(curve) == 26
        assert curve[0] <= 1
        assert (np.diff(curve) <= 1e-12).all()
        assert curve[-1] >= 0
        assert 0 <= lengths.law().shared <= 0.95
