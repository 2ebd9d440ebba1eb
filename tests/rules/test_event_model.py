"""The event model predicts what an engine does that is played answer by answer, and holds the bound as it does."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from round_engine import RoundEngine

from offbeat.rules import padding_split
from offbeat.rules.event_model import BurstRules, Bursts, EventModelConfig, Survivor, outlooks
from offbeat.rules.length_model import LengthDistribution
from offbeat.rules.step_time import StepTime

UNIT = StepTime(1.0, 0.0, 0.0, 0.0)
"""A step takes a second, whatever it does."""
GPU = StepTime(2.8e-3, 31e-6, 8e-9, 20e-6)


def always(*lengths: int) -> LengthDistribution:
    """Each of these with the same share."""
    return LengthDistribution(np.array([np.mean(np.array(lengths) > at) for at in range(max(lengths) + 1)]))


def test_answers_of_one_length_are_what_arithmetic_says():
    setting = EventModelConfig(groups_per_step=2, group_size=4, max_staleness=1, prompt_tokens=10, update_s=3.0)
    step_time = StepTime(0.5, 0.01, 0.001, 0.1)
    (alone,) = outlooks(setting, step_time, always(100), [1.0], seed=0)
    seconds = 50 + 8 * 100 * 0.01 + 8 * (100 * 10 + 5050) * 0.001 + 8 * 10 * 0.1 + 3
    assert alone.step_s == pytest.approx(seconds)
    assert alone.tokens_per_s == pytest.approx(800 / seconds)
    assert alone.mean_rows == pytest.approx(8)
    assert alone.max_context_tokens == pytest.approx(8 * 110)
    assert (alone.off_policy_share, alone.staleness_max, alone.reprefill_share) == (0, 0, 0)


def test_twice_as_many_groups_of_one_length_make_every_second_round_free():
    setting = EventModelConfig(groups_per_step=2, group_size=4, max_staleness=1)
    one, two = outlooks(setting, UNIT, always(100), [1.0, 2.0], seed=0)
    assert one.step_s == pytest.approx(100)
    assert two.step_s == pytest.approx(50)
    assert two.off_policy_share == pytest.approx(0.5)
    assert two.staleness_max == 1


def played(setting: EventModelConfig, step_time: StepTime, lengths: np.ndarray, num_groups: int, num_rounds: int):
    """Seconds, tokens and the oldest staleness of each round, by the model and by the engine."""
    per_group = 1 if setting.gate == "strict" else setting.group_size
    table = lengths.reshape(-1, setting.group_size // per_group)
    none = np.zeros((0, table.shape[1]), np.int64)
    terms = BurstRules(
        setting.groups_per_step * per_group,
        setting.max_staleness,
        setting.prompt_tokens,
        setting.slots,
        setting.resumes,
        setting.pads,
    )
    bursts = Bursts(terms, np.array([num_groups * per_group]), none, none, np.zeros(0, np.int64))
    engine = RoundEngine(setting, step_time, lambda prompt: lengths[prompt])
    for _ in range(num_rounds):
        flow = bursts.play(table)
        sums = (flow.num_steps, flow.num_rows, flow.num_context_tokens, flow.num_prefilled_tokens)
        seen = engine.play(num_groups / setting.groups_per_step)
        model_s = step_time.seconds(*(float(each[0]) for each in sums)) + setting.update_s
        oldest = int(np.flatnonzero(flow.delivered_by_age[0]).max())
        yield (model_s, flow.num_rows[0], oldest), (seen.seconds, seen.num_generated, seen.max_staleness)


@settings(deadline=None, max_examples=60)
@given(
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(0, 3),
    st.floats(0, 1),
    st.sampled_from(["strict", "release"]),
    st.booleans(),
    st.booleans(),
    st.integers(0, 10**6),
)
def test_every_round_is_the_engines_round(groups_per_step, group_size, bound, more, gate, resumes, pads, seed):
    setting = EventModelConfig(
        groups_per_step, group_size, bound, prompt_tokens=7, gate=gate, resumes=resumes, pads=pads
    )
    num_groups = groups_per_step + round(more * bound * groups_per_step)
    lengths = np.random.default_rng(seed).geometric(0.05, size=(40 * groups_per_step, group_size))
    for model, engine in played(setting, GPU, lengths, num_groups, num_rounds=8):
        assert model == pytest.approx(engine)
        assert engine[2] <= bound


@settings(deadline=None, max_examples=30)
@given(
    st.integers(2, 5), st.integers(1, 4), st.integers(1, 4), st.sampled_from(["strict", "release"]), st.integers(0, 99)
)
def test_every_round_is_that_of_an_engine_that_reads_long_rows_apart(groups_per_step, group_size, bound, gate, seed):
    setting = EventModelConfig(groups_per_step, group_size, bound, prompt_tokens=7, gate=gate, resumes=True, pads=True)
    lengths = np.random.default_rng(seed).geometric(0.03, size=(60 * groups_per_step, group_size))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(padding_split, "MIN_SAVED_TOKENS", 40)
        for model, engine in played(setting, GPU, lengths, groups_per_step * (bound + 1), num_rounds=8):
            assert model == pytest.approx(engine)


def test_with_fewer_slots_than_answers_a_row_goes_to_the_next_when_it_is_free():
    setting = EventModelConfig(groups_per_step=4, group_size=4, max_staleness=2, prompt_tokens=7, slots=10)
    lengths = np.random.default_rng(0).geometric(0.02, size=(60, 4))
    for model, engine in played(setting, GPU, lengths, num_groups=8, num_rounds=8):
        assert model == pytest.approx(engine)


def test_all_factors_see_the_same_answers_and_the_same_seed_gives_the_same_outlook():
    setting = EventModelConfig(4, 4, 2, prompt_tokens=10)
    law = always(10, 20, 40, 80, 160)
    several = outlooks(setting, GPU, law, [1.0, 1.5, 3.0], seed=5)
    assert outlooks(setting, GPU, law, [1.0, 1.5, 3.0], seed=5) == several
    assert outlooks(setting, GPU, law, [1.0, 1.5, 3.0], seed=6) != several
    twice = outlooks(setting, GPU, law, [1.5, 3.0, 1.5], seed=5)
    assert twice[0] == twice[2] == several[1]


def test_resuming_saves_the_prefill_of_what_goes_on():
    setting = EventModelConfig(4, 4, 2, prompt_tokens=10)
    law = always(10, 20, 40, 80, 160)
    (refilled,) = outlooks(setting, GPU, law, [2.0], seed=0)
    (resumed,) = outlooks(replace(setting, resumes=True), GPU, law, [2.0], seed=0)
    assert refilled.reprefill_share > 0 == resumed.reprefill_share
    assert resumed.tokens_per_s == pytest.approx(refilled.tokens_per_s / (1 - refilled.reprefill_share))


def test_it_begins_with_the_groups_that_really_survive():
    setting = EventModelConfig(groups_per_step=1, group_size=2, max_staleness=3)
    survivors = [Survivor(1, (40, 100), (False, True)), Survivor(2, (90, 100), (False, True))]
    (seen,) = outlooks(setting, UNIT, always(100), [2.0], seed=0, num_rounds=2, survivors=survivors)
    # One round ends the older survivor after 10 steps, the other the younger after 50 more.
    assert seen.step_s == pytest.approx((10 + 50) / 2)
    assert seen.staleness_max == 2


def test_a_survivor_whose_last_chance_it_is_is_waited_for():
    setting = EventModelConfig(groups_per_step=1, group_size=1, max_staleness=1)
    survivors = [Survivor(1, (1,), (False,))]
    (seen,) = outlooks(setting, UNIT, always(50), [2.0], seed=0, num_rounds=1, survivors=survivors)
    assert seen.step_s == pytest.approx(49)
