"""The controller over-provisions where it pays, as much as pays, and not at all where it does not know."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from round_engine import RoundEngine

from offbeat.rules.event_model import EventModelConfig
from offbeat.rules.length_model import LengthEstimator
from offbeat.rules.over_provision import MIN_ENDED, Decision, OverProvision, PredictionErrors
from offbeat.rules.step_time import StepTime, StepTimeFit, Timing

GPU = StepTime(2.8e-3, 31e-6, 8e-9, 20e-6)
CPU = StepTime(1.3e-3, 3.8e-5, 2.4e-7, 2.8e-5)
ON_GPU = EventModelConfig(groups_per_step=4, group_size=8, max_staleness=2, prompt_tokens=128)
ON_CPU = replace(ON_GPU, prompt_tokens=16, pads=True)


def lognormal(median: float, sigma: float, cap: int, shared: float, seed: int):
    """A group's lengths by its prompt, drawn before anything runs."""

    def lengths(prompt: int) -> np.ndarray:
        rng = np.random.default_rng((seed, prompt))
        scores = math.sqrt(shared) * rng.normal() + math.sqrt(1 - shared) * rng.normal(size=8)
        return np.clip(np.rint(median * np.exp(sigma * scores)), 1, cap).astype(int)

    return lengths


def two_humps(median: float, cap: int, shared: float, seed: int):
    """A fifth of the answers are twelve times as long."""
    score = lognormal(1000, 1, 10**9, shared, seed)
    long_from = 1000 * math.exp(0.8416)

    def lengths(prompt: int) -> np.ndarray:
        noise = np.random.default_rng((seed, prompt, 1)).normal(size=8)
        middle = np.where(score(prompt) < long_from, median, 12 * median)
        return np.clip(np.rint(middle * np.exp(0.3 * noise)), 1, cap).astype(int)

    return lengths


class Run:
    """Rounds of an engine under a controller that is told what a run would tell it."""

    def __init__(self, setting: EventModelConfig, step_time: StepTime, lengths, cap: int):
        self.engine = RoundEngine(setting, step_time, lengths)
        self.lengths, self.fit = LengthEstimator(cap), StepTimeFit()
        self.controller = OverProvision(setting, self.lengths, self.fit)
        self.decisions: list[Decision] = []
        self.rates: list[tuple[int, float]] = []

    def play(self, num_rounds: int) -> Run:
        for _ in range(num_rounds):
            decision = self.controller.decide(self.engine.survivors())
            seen = self.engine.play(decision.factor)
            for timing in seen.timings:
                self.fit.observe(timing)
            self.engine.tell(self.lengths)
            self.controller.outcome(seen.num_generated, seen.seconds)
            self.decisions.append(decision)
            self.rates.append((seen.num_generated, seen.seconds))
        return self

    @property
    def factors(self) -> list[float]:
        return [decision.factor for decision in self.decisions]

    @property
    def rate(self) -> float:
        """Tokens a second after the first third."""
        return rate_of(self.rates)


def rate_of(rounds: list[tuple[int, float]]) -> float:
    tokens, seconds = zip(*rounds[len(rounds) // 3 :], strict=True)
    return sum(tokens) / sum(seconds)


def fixed_rate(setting: EventModelConfig, step_time: StepTime, lengths, factor: float, num_rounds: int) -> float:
    engine = RoundEngine(setting, step_time, lengths)
    rounds = [engine.play(factor) for _ in range(num_rounds)]
    return rate_of([(each.num_generated, each.seconds) for each in rounds])


LAWS = {
    "gpu, long tail": (ON_GPU, GPU, lambda seed: lognormal(500, 1, 4000, 0.5, seed), 4000, 30),
    "gpu, two humps": (ON_GPU, GPU, lambda seed: two_humps(500, 16_000, 0.0, seed), 16_000, 30),
    "gpu, light tail": (ON_GPU, GPU, lambda seed: lognormal(1000, 0.1, 4000, 0.5, seed), 4000, 90),
    "cpu, long tail": (ON_CPU, CPU, lambda seed: lognormal(60, 1, 480, 0.0, seed), 480, 30),
    "cpu, light tail": (ON_CPU, CPU, lambda seed: lognormal(60, 0.1, 480, 0.5, seed), 480, 90),
}
"""With the rounds for which factors are held: where answers are alike, those of the first burst keep in step for dozens
of rounds, and what that gives a fixed factor is not what it gives in the long run."""


@pytest.mark.parametrize(
    "law", [pytest.param(law, marks=[] if law.endswith("long tail") else pytest.mark.full) for law in LAWS]
)
def test_it_comes_within_three_per_cent_of_the_best_fixed_factor(law):
    setting, step_time, draw, cap, num_fixed = LAWS[law]
    auto, fixed = 0.0, dict.fromkeys((1.0, 1.5, 2.0, 3.0), 0.0)
    for seed in range(2):
        auto += Run(setting, step_time, draw(seed), cap).play(30).rate
        for factor in fixed:
            fixed[factor] += fixed_rate(setting, step_time, draw(seed), factor, num_fixed)
    assert auto >= 0.97 * max(fixed.values()), {factor: rate / fixed[1.0] for factor, rate in fixed.items()}


def test_it_is_where_it_wants_to_be_within_eight_rounds_and_stays_there():
    run = Run(ON_GPU, GPU, lognormal(500, 1, 4000, 0.5, seed=0), 4000).play(24)
    assert run.factors[0] == 1.0
    assert min(run.factors[8:]) >= 2.0
    moves = [before != after for before, after in itertools.pairwise(run.factors[8:])]
    assert sum(moves) <= 2
    assert np.abs(run.controller.corrections.by_factor).max() < 0.15


def test_where_every_answer_is_as_long_as_the_next_and_rows_are_cheap_only_in_number_nothing_is_over_provisioned():
    by_the_row = StepTime(1e-5, 1e-3, 0.0, 1e-3)  # no step is dear by itself: a burst saves nothing
    run = Run(ON_GPU, by_the_row, lognormal(200, 0.05, 4000, 0.0, seed=0), 4000).play(8)
    assert run.factors == [1.0] * 8
    assert "too little" in run.decisions[-1].reason


def known(setting: EventModelConfig = ON_GPU, step_time: StepTime = GPU, noise: float = 0.0) -> OverProvision:
    """A controller that has seen a long tail and what steps take."""
    rng = np.random.default_rng(0)
    lengths, fit = LengthEstimator(4000), StepTimeFit()
    for prompt in range(32):
        for member, num_tokens in enumerate(lognormal(500, 1, 4000, 0.0, seed=1)(prompt)):
            lengths.finished((prompt, member), int(num_tokens), prompt)
    for _ in range(40):
        rows, context = rng.integers(1, 200), rng.integers(100, 4000)
        work = (100, int(100 * rows), int(100 * rows * context), int(rng.integers(0, 9000)))
        fit.observe(Timing(*work, step_time.seconds(*work) * math.exp(noise * rng.normal())))
    return OverProvision(setting, lengths, fit)


def test_it_does_not_act_before_enough_answers_have_ended():
    controller = known()
    controller.lengths = LengthEstimator(4000)
    decision = controller.decide()
    assert (decision.factor, decision.predicted_tokens_per_s) == (1.0, None)
    assert decision.reason == f"too few answers have ended: 0 of {MIN_ENDED}"


def test_it_does_not_act_before_step_times_are_known():
    controller = known()
    controller.fit = StepTimeFit()
    assert controller.decide() == Decision(1.0, "step times are not known yet")


def test_it_stays_at_one_while_step_times_are_predicted_badly():
    assert known().decide().factor > 1
    controller = known()
    controller.fit = SimpleNamespace(model=controller.fit.model, error=0.2)
    decision = controller.decide()
    assert decision.factor == 1
    assert decision.reason == "step times are predicted badly: 20% off, 15% allowed"


def test_once_it_has_left_one_only_far_worse_predictions_bring_it_back():
    controller = known()
    assert controller.decide().factor > 1
    controller.fit = SimpleNamespace(model=controller.fit.model, error=0.2)
    assert controller.decide().factor > 1
    controller.fit = SimpleNamespace(model=controller.fit.model, error=0.4)
    assert controller.decide() == Decision(1.0, "step times are predicted badly: 40% off, 30% allowed")
    controller.fit = SimpleNamespace(model=known().fit.model, error=0.2)
    assert controller.decide().factor == 1


def test_with_a_bound_of_zero_there_is_nothing_to_choose():
    assert (
        known(replace(ON_GPU, max_staleness=0)).decide().reason
        == "max_staleness = 0 leaves no room for more groups in flight"
    )


def test_what_does_not_fit_into_the_room_for_keys_and_values_is_not_chosen():
    free, tight = known(), known(replace(ON_GPU, max_context_tokens=28_000))
    assert max(free.decide().factor for _ in range(4)) == 3.0
    assert 1 < max(tight.decide().factor for _ in range(4)) < 2.5
    assert known(replace(ON_GPU, max_context_tokens=1.0)).decide().factor == 1


def test_a_decision_says_what_it_expects():
    decision = known().decide()
    assert decision.predicted_tokens_per_s > 3000
    assert decision.predicted_step_s > 0
    assert 0 < decision.predicted_off_policy_share < 1
    assert "predicted to gain" in decision.reason


def test_the_same_history_leads_to_the_same_decisions():
    assert [known().decide() for _ in range(2)] == [known().decide() for _ in range(2)]


def test_without_rounds_nothing_is_corrected():
    assert (PredictionErrors([1.0, 2.0, 3.0]).by_factor == 0).all()


def test_an_error_that_is_the_same_everywhere_favours_nobody():
    corrections = PredictionErrors([1.0, 2.0, 3.0])
    for index in [0, 1, 2] * 20:
        corrections.note(index, tokens=80.0, seconds=1.0, predicted=100.0, predicted_s=1.0)
    assert corrections.by_factor == pytest.approx([math.log(0.8)] * 3, abs=0.02)
    assert np.ptp(corrections.by_factor) < 0.01


def test_rounds_at_one_factor_are_taken_to_say_more_of_all_than_of_it():
    corrections = PredictionErrors([1.0, 2.0, 5.0])
    for _ in range(20):
        corrections.note(1, 80.0, 1.0, 100.0, 1.0)
    first, second, third = corrections.by_factor
    assert second == pytest.approx(math.log(0.8), abs=0.04)
    assert second < min(first, third) < 0.5 * second


def test_rounds_that_are_free_and_rounds_that_paid_for_them_are_one():
    corrections = PredictionErrors([1.0, 2.0])
    for tokens, seconds in ((1000.0, 10.0), (10.0, 0.001), (990.0, 9.999)):
        corrections.note(1, tokens, seconds, predicted=100.0, predicted_s=6.7)
    assert corrections.by_factor == pytest.approx([0, 0], abs=0.001)


def test_a_factor_that_keeps_disappointing_is_marked_down_slowly():
    corrections = PredictionErrors([1.0, 3.0])
    for _ in range(20):
        corrections.note(0, 100.0, 1.0, 100.0, 1.0)
    seen = []
    for _ in range(20):
        corrections.note(1, 70.0, 1.0, 100.0, 1.0)
        seen.append(corrections.by_factor[1] - corrections.by_factor[0])
    assert seen == sorted(seen, reverse=True)
    assert seen[0] > 0.6 * math.log(0.7)
    assert seen[-1] < 0.7 * math.log(0.7)


def test_a_controller_whose_large_factors_disappoint_turns_to_smaller_ones():
    controller, factors = known(), []
    lengths, controller.lengths = controller.lengths, LengthEstimator(4000)
    for _ in range(3):  # at 1, before anything can be predicted
        controller.decide()
        controller.outcome(2500.0 * 5, 5.0)
    controller.lengths = lengths
    for _ in range(40):
        decision = controller.decide()
        controller.outcome(5 * decision.predicted_tokens_per_s / decision.factor, 5.0)
        factors.append(decision.factor)
    assert max(factors) > 2
    assert max(factors[-10:]) < 2
