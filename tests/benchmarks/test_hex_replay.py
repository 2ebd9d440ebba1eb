"""The replay of published figures: every figure once, one set of constants for replay and planner, a fit that finds,
and a planner that gets nothing for free."""

import math
from dataclasses import astuple, replace

import pytest

from benchmarks.hex import ours
from benchmarks.hex.fit import START, fit
from benchmarks.hex.published import HEX_PRICE_PER_H, MODELS, SPEEDUPS, case_study_work, points, speedup_by_seconds
from benchmarks.hex.replay import PREDICTIONS, Replay
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
    replay, problem = Replay(model, START), ours.problem(model, START)
    on_h20 = [column for column in problem.rollout if column.offer == "h20"]
    rate = 48 * max(column.tokens_per_s / column.num_accelerators for column in on_h20)
    assert rate == pytest.approx(replay.tokens / replay.rollout_s("h20", 48), rel=0.02)
    gang = next(gang for gang in problem.gangs if gang.nodes == {"h800": 1})
    assert gang.step_s == pytest.approx(replay.train_s("h800", 8), rel=0.02)


def test_the_planner_gets_no_gang_that_crosses_types_for_nothing():
    assert all(len(gang.nodes) == 1 for gang in ours.problem("7B", START).gangs)


def test_a_hidden_update_is_worth_what_the_published_plan_waits_for_it():
    replay, plan = Replay("14B", START), ours.quickest("14B", START)
    hidden_s = max(replay.rollout_s("h20", 48) + Figures().swap_s, replay.train_s("h800", 8))
    assert plan.tokens_per_s >= 0.99 * replay.tokens / hidden_s
    assert plan.tokens_per_s > replay.hex_rate(48)
    assert plan.price_per_h == pytest.approx(131.04)


@pytest.mark.parametrize("model", MODELS)
def test_a_plan_keeps_no_more_in_flight_than_the_bound_lets_be_and_an_age_window_only_slows_it(model):
    free, held = ours.quickest(model, START), ours.quickest(model, START, has_age_window=True)
    assert free.in_flight <= 8 * 512
    assert held.tokens_per_s <= free.tokens_per_s * 1.001


def test_the_cheapest_plan_meets_its_throughput_for_less_and_what_nothing_reaches_has_none():
    quickest = ours.quickest("7B", START)
    cheapest = ours.least("7B", START, quickest.tokens_per_s / 2)
    assert cheapest is not None
    assert cheapest.tokens_per_s >= quickest.tokens_per_s / 2 * 0.999
    assert cheapest.price_per_h < quickest.price_per_h
    assert ours.least("7B", START, quickest.tokens_per_s * 1.1) is None


def test_the_smaller_of_two_speedups_counts():
    told = ours.beside("14B", START)
    assert told.speedup == min(told.over_modelled, told.over_hex)
    assert told.over_modelled != pytest.approx(told.over_hex)


def test_hex_rents_as_many_nodes_as_a_throughput_takes_and_no_number_is_enough_for_more_than_it_trains():
    replay = Replay("7B", START)
    assert replay.hex_price_per_h(replay.hex_rate(24)) == pytest.approx(HEX_PRICE_PER_H)
    assert replay.hex_price_per_h(replay.hex_rate(24) * 1.01) > HEX_PRICE_PER_H
    assert replay.hex_price_per_h(1.01 * replay.tokens / replay.train_s("h800", 8)) == math.inf


def test_published_seconds_and_published_ratios_differ():
    by_seconds = [speedup_by_seconds(model) for model in MODELS]
    assert by_seconds == pytest.approx([148.75 / 117.06, 419.79 / 310.34, 1076 / 850.93])
    assert max(abs(one / SPEEDUPS[model] - 1) for one, model in zip(by_seconds, MODELS, strict=True)) > 0.15


def test_the_case_study_needs_a_fraction_of_the_card_seconds_of_the_breakdown():
    work = [case_study_work(model) for model in MODELS]
    assert [one["rollout"] for one in work] == pytest.approx([1272 / 5136, 2160 / 12096, 10440 / 35424])
    assert [one["training"] for one in work] == pytest.approx([840 / 856, 2064 / 2000, 9408 / 4544])
