"""Figures of a step on the fixture, each worked out by hand, by staleness too."""

import math
from dataclasses import asdict, replace

import pytest
import torch
from fixture_tokens import IMPORTANCE, fixture, some_tokens
from hypothesis import given
from hypothesis import strategies as st

from offbeat.trainer.audit import SegmentFinding
from offbeat.trainer.losses import CorrectionSettings, LossSettings, Tokens, clean, clip, correct
from offbeat.trainer.step import BUCKET_NAMES, StepAccumulator, sums_of

ICEPOP = CorrectionSettings("icepop", 0.49, 2.0)


def added(*many: Tokens, correction=ICEPOP) -> StepAccumulator:
    sums = StepAccumulator()
    for tokens in many:
        cleaned = single(tokens)
        add(sums, cleaned, correction, clip(cleaned, LossSettings()).clipped, cleaned.staleness == 0)
    return sums


def add(sums: StepAccumulator, tokens: Tokens, correction, clipped, is_fresh) -> None:
    buckets, whole = sums_of(tokens, correct(tokens, correction), clipped, is_fresh)
    sums.add(len(tokens.logprobs), {"buckets": buckets.numpy(), "whole": whole.numpy()})


def single(tokens: Tokens) -> Tokens:
    """As a step has them: cleaned, in float32."""
    names = ("logprobs", "proximal", "behaviour", "advantages")
    return clean(replace(tokens, **{name: getattr(tokens, name).float() for name in names}, reference=None))[0]


def k3(importance: float) -> float:
    return importance - 1 - math.log(importance)


def test_the_fixtures_figures_are_their_closed_forms():
    metrics = added(fixture()).metrics([2.0], 0.5, has_values=False)
    assert metrics.num_trained_tokens == 5
    assert metrics.clip_share == pytest.approx(2 / 5)
    assert metrics.kept_share == pytest.approx(4 / 5)
    assert metrics.ess == pytest.approx(sum(IMPORTANCE) ** 2 / (5 * sum(p * p for p in IMPORTANCE)))
    assert metrics.logprob_gap == pytest.approx(0, abs=1e-6)  # both fresh tokens have ρ = 1
    assert metrics.entropy == pytest.approx((5.7 + math.log(3) + math.log(0.5)) / 5)
    assert (metrics.grad_norm, metrics.signal_share, metrics.value_loss) == (2.0, 0.5, None)


def test_buckets_of_staleness_hold_their_own_tokens_figures():
    buckets = added(fixture()).metrics([1.0], 1.0, has_values=False).by_staleness
    assert list(buckets) == ["0", "1", "3-4", "9+"]
    assert asdict(buckets["0"]) == pytest.approx(
        {"num_tokens": 2, "ess": 1, "behaviour_kl": 0, "clip_share": 0.5, "kept_share": 1}, abs=1e-6
    )
    assert asdict(buckets["1"]) == pytest.approx(
        {"num_tokens": 1, "ess": 1, "behaviour_kl": k3(0.5), "clip_share": 0, "kept_share": 1}, abs=1e-6
    )
    assert asdict(buckets["3-4"]) == pytest.approx(
        {"num_tokens": 1, "ess": 1, "behaviour_kl": k3(3), "clip_share": 0, "kept_share": 0}, abs=1e-6
    )
    assert buckets["9+"].clip_share == 1


def test_a_buckets_effective_share_falls_with_the_spread_of_its_importance():
    tokens = replace(fixture(), staleness=torch.tensor([1, 1, 1, 1, 1, -1]))
    bucket = added(tokens).metrics([1.0], 1.0, has_values=False).by_staleness["1"]
    assert bucket.ess == pytest.approx(6.5**2 / (5 * 12.25))
    assert bucket.behaviour_kl == pytest.approx((k3(3) + k3(0.5)) / 5)


@pytest.mark.parametrize(
    "staleness, name",
    [(0, "0"), (1, "1"), (2, "2"), (3, "3-4"), (4, "3-4"), (5, "5-8"), (8, "5-8"), (9, "9+"), (64, "9+")],
)
def test_a_token_falls_into_the_bucket_that_names_its_staleness(staleness, name):
    tokens = replace(some_tokens(0, (1,)), mask=torch.tensor([True]), staleness=torch.tensor([staleness]))
    assert list(added(tokens).metrics([1.0], 1.0, has_values=False).by_staleness) == [name]


@given(st.lists(st.integers(0, 100), min_size=1, max_size=4))
def test_any_split_into_micro_batches_gives_the_same_figures(seeds):
    """Sums add up: of the same tokens in one micro-batch, or of each sequence in its own."""
    whole, apart = added(*(some_tokens(seed) for seed in seeds)), StepAccumulator()
    for seed in seeds:
        tokens = some_tokens(seed)
        for i in range(tokens.num_sequences):
            cleaned = single(only(tokens, i))
            add(apart, cleaned, ICEPOP, clip(cleaned, LossSettings()).clipped, cleaned.staleness == 0)
    one, other = (sums.metrics([1.0], 1.0, has_values=False) for sums in (whole, apart))
    for name, value in one.row().items():
        if name == "num_microbatches":
            continue
        assert other.row()[name] == pytest.approx(value, rel=1e-4, abs=1e-6, nan_ok=True), name


def only(tokens: Tokens, sequence: int) -> Tokens:
    at = tokens.sequence == sequence
    names = ("logprobs", "proximal", "behaviour", "advantages", "mask", "staleness", "reference")
    parts = {name: getattr(tokens, name)[at] for name in names}
    return replace(tokens, **parts, sequence=torch.zeros(int(at.sum()), dtype=torch.int64), num_sequences=1)


def test_the_gap_is_the_mean_over_fresh_tokens_alone():
    tokens = replace(fixture(), staleness=torch.tensor([0, 1, 0, 1, 1, -1]))
    metrics = added(tokens).metrics([1.0], 1.0, has_values=False)
    assert metrics.logprob_gap == pytest.approx((math.log(3) + math.log(2)) / 2)


def test_the_gap_leaves_out_tokens_that_are_not_quite_of_their_own_weights():
    """Those that attended to keys and values of older weights: their distance tells the age of these."""
    cleaned, sums = single(replace(fixture(), staleness=torch.tensor([0, 1, 0, 1, 1, -1]))), StepAccumulator()
    add(sums, cleaned, ICEPOP, None, torch.tensor([True, False, False, False, False, True]))
    assert sums.metrics([1.0], 1.0, has_values=False).logprob_gap == pytest.approx(math.log(3))


def test_tokens_with_a_log_ratio_beyond_the_clamp_are_counted():
    tokens = single(fixture())
    far = torch.tensor([20.5, 0.0, 19.0, 0.0, -21.0, 99.0])
    for name, sign in (("behaviour", 1), ("logprobs", -1)):
        moved = replace(tokens, **{name: (tokens.proximal + sign * far).detach()})
        assert added(moved).metrics([1.0], 1.0, has_values=False).clamped_share == pytest.approx(2 / 5)
    assert added(tokens).metrics([1.0], 1.0, has_values=False).clamped_share == 0


def test_where_nothing_is_trained_nothing_is_divided_by():
    tokens = replace(fixture(), mask=torch.zeros(6, dtype=torch.bool))
    metrics = added(tokens).metrics([0.0], 0.0, has_values=False)
    assert (metrics.num_trained_tokens, metrics.kept_share, metrics.ess) == (0, 1, 1)
    assert math.isnan(metrics.logprob_gap)
    assert metrics.by_staleness == {}


def test_samples_that_have_no_gradient_are_measured_and_count_as_unclipped():
    cleaned = single(fixture())
    sums = StepAccumulator()
    add(sums, cleaned, ICEPOP, None, cleaned.staleness == 0)
    metrics = sums.metrics([1.0], 0.0, has_values=False)
    assert (metrics.clip_share, metrics.kept_share) == (0, pytest.approx(0.8))


def test_a_row_names_figures_by_staleness_and_leaves_out_what_does_not_apply():
    sums = added(fixture())
    sums.loss, sums.value_loss, sums.left_out = 5.0, 3.0, [4, 1]
    sums.compared = [SegmentFinding(4, 0, 10, 3), SegmentFinding(1, 2, 5, 0)]
    row = sums.metrics([1.0, 2.0], 1.0, has_values=True).row()
    assert (row["left_out"], row["loss"], row["value_loss"], row["grad_norm"]) == (2, 2.5, 1.5, 1.5)
    assert (row["compared_tokens"], row["off_tokens"]) == (15, 3)
    assert row["kept_share/staleness_3-4"] == 0
    assert all(isinstance(value, int | float) for value in row.values())
    assert "value_loss" not in sums.metrics([1.0], 1.0, has_values=False).row()
    assert len(BUCKET_NAMES) == 6
