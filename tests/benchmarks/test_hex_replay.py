"""The replay of published figures: every figure once, one set of constants for replay and planner, a fit that finds."""

from dataclasses import astuple, replace

import pytest

from benchmarks.hex.fit import START, fit
from benchmarks.hex.published import MODELS, points
from benchmarks.hex.replay import PREDICTIONS, Replay, inventory, workload
from benchmarks.hex_replay import published_plan
from offbeat.plan.cost.constants import Figures


def test_every_published_figure_stands_once_and_is_predicted():
    keys = [(point.model, point.name) for point in points()]
    assert len(keys) == len(set(keys))
    assert {name for _, name in keys} == set(PREDICTIONS)
    assert {model for model, _ in keys} == set(MODELS)


def test_six_constants_are_all_there_are():
    assert len(astuple(START)) == 6


def test_figures_that_constants_made_are_explained_by_a_fit():
    true = replace(START, h800_rollout=0.2, h20_training=0.05, width_exponent=0.3)
    made = [
        replace(point, value=Replay(point.model, true).predict(point.name))
        for point in points()
        if not point.is_case_study
    ]
    found = fit(made)
    for point in made:
        assert Replay(point.model, found).predict(point.name) == pytest.approx(point.value, rel=0.03)


@pytest.mark.parametrize("model", MODELS)
def test_the_planner_reads_the_same_rates_from_the_constants_as_the_replay(model):
    replay = Replay(model, START)
    work = workload(model)
    step_s = max(replay.rollout_s("h20", 48) + Figures().swap_s, replay.train_s("h800", 8))
    rate = published_plan(inventory(8, 48), work, START.constants(model))
    assert rate == pytest.approx(replay.tokens / step_s, rel=0.02)
    assert rate > replay.hex_rate(48)
