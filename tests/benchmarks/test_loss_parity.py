"""What can be held without TRL: Offbeat's losses against figures that TRL gave, written down by
`python -m benchmarks.loss_parity --record tests/benchmarks/loss_parity_recorded.json`."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.loss_parity import ours
from benchmarks.loss_parity.cases import ALGORITHMS, CORRECTIONS, DRIFTS, FEW_TERMS, SHAPES, SMALL, cases, draw
from benchmarks.loss_parity.comparison import TARGET, account, compare, worst_bar
from benchmarks.loss_parity.differences import differences
from benchmarks.loss_parity.gaps import gap
from benchmarks.loss_parity.ours import Outcome
from benchmarks.loss_parity.theirs import Job, read

RECORDED = json.loads(Path(__file__).with_name("loss_parity_recorded.json").read_text())["updates"]
CASES = {case.name: case for case in cases([SMALL], 1, FEW_TERMS)}
DIFFERENCES = {one.name: one for one in differences(SMALL)}
BY_LABEL = {algorithm.label: algorithm for algorithm in ALGORITHMS}


def recorded(name: str) -> list[Outcome]:
    return [read(update) for update in RECORDED[name]]


def gradient_of(label: str, drift: str, **further) -> np.ndarray:
    """Ours, of all tokens of every update on the first shape."""
    answers = draw(SHAPES[0], drift, seed=11)
    case = replace(CASES[f"{label}, {drift}, no KL, correction none"], answers=answers)
    found = ours.outcomes({**case.ours, **further}, answers, case.updates)
    return np.concatenate([gradient for update in found for gradient in update.gradients])


def test_what_is_written_down_is_every_algorithm_with_every_drift_and_every_difference():
    assert set(RECORDED) == {*CASES, *DIFFERENCES}
    assert len(CASES) == len(ALGORITHMS) * len(DRIFTS) * len(FEW_TERMS)


@pytest.mark.parametrize("name", CASES)
def test_loss_gradient_and_advantages_are_those_of_trl(name: str):
    for found in compare(CASES[name], recorded(name)):
        assert found.loss <= TARGET
        assert found.gradient <= TARGET
        assert found.advantages <= TARGET


@pytest.mark.parametrize("name", DIFFERENCES)
def test_where_definitions_differ_trl_follows_from_ours_by_the_known_factor(name: str):
    plain, accounted = account(DIFFERENCES[name], recorded(name))
    assert max(found.gradient for found in plain) > TARGET
    assert all(found.worst <= TARGET for found in accounted)


def test_the_other_floor_beside_the_standard_deviation_is_worth_less_than_a_thousandth():
    name = next(name for name in DIFFERENCES if "1e-4" in name)
    plain, _ = account(DIFFERENCES[name], recorded(name))
    assert 1e-5 < plain[0].gradient < 1e-3


def test_a_low_cap_of_cispo_takes_its_share_of_every_gradient_and_cannot_be_asked_of_us():
    name = next(name for name in DIFFERENCES if name.startswith("CISPO"))
    plain, _ = account(DIFFERENCES[name], recorded(name))
    assert plain[0].gradient == pytest.approx(1 / 0.28 - 1, rel=1e-5)
    with pytest.raises(ValueError, match="ratio_max"):
        gradient_of("CISPO", "one update", ratio_max=0.28)


@pytest.mark.parametrize("label", ["GRPO", "GRPO, two-sided clip", "Dr.GRPO", "DAPO", "GSPO", "GSPO, clip 0.2"])
def test_far_answers_reach_the_clip(label: str):
    """Otherwise agreement would say nothing about it."""
    near_one, far = (np.count_nonzero(gradient_of(label, drift)) for drift in ("one update", "far"))
    assert 0 < far < near_one


@pytest.mark.parametrize(
    ("label", "drift", "key", "other"),
    [
        ("GRPO", "far", "clip_high", 0.21),
        ("GRPO", "far", "clip_low", 0.21),
        ("GRPO, two-sided clip", "far", "dual_clip", 1.51),
        ("GRPO", "one update", "aggregate", "token_mean"),
        ("Dr.GRPO", "one update", "aggregate_tokens", 41),
        ("DAPO", "one update", "aggregate", "sequence_mean"),
        ("GSPO", "near", "clip_high", 8e-4),
        ("GSPO", "near", "clip_low", 6e-4),
        ("CISPO", "far", "ratio_max", 4.9),
    ],
)
def test_a_slightly_other_setting_shows(label: str, drift: str, key: str, other: object):
    """A comparison that cannot fail is none: somewhere among a few draws each of these is more than rounding."""
    found = []
    for seed in range(8):
        case = replace(CASES[f"{label}, {drift}, no KL, correction none"], answers=draw(SHAPES[0], drift, seed))
        right = ours.outcomes(case.ours, case.answers, case.updates)
        wrong = ours.outcomes({**case.ours, key: other}, case.answers, case.updates)
        found += [gap(a, b).worst for a, b in zip(wrong, right, strict=True)]
    assert max(found) > 10 * TARGET


def test_a_gap_is_relative_and_never_lost():
    zero, one = np.zeros(2), np.array([1.0, -1.0])
    right = Outcome(0.5, [one], one)
    assert gap(right, right).worst == 0
    assert gap(replace(right, loss=0.5 + 1e-4), right).loss == pytest.approx(2e-4)
    assert gap(replace(right, gradients=[one + 1e-4]), right).gradient == pytest.approx(1e-4)
    assert gap(right, replace(right, gradients=[zero])).gradient == float("inf")
    assert gap(replace(right, gradients=[zero]), replace(right, gradients=[zero])).gradient == 0
    cancelled = Outcome(1e-12, [one], one)
    assert gap(replace(cancelled, loss=2e-8), cancelled).loss == pytest.approx(1e-8, rel=1e-3)


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), 2e-5])
def test_a_bar_with_one_bad_update_is_missed(wrong: float):
    assert worst_bar([0.0, 1e-7]).holds is True
    assert worst_bar([wrong, 0.0]).holds is False
    assert worst_bar([0.0, wrong]).holds is False


@pytest.mark.parametrize("shape", [*SHAPES, SMALL])
@pytest.mark.parametrize("drift", DRIFTS)
def test_drawn_answers_are_uneven_and_fit_float32(shape, drift: str):
    answers = draw(shape, drift, seed=0)
    assert len(answers) == shape.num_groups * shape.group_size
    assert len({len(answer.logprobs) for answer in answers}) > 1
    assert any(not answer.mask.any() for answer in answers)
    assert all(answer.logprobs.dtype == np.float32 for answer in answers)
    moved = any((answer.logprobs != answer.start).any() for answer in answers)
    assert moved == (DRIFTS[drift] is not None)


def test_a_job_can_be_written_as_json_without_loss():
    case = CASES["DAPO, far, k3 KL, correction tis"]
    spec = json.loads(json.dumps(Job(case.trl, case.answers, case.is_corrected).spec()))
    assert spec["group_size"] == SMALL.group_size
    for told, answer in zip(spec["answers"], case.answers, strict=True):
        assert np.array_equal(np.float32(told["behaviour"]), answer.behaviour)
        assert told["mask"] == answer.mask.tolist()
    assert set(CORRECTIONS["tis"][1]) <= set(spec["settings"])
