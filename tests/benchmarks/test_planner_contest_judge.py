"""The judge's arithmetic by hand, and its simulation where the answer is plain."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from benchmarks.planner_contest.judge import decode, train
from benchmarks.planner_contest.judge.plan import Card, Figures, Gang, Plan, Replicas, Sync
from benchmarks.planner_contest.judge.score import quantiles, relay_bytes_per_s, score, update_s
from benchmarks.planner_contest.judge.shape import all_parameters, kv_bytes, touched_parameters, weight_bytes
from offbeat.planner.inputs.hardware import Accelerator, Inventory, Link, MachineClass
from offbeat.planner.inputs.workload import KvPolicy, LengthStatistics, ModelShape, Workload

QWEN_7B = ModelShape("7b", 28, 3584, 28, 4, 128, 18_944, 152_064)
QWEN_14B = ModelShape("14b", 48, 5120, 40, 8, 128, 13_824, 152_064)
MOE = ModelShape("30b-a3b", 48, 2048, 32, 4, 128, 768, 151_936, num_experts=128, experts_per_token=8)
H800 = Accelerator("H800", 756e12, 80e9, 2e12, 200e9, 64e9)
H20 = Accelerator("H20", 148e12, 96e9, 4e12, 450e9, 64e9)
FIXED = LengthStatistics(4000, 4000**2, 4000, 0, 4000)
NO_PROMPT = LengthStatistics(1e-9, 1e-18, 0, 0, 0)
CLUSTER = Inventory(
    {"h800": MachineClass("h800", H800, 8, 2, 5.28), "h20": MachineClass("h20", H20, 8, 6, 1.85)},
    {
        frozenset(["h800"]): Link(5e9),
        frozenset(["h20"]): Link(5e9),
        frozenset(["h800", "h20"]): Link(1.5e9),
    },
)
WORK = Workload(QWEN_7B, 32, 16, NO_PROMPT, FIXED, bound=4, kv=KvPolicy.STALE)
PLAN = Plan(Gang({"h800": 1}, 1, 1, 8), (Replicas("h20", 1, 64, 48),))


def test_sizes_of_published_models_come_out():
    assert all_parameters(QWEN_7B) == pytest.approx(7.616e9, rel=1e-3)
    assert all_parameters(QWEN_14B) == pytest.approx(14.770e9, rel=1e-3)
    assert kv_bytes(QWEN_14B) == 196_608
    assert all_parameters(MOE) == pytest.approx(30.5e9, rel=0.01)
    assert touched_parameters(MOE, 1) < touched_parameters(MOE, 8) < touched_parameters(MOE, 64)


def test_a_decode_step_by_hand():
    figures = Figures(cards={"H20": Card(1, 1, 1, 1, 1)}, network=1, step_overhead_s=1e-3, row_overhead_s=1e-5)
    multiplied = 28 * (3584 * 128 * 36 + 28 * 128 * 3584 + 3 * 3584 * 18_944) + 152_064 * 3584
    few = 2 * multiplied / 4e12 + 8 * 2000 * 57_344 / 4e12 + 1e-3 + 8e-5
    assert decode.step_s(H20, WORK, 1, 8, figures) == pytest.approx(few)
    many = (
        2 * multiplied * 100 / 148e12 + 100 * 2000 * 57_344 / 4e12 + 1e-3 + 1e-3
    )  # above 37 rows compute is the longer
    assert decode.step_s(H20, WORK, 1, 100, figures) == pytest.approx(many)
    talk = 2 * 28 * (2 * 0.5 * 2 * 8 * 3584 / 450e9 + 9e-6)
    assert decode.step_s(H20, WORK, 2, 8, figures) == pytest.approx((few - 1.08e-3) / 2 + talk + 1.08e-3)


def test_computing_keys_and_values_again_takes_what_the_page_says():
    work = replace(WORK, prompt=LengthStatistics(2000, 2000**2, 2000, 0, 2000), kv=KvPolicy.REFILL)  # 4k of context
    assert decode.refill_s(H20, work, 1, 128, Figures()) == pytest.approx(80, rel=0.12)
    assert decode.refill_s(H800, work, 1, 128, Figures()) == pytest.approx(16, rel=0.12)
    assert decode.refill_s(H20, WORK, 1, 128, Figures()) == 0


def test_a_training_step_by_hand():
    gang = Gang({"h800": 1}, 1, 1, 8, zero=3)
    tokens = 512 * 4000
    multiplied = 28 * (3584 * 128 * 36 + 28 * 128 * 3584 + 3 * 3584 * 18_944) + 152_064 * 3584
    flops = 8 * multiplied * tokens + 4 * 2 * 28 * 28 * 128 * 512 * 4000**2
    ring_s = 2 * all_parameters(QWEN_7B) * 2 * 7 / 8 / (200e9 * 0.7) * 0.5
    num_microbatches = tokens / 8 / (WORK.prompt.longest + WORK.answer.longest)
    assert not train.must_recompute(CLUSTER, WORK, gang, Figures())
    computed_s = flops / (8 * 756e12 * 0.4)
    assert train.step_s(CLUSTER, WORK, replace(gang, zero=2), Figures()) == pytest.approx(computed_s + ring_s)
    gathered_s = ring_s * (0.5 + num_microbatches)  # weights for every microbatch, gradients added up but not spread
    assert train.step_s(CLUSTER, WORK, gang, Figures()) == pytest.approx(computed_s + gathered_s)


def test_a_stage_holds_whole_layers():
    hidden = Figures(exposed_dp=0.0)
    even, uneven = (Gang({"h800": 1}, 1, pp, 8 // pp, zero=3) for pp in (4, 8))  # 28 layers: 7 each, or 4 in some
    step_s = {gang.pp: train.step_s(CLUSTER, WORK, gang, hidden) / train.bubble(WORK, gang) for gang in (even, uneven)}
    assert step_s[8] / step_s[4] == pytest.approx(4 * 8 / 28)


def test_classes_that_share_a_batch_by_speed_are_as_fast_as_both():
    speeds = {"h800": 8 * 756, "h20": 8 * 148}
    shares = {name: speed / sum(speeds.values()) for name, speed in speeds.items()}
    hidden = Figures(exposed_dp=0.0)
    both = train.step_s(CLUSTER, WORK, Gang({"h800": 1, "h20": 1}, 1, 1, 16, batch_shares=shares), hidden)
    alone = train.step_s(CLUSTER, WORK, Gang({"h800": 1}, 1, 1, 8), hidden)
    assert both == pytest.approx(alone * 756 / 904)


def test_a_stage_that_splits_its_layers_wider_adds_its_gradients_over_more_nodes():
    # four replicas on 8 H800 and 16 H20: two cards each there, four here, so that two nodes hold two replicas each
    gang = Gang({"h800": 1, "h20": 2}, 2, 2, 4, layers=(20, 8))
    instant = Figures({name: Card(mfu=1e9) for name in ("H800", "H20")}, exposed_tp=0.0)
    stage_bytes = all_parameters(QWEN_7B) * 2 * 8 / 28
    within_s, between_s = 2 * stage_bytes / 4 * 1 / 2 / 450e9, 2 * stage_bytes * 1 / 2 / 5e9
    near = replace(CLUSTER, links={**CLUSTER.links, frozenset(["h800", "h20"]): Link(1e18)})
    assert train.step_s(near, WORK, gang, instant) == pytest.approx((within_s + between_s) / 0.7 * 0.5)


def test_what_passes_between_stages_takes_its_time_on_the_busiest_link():
    instant = Figures({name: Card(mfu=1e9) for name in ("H800", "H20")}, exposed_tp=0.0, exposed_dp=0.0)
    moved = 2 * 2 * WORK.trained_tokens_per_step * QWEN_7B.hidden
    crossing = Gang({"h800": 2, "h20": 2}, 2, 2, 8, layers=(20, 8))
    assert train.step_s(CLUSTER, WORK, crossing, instant) == pytest.approx(moved / 1.5e9 / 2)
    one_class = Gang({"h20": 2}, 8, 2, 1)  # a stage on each node
    assert train.step_s(CLUSTER, WORK, one_class, instant) == pytest.approx(moved / 5e9)
    one_node = Gang({"h20": 1}, 4, 2, 1)
    assert train.crossing_s(CLUSTER, WORK, one_node) == 0.0


def test_a_node_that_sends_a_version_to_two_divides_its_port():
    alone = Plan(Gang({"h800": 1}, 1, 1, 8), (Replicas("h20", 1, 64, 8),))
    both = replace(alone, replicas=(*alone.replicas, Replicas("h800", 1, 64, 8)))
    assert relay_bytes_per_s(CLUSTER, alone)["h20"] == 1.5e9
    assert relay_bytes_per_s(CLUSTER, both)["h20"] == 0.75e9


def test_generation_that_is_too_slow_sets_the_period():
    result = score(CLUSTER, WORK, replace(PLAN, replicas=(Replicas("h20", 1, 32, 2),)))
    rate = 2 * decode.tokens_per_s(H20, WORK, 1, 32 * 0.9, Figures())
    assert result.tokens_per_s == pytest.approx(rate, rel=0.01)
    assert result.period_s > 2 * result.train_s


def test_a_trainer_that_is_too_slow_sets_the_period():
    result = score(CLUSTER, WORK, replace(PLAN, gang=Gang({"h20": 1}, 1, 1, 8)))
    assert result.period_s == pytest.approx(result.train_s + weight_bytes(QWEN_7B) / (8 * 64e9), rel=1e-3)


def test_blocking_sync_is_added_to_every_step():
    blocking = replace(PLAN, sync=Sync.BLOCKING, copies=5)
    assert update_s(CLUSTER, WORK, blocking) == pytest.approx(5 * 15.23 / 1.5, rel=1e-3)
    with_relay, with_copies = score(CLUSTER, WORK, PLAN), score(CLUSTER, WORK, blocking)
    assert with_copies.period_s >= with_relay.period_s + 0.9 * update_s(CLUSTER, WORK, blocking)


def test_slots_beyond_the_bound_stay_empty():
    tight = replace(WORK, bound=1)
    more = score(CLUSTER, tight, replace(PLAN, replicas=(Replicas("h20", 1, 64, 48),)))
    loose = score(CLUSTER, WORK, replace(PLAN, replicas=(Replicas("h20", 1, 64, 48),)))
    assert more.tokens_per_s < loose.tokens_per_s


def test_steps_are_paced_so_that_the_tail_keeps_the_bound():
    many = replace(PLAN, gang=Gang({"h800": 2}, 1, 1, 16), replicas=(Replicas("h20", 1, 40, 48),))
    long = replace(WORK, bound=2, answer=replace(FIXED, tail=16_000, tail_share=0.05))
    result, token_s = score(CLUSTER, long, many), decode.step_s(H20, long, 1, 36, Figures())
    lag_s = weight_bytes(QWEN_7B) / 1.5e9
    begun_s = result.train_s + weight_bytes(QWEN_7B) / (8 * H800.host_bytes_per_s)
    assert 512 * 4000 / result.tokens_per_s == pytest.approx((begun_s + lag_s + 16_000 * token_s) / 2.5)
    assert result.masked_tokens_per_s > result.tokens_per_s


def test_an_update_beside_generation_is_never_judged_worse_than_the_same_one_that_blocks():
    for bound, tail in itertools.product((1, 2, 4), (4_000, 16_000, 64_000)):
        work = replace(WORK, bound=bound, answer=replace(FIXED, tail=tail))
        blocking = replace(PLAN, sync=Sync.BLOCKING, copies=1.0)
        relayed, blocked = (score(CLUSTER, work, plan).tokens_per_s for plan in (PLAN, blocking))
        assert relayed >= blocked * (1 - 1e-3)  # what is relayed goes over the host: 30 ms


def test_a_class_that_a_version_reaches_late_holds_up_its_own_tail_alone():
    work = replace(WORK, bound=2, answer=replace(FIXED, tail=16_000))
    gang, figures = Gang({"h800": 1}, 1, 1, 8), Figures()
    near, far = Replicas("h800", 1, 64, 4), Replicas("h20", 1, 4, 48)
    tails_s = {
        one.offer: 16_000 * decode.step_s(card, work, 1, one.concurrency * figures.busy, figures)
        for one, card in ((near, H800), (far, H20))
    }
    lag_s = {"h800": weight_bytes(QWEN_7B) / 5e9, "h20": weight_bytes(QWEN_7B) / 1.5e9}
    assert tails_s["h800"] > tails_s["h20"]
    result = score(CLUSTER, work, Plan(gang, (near, far)))
    begun_s = result.train_s + weight_bytes(QWEN_7B) / (8 * H800.host_bytes_per_s)
    paced_s = (begun_s + max(lag_s[name] + tails_s[name] for name in lag_s)) / 2.5
    assert result.period_s < paced_s
    assert 512 * 4000 / result.tokens_per_s == pytest.approx(paced_s)


def test_weights_that_do_not_fit_make_nothing():
    small = replace(CLUSTER, classes={**CLUSTER.classes, "h20": replace(
        CLUSTER.classes["h20"], accelerator=replace(H20, memory_bytes=12e9))})  # fmt: skip
    assert score(small, WORK, PLAN).tokens_per_s == 0


def test_a_plan_gets_the_same_score_twice():
    assert score(CLUSTER, WORK, PLAN) == score(CLUSTER, WORK, PLAN)


def test_lengths_have_the_mean_that_was_told():
    drawn = quantiles(LengthStatistics(5000, 1.6 * 5000**2, 12_000, 0.05, 27_648))
    assert sum(drawn) / len(drawn) == pytest.approx(5000, rel=0.03)
    assert quantiles(FIXED) == [4000]
