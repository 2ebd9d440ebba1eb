"""Schedules of rollouts lose no token, keep their bounds and do what was published, on an engine of modelled time."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.partial.accounts import Row, figures_of
from benchmarks.partial.contest import best_at
from benchmarks.partial.engines import StepTime, VirtualEngine, padded_tokens
from benchmarks.partial.entries import OURS, RIVALS, STRICT, Entry
from benchmarks.partial.laws import LAWS, PROMPT_TOKENS, Law, Lengths, Mode
from benchmarks.partial.play import Size, play
from benchmarks.partial.policies.april import April
from benchmarks.partial.policies.sync import Sync
from benchmarks.partial.real import RealEngine, new_stepper
from benchmarks.partial.rollouts import Rollouts

MODEL = StepTime(base_s=2e-3, per_row_s=1e-4, per_token_s=2e-7, prefill_s=1e-4)
SHORT = Law("short", (Mode(1.0, 6, 1.0),), shared=0.5, cap_tokens=40)


class Given(Lengths):
    """The lengths that a test wants, group by group in the order in which they begin."""

    def __init__(self, *groups: list[int]):
        super().__init__(SHORT, seed=0, group_size=len(groups[0]))
        self.groups = list(groups)
        self.numbers: dict[tuple[int, int], int] = {}

    def of(self, prompt: int, epoch: int, member: int) -> int:
        number = self.numbers.setdefault((prompt, epoch), len(self.numbers))
        return self.groups[number % len(self.groups)][member]


def floor(lengths: Lengths, groups_per_step: int = 2, model: StepTime = MODEL) -> Rollouts:
    return Rollouts(VirtualEngine(lengths, model), groups_per_step, update_s=0.1)


def played(entry: Entry, lengths: Lengths, num_steps: int, model: StepTime = MODEL) -> Rollouts:
    rollouts, policy = floor(lengths, groups_per_step=4, model=model), entry.policy()
    for _ in range(num_steps):
        policy.step(rollouts)
    return rollouts


# Every policy


EVERYONE = st.one_of(
    st.builds(Entry, st.sampled_from(sorted(RIVALS)), st.sampled_from([1.0, 1.25, 1.5, 2.0, 3.0])),
    st.builds(Entry, st.sampled_from(sorted(OURS)), st.sampled_from([1.0, 1.25, 1.5, 2.0, 3.0, 5.0])),
)


@pytest.mark.full
@settings(max_examples=60, deadline=None)
@given(entry=EVERYONE, seed=st.integers(0, 9), median=st.sampled_from([1, 3, 12]), shared=st.sampled_from([0, 0.5, 1]))
def test_every_generated_token_is_delivered_wasted_by_name_or_held_after_every_step(entry, seed, median, shared):
    lengths = Lengths(Law("any", (Mode(1.0, median, 1.2),), shared=shared, cap_tokens=60), seed, group_size=8)
    rollouts, policy = floor(lengths, groups_per_step=4), entry.policy()
    num_delivered = num_wasted = 0
    for _ in range(8):
        policy.step(rollouts)
        row = rollouts.rows[-1]
        assert row.num_samples == 32
        num_delivered += row.num_tokens
        num_wasted += row.num_wasted.total()
        held = sum(sample.num_tokens for sample in rollouts.alive)
        assert rollouts.engine.counts.num_rows == num_delivered + num_wasted + held


@pytest.mark.parametrize("curve", sorted(OURS))
def test_ours_never_delivers_a_token_past_its_bound_and_wastes_none(curve: str):
    for factor in (1.25, 2.0, 5.0):
        rollouts = played(Entry(curve, factor), Lengths(SHORT, 3, 8), num_steps=20)
        assert max(max(row.staleness) for row in rollouts.rows) <= OURS[curve].max_staleness
        assert not any(row.num_wasted for row in rollouts.rows)


def test_with_a_long_tail_the_rule_of_real_runs_tries_a_factor_of_one_and_returns_to_the_largest():
    rollouts = played(Entry(STRICT), Lengths(LAWS[0], 1, 8), num_steps=60)
    factors = [row.factor for row in rollouts.rows]
    assert (factors[0], factors[-1], set(factors)) == (5.0, 5.0, {1.0, 5.0})
    assert max(max(row.staleness) for row in rollouts.rows) <= 4


def test_where_prefilling_again_costs_more_than_a_fuller_engine_saves_the_rule_of_real_runs_ends_at_one():
    slow_prefill = StepTime(base_s=2e-3, per_row_s=1e-4, per_token_s=2e-7, prefill_s=1e-3)
    rollouts = played(Entry(f"{STRICT}, refill"), Lengths(LAWS[0], 1, 8), num_steps=60, model=slow_prefill)
    assert rollouts.rows[-1].factor == 1.0


@pytest.mark.parametrize("curve", ["april", STRICT, "copris"])
def test_the_same_seed_gives_the_same_figures_and_another_seed_others(curve: str):
    def metrics(seed: int) -> object:
        engine = VirtualEngine(Lengths(SHORT, seed, 8), MODEL)
        return play(Entry(curve, 1.5).policy(), engine, Size(6), MODEL.prefill_s)

    assert metrics(1) == metrics(1)
    assert metrics(1) != metrics(2)


# What was published


def test_sync_ends_with_the_longest_and_is_all_fresh():
    rollouts = floor(Given([1, 5], [2, 9]))
    Sync().step(rollouts)
    row = rollouts.rows[0]
    assert row.staleness == {0: 17}
    assert row.num_decode_steps == 9


def test_april_aborts_what_is_out_buffers_it_whole_and_resumes_the_oldest_first():
    # Three groups are out for the two that are wanted. The second and third end first, at 4 and 5 tokens; the first is
    # cut at 5 of 8 and comes back with its finished member, beside two fresh ones of which one ends at 2.
    lengths = Given([3, 8], [4, 1], [5, 2], [2, 2], [9, 9])
    rollouts, april = floor(lengths), April(factor=1.5)
    april.step(rollouts)
    assert [group.number for group in april.buffer] == [0]
    assert rollouts.rows[0].staleness == {0: 4 + 1 + 5 + 2}
    assert rollouts.engine.num_running == 0
    april.step(rollouts)
    # The first group ends after 3 more steps: 3 + 5 tokens are of the version before, 3 are fresh.
    assert rollouts.rows[1].staleness == {1: 3 + 5, 0: 3 + 2 + 2}
    assert rollouts.rows[1].num_decode_steps - rollouts.rows[0].num_decode_steps == 3
    # Only the unfinished member was prefilled again, and the prompts of the fresh groups were padded to its 5 tokens.
    assert rollouts.rows[1].num_reprefilled == 3 * (PROMPT_TOKENS + 5) - 2 * PROMPT_TOKENS
    assert [sample.num_tokens for sample in april.buffer[0].samples] == [3, 3]


def test_april_throws_away_what_ends_in_the_wake_up_that_fills_the_step_unless_told_otherwise():
    lengths = [[4, 4], [4, 3], [4, 2]]
    rollouts = floor(Given(*lengths))
    April(factor=1.5).step(rollouts)
    assert rollouts.rows[0].num_wasted == {"surplus": 4 + 2}
    rollouts, keeps = floor(Given(*lengths)), April(factor=1.5, drops_surplus=False)
    keeps.step(rollouts)
    assert not rollouts.rows[0].num_wasted
    keeps.step(rollouts)
    assert rollouts.rows[1].staleness[1] == 4 + 2


def test_kept_keys_and_values_are_never_prefilled_again_and_refilled_ones_are_at_every_update():
    kept, made = (played(Entry(curve, 2.0), Lengths(SHORT, 5, 8), 8) for curve in (STRICT, f"{STRICT}, refill"))
    assert kept.rows[-1].num_reprefilled == 0
    assert made.rows[-1].num_reprefilled > 0
    assert [row.staleness for row in kept.rows] == [row.staleness for row in made.rows]


@pytest.mark.full
def test_the_real_stepper_takes_the_same_steps_and_delivers_the_same_tokens_as_the_model():
    stepper = new_stepper(num_slots=64, max_context_tokens=PROMPT_TOKENS + SHORT.cap_tokens)
    for entry in (Entry("sync"), Entry("april", 1.5), Entry(STRICT, 2.0), Entry("copris", 1.0)):
        modelled = played(entry, Lengths(SHORT, 4, 8), num_steps=4)
        real, policy = Rollouts(RealEngine(Lengths(SHORT, 4, 8), stepper), 4, update_s=0.1), entry.policy()
        num_steps = stepper.num_steps
        for _ in range(4):
            policy.step(real)
        assert stepper.num_steps - num_steps == modelled.engine.counts.num_steps
        assert [row.staleness for row in real.rows] == [row.staleness for row in modelled.rows]
        assert real.engine.counts == modelled.engine.counts
        real.engine.abort()
        assert stepper.is_idle


@pytest.mark.full
def test_the_model_counts_what_the_real_stepper_reads_of_long_rows_and_of_short_ones():
    law = LAWS[0]
    stepper = new_stepper(num_slots=192, max_context_tokens=PROMPT_TOKENS + law.cap_tokens)
    rollouts = Rollouts(RealEngine(Lengths(law, 4, 8), stepper), 4, update_s=0.1)
    policy, before = Entry(STRICT, 4.0).policy(), stepper.metrics.num_context_tokens
    for _ in range(5):
        policy.step(rollouts)
    counted, num_rows = rollouts.engine.counts.num_context_tokens, rollouts.engine.counts.num_rows
    assert counted == pytest.approx(stepper.metrics.num_context_tokens - before, rel=0.03)
    assert counted / num_rows < 108, "118 if all rows were read as far as the longest"


# Figures


def test_the_rate_is_the_smaller_of_tokens_and_of_samples_times_the_mean_begun():
    def rows(tokens: int, num_samples: int, begun_tokens: int) -> list[Row]:
        step = Row(
            2.0, num_samples, Counter({0: tokens}), begun_tokens, num_begun=4, num_generated=9, num_decode_steps=3
        )
        return [Row(), step]

    assert figures_of(rows(100, 4, 400), 1, 0.0).rate == 100 / 2  # short ones were delivered first
    assert figures_of(rows(100, 4, 40), 1, 0.0).rate == 4 * 10 / 2  # long ones that were begun before


def test_off_policy_share_and_percentiles_count_tokens():
    step = Row(1.0, 4, Counter({0: 50, 1: 30, 2: 16, 3: 4}), 100, num_begun=4, num_generated=100, num_decode_steps=10)
    metrics = figures_of([Row(), step], 1, 0.0)
    assert metrics.off_policy_share == 0.5
    assert (metrics.staleness_p50, metrics.staleness_p95, metrics.staleness_max) == (0, 2, 3)
    assert metrics.mean_rows == 10


def test_a_step_reads_every_row_up_to_the_longest_in_buckets_of_16():
    engine = VirtualEngine(Given([3, 40]), MODEL)
    rollouts = Rollouts(engine, 1, update_s=0.0)
    engine.add(rollouts.begin().samples)
    engine.step()  # contexts of 16, 17 and 18 tokens
    assert engine.counts.num_context_tokens == 2 * (16 + 32 + 32)
    engine.step()
    longer = sum(-(-context // 16) * 16 for context in range(19, 56))
    assert engine.counts.num_context_tokens == 2 * (16 + 32 + 32) + longer
    counts = engine.counts
    assert engine.now_s == pytest.approx(
        40 * 2e-3 + (6 + 37) * 1e-4 + counts.num_context_tokens * 2e-7 + PROMPT_TOKENS * 1e-4
    )


def test_prefills_are_padded_to_the_longest_of_a_few_at_a_time():
    assert padded_tokens([]) == 0
    assert padded_tokens([100, 40, 60]) == 300
    assert padded_tokens([2048, 2000, 10]) == 2 * 2048 + 10


def test_a_rival_is_taken_at_its_best_with_no_more_off_policy_tokens():
    curve = [(0.0, 1.0), (0.4, 1.2), (0.8, 0.8)]
    assert best_at(0.2, curve) == pytest.approx(1.1)
    assert best_at(0.6, curve) == 1.2
    assert best_at(0.9, curve) == 1.2


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.name)
def test_lengths_depend_on_seed_prompt_epoch_and_member_alone_and_share_what_the_law_says(law: Law):
    lengths, again = Lengths(law, 7, 8), Lengths(law, 7, 8)
    drawn = [[lengths.of(prompt, 0, member) for member in range(8)] for prompt in range(64)]
    assert drawn == [[again.of(prompt, 0, member) for member in range(8)] for prompt in reversed(range(64))][::-1]
    assert all(1 <= length <= law.cap_tokens for group in drawn for length in group)
    assert [lengths.of(prompt, 1, 0) for prompt in range(64)] != [group[0] for group in drawn]
