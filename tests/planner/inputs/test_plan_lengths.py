import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import erfinv

from offbeat.errors import UserError
from offbeat.planner.inputs import workload


def test_a_cap_far_away_leaves_the_plain_log_normal():
    law = workload.log_normal(1000, 0.5, 1e9)
    assert law.mean == pytest.approx(1000 * math.exp(0.125))
    assert law.mean_square == pytest.approx(1e6 * math.exp(0.5))
    assert law.tail == pytest.approx(1000 * math.exp(0.5 * 1.6448536))
    assert law.tail_share == pytest.approx(0.05)


def test_a_cap_at_the_median_cuts_half():
    """E[min(X, m)] = m (exp(s²/2) Φ(-s) + 1/2), and E[min(X, m)²] = m² (exp(2 s²) Φ(-2 s) + 1/2)."""
    law = workload.log_normal(1000, 1.0, 1000)
    assert law.mean == pytest.approx(1000 * (math.exp(0.5) * 0.15865525 + 0.5))
    assert law.mean_square == pytest.approx(1e6 * (math.exp(2) * 0.02275013 + 0.5))
    assert (law.tail, law.tail_share, law.longest) == (1000, 0.0, 1000)


@settings(max_examples=25, deadline=None)
@given(st.floats(100, 5000), st.floats(0.1, 1.5), st.floats(0.5, 10), st.floats(0.5, 0.99))
def test_the_closed_form_is_what_drawing_gives(median, sigma, times, quantile):
    cap = median * times
    law = workload.log_normal(median, sigma, cap, quantile)
    ranks = (np.arange(100_000) + 0.5) / 100_000
    normal = np.sqrt(2) * erfinv(2 * ranks - 1)
    drawn = np.minimum(median * np.exp(sigma * normal), cap)
    assert law.mean == pytest.approx(drawn.mean(), rel=2e-3)
    assert law.mean_square == pytest.approx((drawn**2).mean(), rel=1e-2)
    assert law.tail == pytest.approx(np.quantile(drawn, quantile), rel=2e-3)


def test_constant_and_uniform():
    assert workload.constant(7) == workload.log_normal(7, 0, 100)
    law = workload.uniform(0, 100, 0.9)
    assert (law.mean, law.tail, law.longest) == (50, pytest.approx(90), 100)
    assert law.mean_square == pytest.approx(10_000 / 3)
    assert law.tail_share == pytest.approx(0.1)


def test_a_histogram_is_uniform_within_its_bins():
    law = workload.histogram([0, 100, 200, 400], [1, 3, 0], 0.5)
    assert law.mean == pytest.approx(0.25 * 50 + 0.75 * 150)
    assert law.tail == pytest.approx(100 + 100 / 3)
    assert law.longest == 200


@pytest.mark.parametrize(
    "edges, counts, said",
    [
        ([0, 1], [1, 2], "one more edge"),
        ([0, 2, 1], [1, 2], "must rise"),
        ([0, 1], [0], "at least one must be above 0"),
        ([0, 1, 2], [2, -1], "0 or more"),
    ],
)
def test_a_bad_histogram_is_refused(edges, counts, said):
    with pytest.raises(UserError, match=said):
        workload.histogram(edges, counts)


def test_samples_are_told_as_they_are():
    law = workload.from_samples(list(range(1, 101)), 0.9)
    assert (law.mean, law.tail, law.tail_share, law.longest) == (50.5, 90, pytest.approx(0.1), 100)
    assert law.mean_square == pytest.approx(100 * 101 * 201 / 6 / 100)
    capped = workload.from_samples([10, 20, 30], 0.9, cap=20)
    assert (capped.mean, capped.tail, capped.tail_share, capped.longest) == (pytest.approx(50 / 3), 20, 0.0, 20)
    with pytest.raises(UserError, match="there are no lengths"):
        workload.from_samples([])
