"""The step time of several engines, seen as one."""

import numpy as np
import pytest

from offbeat.rules.step_time import FleetFit, StepTime, Timing

FAST, SLOW = StepTime(1e-3, 1e-5, 2e-8, 1e-5), StepTime(3e-3, 3e-5, 6e-8, 3e-5)


def timings(model: StepTime, seed: int = 0) -> list[Timing]:
    rng, found = np.random.default_rng(seed), []
    for rows, context in zip(rng.integers(1, 200, 40), rng.integers(10, 2000, 40), strict=True):
        work = (10, int(10 * rows), int(10 * rows * context), int(rows))
        found.append(Timing(*work, model.seconds(*work)))
    return found


def close_to(model: StepTime) -> StepTime:
    return pytest.approx([model.base_s, model.per_row_s, model.per_token_s, model.prefill_s], rel=0.02)


def figures(model: StepTime | None) -> list[float]:
    assert model is not None
    return [model.base_s, model.per_row_s, model.per_token_s, model.prefill_s]


def test_nothing_is_known_of_nobody():
    fleet = FleetFit()
    assert (fleet.model, fleet.error) == (None, float("inf"))
    fleet.observe("w", timings(FAST)[:2])
    assert fleet.model is None


def test_one_engine_is_itself():
    fleet = FleetFit()
    fleet.observe("w", timings(FAST))
    assert figures(fleet.model) == close_to(FAST)
    assert fleet.error < 0.01


def test_two_like_engines_take_half_as_long_for_each_row():
    fleet = FleetFit()
    fleet.observe("a", timings(FAST, 1))
    fleet.observe("b", timings(FAST, 2))
    assert figures(fleet.model) == close_to(StepTime(1e-3, 5e-6, 1e-8, 5e-6))


def test_unequal_engines_share_rows_by_their_speed():
    fleet = FleetFit()
    fleet.observe("fast", timings(FAST))
    fleet.observe("slow", timings(SLOW))
    # Three rows on the fast one for one on the slow: a row takes 3/4 of what it takes the fast one alone.
    assert figures(fleet.model) == close_to(StepTime(2e-3, 0.75e-5, 1.5e-8, 0.75e-5))
    fleet.left("slow")
    fleet.left("nobody")
    assert figures(fleet.model) == close_to(FAST)
