"""The replay of published figures: every figure once, one set of constants for replay and planner, a rollout that is
the sum of its steps, a fit that finds, and a planner that gets nothing for free."""

import math
from dataclasses import astuple, replace

import pytest

from benchmarks.hex_replay import ours
from benchmarks.hex_replay.fit import START, fit
from benchmarks.hex_replay.published import (
    HEX_PRICE_PER_H,
    MODELS,
    SPEEDUPS,
    case_study_work,
    points,
    speedup_by_seconds,
)
from benchmarks.hex_replay.replay import CARDS, PREDICTIONS, Replay, workload
from offbeat.planner.cost.constants import Efficiencies
from offbeat.planner.cost.rollout_time import attention_s, decode_step_s, matmul_s
from offbeat.planner.inputs.model_shapes import weight_bytes

WAITING = replace(START, h800_training=0.2)
"""Training is so fast that a step waits for its longest answer."""


def test_every_published_figure_stands_once_and_is_predicted():
    keys = [(point.model, point.name) for point in points()]
    assert len(keys) == len(set(keys))
    assert {name for _, name in keys} == set(PREDICTIONS)
    assert {model for model, _ in keys} == set(MODELS)


def test_six_constants_are_all_there_are():
    assert len(astuple(START)) == 6


@pytest.mark.full
def test_figures_that_constants_made_are_explained_by_a_fit():
    true = replace(START, h800_rollout=0.3, h20_training=0.05, update_start_s=2.0)
    made = [
        replace(point, value=Replay(point.model, true).predict(point.name))
        for point in points()
        if not point.is_case_study
    ]
    found = fit(made)
    for point in made:
        assert Replay(point.model, found).predict(point.name) == pytest.approx(point.value, rel=0.03)


@pytest.mark.parametrize(("card", "num_cards"), [("h20", 48), ("h20", 2), ("h800", 16), ("h800", 600)])
@pytest.mark.parametrize("model", MODELS)
def test_a_rollout_is_the_sum_of_the_steps_that_the_planner_knows(model, card, num_cards):
    """Steps bound by compute, then by the weights, then with one row left; and with fewer answers than cards."""
    work, figures, num = workload(model), START.constants(model).of(card), 4000
    seconds = 0.0
    for part in range(num):
        k = (part + 0.5) / num * 27_648
        rows = max(1.0, 512 / num_cards * math.exp(-k / 5000))
        seconds += decode_step_s(work.model, CARDS[card], figures, 1, rows, 300 + k) * 27_648 / num
    assert Replay(model, START).rollout_s(card, num_cards) == pytest.approx(seconds, rel=1e-6)


def test_cards_beyond_the_answers_shorten_no_rollout_below_its_longest_answer():
    replay, figures = Replay("7B", START), START.constants("7B").of("h20")
    alone = decode_step_s(workload("7B").model, CARDS["h20"], figures, 1, 1, 300 + 27_648 / 2)
    assert replay.rollout_s("h20", 512) == pytest.approx(27_648 * alone)
    assert replay.rollout_s("h20", 1024) == pytest.approx(27_648 * alone)


def test_a_factor_slows_what_rows_add_and_nothing_else():
    slow, fast = (
        replace(START, h20_rollout=START.h20_rollout * times).constants("14B").of("h20") for times in (0.5, 1.0)
    )
    work, card = workload("14B").model, CARDS["h20"]
    assert attention_s(work, card, slow, 1, 3, 4000) == pytest.approx(2 * attention_s(work, card, fast, 1, 3, 4000))
    assert matmul_s(work, card, slow, 1, 50) == pytest.approx(2 * matmul_s(work, card, fast, 1, 50))
    assert (slow.weight_read_share, slow.step_overhead_s) == (
        Efficiencies().weight_read_share,
        Efficiencies().step_overhead_s,
    )


@pytest.mark.parametrize("model", MODELS)
def test_the_planner_reads_the_same_training_from_the_constants_as_the_replay(model):
    gang = next(gang for gang in ours.problem(model, START).gangs if gang.nodes == {"h800": 1})
    assert gang.step_s == pytest.approx(Replay(model, START).train_s("h800", 8), rel=0.02)


def test_training_goes_with_layers_times_width():
    seconds = [Replay(model, START).train_s("h20", 16) for model in MODELS]
    assert [one / seconds[1] for one in seconds] == pytest.approx([1536 / 3584, 1, 48 * 5120 / (28 * 3584)])


def test_an_update_inside_one_type_has_a_start_and_passes_over_its_link():
    six = replace(START, update_start_s=2.0, link_passes=100.0)
    bytes_7b = weight_bytes(workload("7B").model)
    assert Replay("7B", six).update_s("h800") == pytest.approx(2 + 100 * bytes_7b / 200e9)
    assert Replay("7B", six).update_s("h20") == pytest.approx(2 + 100 * bytes_7b / 450e9)


def test_the_planner_gets_no_gang_that_crosses_types_for_nothing():
    assert all(len(gang.nodes) == 1 for gang in ours.problem("7B", START).gangs)


def test_a_plan_waits_neither_for_an_update_nor_for_the_longest_answer():
    replay, plan = Replay("14B", WAITING), ours.quickest("14B", WAITING)
    hidden_s = max(replay.rollout_s("h20", 48), replay.train_s("h800", 8))
    assert replay.hidden_rate(48) == pytest.approx(replay.tokens / hidden_s)
    assert replay.hex_rate(48) == pytest.approx(replay.tokens / (hidden_s + replay.hex_update_s(48)))
    assert plan.tokens_per_s > replay.hidden_rate(48) > replay.hex_rate(48)
    assert plan.tokens_per_s <= 1.001 * replay.tokens / replay.train_s("h800", 8)
    assert plan.price_per_h <= 131.04


@pytest.mark.parametrize("model", MODELS)
def test_a_plan_keeps_no_more_in_flight_than_the_bound_lets_be_and_its_tail_ends_within_the_age_window(model):
    problem, plan = ours.problem(model, START), ours.quickest(model, START)
    assert plan.in_flight <= 8 * 512
    period_s = problem.demand.tokens / plan.tokens_per_s
    used = [column for column in problem.rollout if plan.replicas.get(column.name)]
    assert used
    assert all(20_000 * column.token_s <= 7.5 * period_s for column in used)


def test_an_age_window_only_slows():
    slow = replace(START, h20_rollout=0.02, h800_rollout=0.02)
    held, free = (ours.quickest("1.5B", slow, has_age_window=window).tokens_per_s for window in (True, False))
    assert held < 0.999 * free


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
