"""Members of a group tell about each other's length, whether they ended or not."""

from __future__ import annotations

import math

import numpy as np
import pytest

from offbeat.rules.length_model import (
    LengthDistribution,
    draw,
    group_scores,
    rank,
    score,
    shared_share,
)


def lognormal(median: float, max_tokens: int, shared: float = 0.0) -> LengthDistribution:
    """With a log-variance of one."""
    above = [0.5 * math.erfc(math.log(at / median) / math.sqrt(2)) for at in range(1, max_tokens + 1)]
    return LengthDistribution(np.array([1.0, *above]), shared)


def groups(num: int, shared: float, seed: int, median: float = 500, max_tokens: int = 4000) -> np.ndarray:
    rng = np.random.default_rng(seed)
    scores = math.sqrt(shared) * rng.normal(size=(num, 1)) + math.sqrt(1 - shared) * rng.normal(size=(num, 8))
    return (median * np.exp(scores)).clip(1, max_tokens).astype(int)


def test_ranks_and_scores_are_each_others_inverse():
    ranks = np.array([0.001, 0.1587, 0.5, 0.975])
    assert rank(score(ranks)) == pytest.approx(ranks, abs=1e-6)
    assert score(np.array([0.975])) == pytest.approx([1.96], abs=0.001)


def test_lengths_that_are_drawn_follow_the_law():
    law = lognormal(500, 4000)
    drawn = law.lengths(np.random.default_rng(0).normal(size=100_000))
    assert drawn.mean() == pytest.approx(law.mean, rel=0.01)
    assert [np.mean(drawn > at) for at in (100, 500, 3999)] == pytest.approx(law.survival[[100, 500, 3999]], abs=0.005)
    assert drawn.min() >= 1
    assert drawn.max() == 4000


def test_the_mean_is_that_of_the_reference():
    law = lognormal(500, 4000)
    assert law.mean == pytest.approx(784, rel=0.01)


@pytest.mark.parametrize("shared", [0.0, 0.5, 0.8])
def test_the_shared_part_is_found_though_half_of_the_answers_still_run(shared):
    lengths = groups(64, shared, seed=1)
    so_far = np.random.default_rng(2).integers(1, 1200, lengths.shape)
    ended = lengths <= so_far
    assert 0.3 < ended.mean() < 0.7
    assert shared_share(lognormal(500, 4000), np.minimum(lengths, so_far), ended) == pytest.approx(shared, abs=0.12)


def test_a_member_that_is_not_there_says_nothing():
    law = lognormal(500, 4000, shared=0.5)
    with_gap = group_scores(law, np.array([[100, -1, -1]]), np.array([[True, False, False]]))
    assert with_gap == pytest.approx(group_scores(law, np.array([[100]]), np.array([[True]])))


def test_what_is_inferred_of_a_group_is_what_arithmetic_says():
    law = lognormal(500, 4000, shared=0.5)
    lengths = (500 * np.exp([[1.0, 0.5, 1.5]])).astype(int)
    likely = group_scores(law, lengths, np.ones((1, 3), bool))[0]
    grid = np.linspace(-3.5, 3.5, len(likely))
    # Of scores z = √½·g + √½·e: the mean of g given three is √½ Σz / (½ + 3·½), its variance ½ / (½ + 3·½).
    assert likely @ grid == pytest.approx(math.sqrt(0.5) * 3.0 / 2.0, abs=0.01)
    assert likely @ grid**2 - (likely @ grid) ** 2 == pytest.approx(0.25, abs=0.01)


def test_draws_are_longer_than_what_runs_and_keep_what_ended():
    law = lognormal(500, 4000, shared=0.5)
    num_tokens = np.array([[10, 3000, 4000, 3999], [700, 20, 5, 1]])
    ended = np.array([[True, False, True, False], [False, True, False, False]])
    for seed in range(20):
        drawn = draw(law, num_tokens, ended, np.random.default_rng(seed))
        assert (drawn[ended] == num_tokens[ended]).all()
        assert (drawn[~ended] > num_tokens[~ended]).all()
        assert drawn.max() <= 4000


def test_draws_of_what_has_just_begun_follow_the_law():
    law = lognormal(500, 4000, shared=0.5)
    none, running = np.zeros((4000, 4), int), np.zeros((4000, 4), bool)
    drawn = draw(law, none, running, np.random.default_rng(0))
    assert drawn.mean() == pytest.approx(law.mean, rel=0.03)
    logs = np.log(drawn[(drawn < 4000).all(axis=1)])
    assert np.corrcoef(logs[:, 0], logs[:, 1])[0, 1] == pytest.approx(0.5, abs=0.06)
