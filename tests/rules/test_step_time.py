"""Step times are learnt from sums over intervals, and a stall of the machine teaches little."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.rules.step_time import StepTime, StepTimeFit, Timing

GPU = StepTime(2.8e-3, 31e-6, 8e-9, 20e-6)


def timing(truth: StepTime, rows: int, context: int, prefilled: int, factor: float = 1.0) -> Timing:
    """A hundred steps of so many rows."""
    work = (100, 100 * rows, 100 * rows * context, prefilled)
    return Timing(*work, factor * truth.seconds(*work))


def varied(truth: StepTime, num: int, noise: float = 0.0, seed: int = 0) -> list[Timing]:
    rng = np.random.default_rng(seed)
    return [
        timing(
            truth,
            int(rng.integers(1, 128)),
            int(rng.integers(100, 4000)),
            int(rng.integers(0, 20_000)),
            math.exp(noise * rng.normal()),
        )
        for _ in range(num)
    ]


def fitted(timings: list[Timing]) -> StepTimeFit:
    fit = StepTimeFit()
    for each in timings:
        fit.observe(each)
    return fit


def figures(model: StepTime) -> list[float]:
    return [model.base_s, model.per_row_s, model.per_token_s, model.prefill_s]


def test_seconds_are_sums_over_the_steps():
    assert StepTime(1.0, 0.1, 0.01, 0.5).seconds(10, 40, 400, 6) == pytest.approx(10 + 4 + 4 + 3)


def test_exact_observations_give_the_figures_back():
    fit = fitted(varied(GPU, 40))
    assert figures(fit.model) == pytest.approx(figures(GPU), rel=0.02)
    assert fit.error < 0.005


def test_noise_averages_out_of_the_figures_and_of_the_error():
    fit = fitted(varied(GPU, 200, noise=0.03))
    assert fit.model.seconds(100, 6400, 6_400_000, 5000) == pytest.approx(
        GPU.seconds(100, 6400, 6_400_000, 5000), rel=0.02
    )
    assert fit.error < 0.02


def test_a_machine_that_is_now_fast_and_now_slow_is_predicted_badly():
    slower = StepTime(*(4 * figure for figure in figures(GPU)))
    fit = fitted([one for seed in range(10) for one in varied((GPU, slower)[seed % 2], 12, seed=seed)])
    assert fit.error > 0.15


def test_there_is_no_model_before_a_few_observations_were_predicted():
    timings = varied(GPU, 20)
    fit = StepTimeFit()
    assert fit.model is None
    assert fit.error == math.inf
    for each in timings[:6]:
        fit.observe(each)
        assert fit.model is None
    for each in timings[6:]:
        fit.observe(each)
    assert fit.model is not None


def test_there_is_no_model_while_all_observations_are_alike():
    rng = np.random.default_rng(0)
    alike = [timing(GPU, 64, 1000, 500, math.exp(0.02 * rng.normal())) for _ in range(50)]
    assert fitted(alike).model is None


def test_what_was_never_prefilled_is_taken_to_cost_a_row():
    fit = fitted([timing(GPU, rows, context, 0) for rows in (1, 8, 30, 64, 128) for context in (100, 1000, 3000)])
    assert fit.model.prefill_s == pytest.approx(fit.model.per_row_s)


@pytest.mark.parametrize("times", [3, 10])
@pytest.mark.parametrize("stalled", [[0], [2, 3], [20], [25, 26, 39]])
def test_a_stall_of_the_machine_moves_the_figures_little(stalled, times):
    timings = varied(GPU, 40, noise=0.01)
    for index in stalled:
        timings[index] = replace(timings[index], seconds=times * timings[index].seconds)
    fit = fitted(timings)
    work = (100, 6400, 6_400_000, 5000)
    assert fit.model.seconds(*work) == pytest.approx(GPU.seconds(*work), rel=0.01)
    assert fit.error < 0.1


def test_a_machine_that_becomes_half_as_fast_for_good_is_noticed():
    slower = StepTime(*(2 * figure for figure in figures(GPU)))
    fit = fitted(varied(GPU, 100) + varied(slower, 100, seed=1))
    assert fit.model.seconds(1, 64, 64_000) == pytest.approx(slower.seconds(1, 64, 64_000), rel=0.1)
    assert fit.error < 0.1


def test_idle_intervals_say_nothing():
    fit = fitted([Timing(0, 0, 0, 0, 5.0), Timing(10, 10, 10, 0, 0.0)])
    assert fit.num_observations == 0


@settings(deadline=None, max_examples=50)
@given(
    st.lists(
        st.builds(
            Timing,
            st.integers(0, 500),
            st.integers(0, 10**5),
            st.integers(0, 10**8),
            st.integers(0, 10**5),
            st.floats(0, 60),
        ),
        max_size=40,
    )
)
def test_no_figure_is_ever_negative_or_not_a_number_whatever_is_reported(timings):
    model = fitted(timings).model
    assert model is None or all(0 <= figure < math.inf for figure in figures(model))


def test_where_noise_hides_what_context_costs_a_row_is_told_from_a_step():
    """As in rounds of a small model: fewer and fewer rows whose context grows, in short intervals on a busy machine."""
    truth, rng = StepTime(1.3e-3, 4e-5, 2e-7, 3e-5), np.random.default_rng(0)
    rounds = [(rows, 20 + 30 * i) for i, rows in enumerate([32, 20, 12, 8, 8, 6, 4, 2])] * 8
    fit = fitted([timing(truth, rows, context, 0, math.exp(0.2 * rng.normal())) for rows, context in rounds])
    assert fit.model is not None
    assert fit.error < 0.15, "what a round takes is predicted well though no interval of it is"
    for rows in (2, 32):
        work = (100, 100 * rows, 100 * rows * 60, 0)
        assert fit.model.seconds(*work) == pytest.approx(truth.seconds(*work), rel=0.25)
