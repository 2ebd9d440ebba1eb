import random
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_shapes import CARD, QWEN_1_5B, QWEN_7B, QWEN_14B, cluster, machines, work

from benchmarks.planner_honesty.clusters import random_case
from offbeat.errors import UserError
from offbeat.planner.columns.columns import demand_of, problem_of
from offbeat.planner.columns.gangs import (
    StageCost,
    _alone_on,
    crossing_share,
    divided,
    fabric_of,
    node_grid,
    over_links,
    split_layers,
)
from offbeat.planner.columns.replicas import class_columns, row_grid, undominated
from offbeat.planner.cost.constants import Constants, Efficiencies
from offbeat.planner.cost.memory import kv_bytes_per_row, max_rows, usable_bytes
from offbeat.planner.cost.rollout_time import decode_step_s, prompt_s, refill_s, tail_s
from offbeat.planner.cost.sizes import update_bytes
from offbeat.planner.cost.sync_time import CHUNK_BYTES
from offbeat.planner.cost.training_time import boundary_s, bubble, compute_s, dp_s, tp_s
from offbeat.planner.inputs.hardware import Link
from offbeat.planner.inputs.model_shapes import num_parameters, weight_bytes
from offbeat.planner.inputs.workload import KvPolicy, RewardMachines
from offbeat.planner.problem import RolloutColumn
from offbeat.planner.solve.search import fastest

FAST = {"flops": 700e12, "memory_bytes_per_s": 2e12}
WIDE = {"flops": 150e12, "memory_bytes_per_s": 4e12, "memory_bytes": 96e9}
PLACE = cluster(machines("fast", 2, **FAST), machines("wide", 6, **WIDE))


@pytest.fixture(scope="module")
def problem():
    return problem_of(PLACE, work())


def test_every_replica_fits_its_memory_and_the_heads_and_the_node(problem):
    for column in problem.rollout:
        card = PLACE.classes[column.offer].accelerator
        assert 28 % column.tp == 0
        assert column.num_accelerators == column.tp
        assert column.concurrency <= max_rows(work(), card, Efficiencies(), column.tp)
    assert {column.tp for column in problem.rollout} <= {1, 2, 4}


def test_twelve_heads_rule_out_eight_cards():
    tps = {column.tp for column in problem_of(PLACE, work(QWEN_1_5B)).rollout}
    assert 8 not in tps
    assert 4 in {column.tp for column in class_columns(PLACE.classes["wide"], work(QWEN_1_5B), Efficiencies(), [])}


def test_a_replicas_rate_pays_for_its_prompts_and_its_token_time_is_that_of_one_slot():
    wide, figures = PLACE.classes["wide"], Efficiencies(busy_share=1.0)
    column = next(one for one in class_columns(wide, work(), figures, ["fast"]) if (one.tp, one.concurrency) == (2, 16))
    step_s = decode_step_s(QWEN_7B, wide.accelerator, figures, 2, 16, 1100)
    answer_s = 1000 * step_s + 16 * prompt_s(work(), wide.accelerator, figures, 2)
    assert column.tokens_per_s == pytest.approx(16 * 1000 / answer_s)
    assert column.token_s == pytest.approx(answer_s / 1000)
    assert column.blocking_s["fast"] == pytest.approx(0.2 + refill_s(work(), wide.accelerator, figures, 2, 16))


def test_kept_keys_and_values_block_less_than_refilled_ones():
    wide = PLACE.classes["wide"]
    refill, stale = (
        class_columns(wide, work(kv=kv), Efficiencies(), ["fast"]) for kv in (KvPolicy.REFILL, KvPolicy.STALE)
    )
    for one, other in zip(refill, stale, strict=True):
        assert one.name == other.name
        assert one.blocking_s["fast"] > other.blocking_s["fast"]
        assert (one.kv, other.kv) == ("refill", "stale")


def test_a_column_that_is_worse_in_every_regard_is_dropped_and_of_twins_one_stays():
    good = class_columns(PLACE.classes["wide"], work(), Efficiencies(), ["fast"])[5]
    worse = replace(good, name="worse", tokens_per_s=good.tokens_per_s / 2)
    doubled = replace(
        good, name="doubled", num_accelerators=2 * good.num_accelerators, concurrency=2 * good.concurrency
    )
    fresher = replace(good, name="fresher", token_s=good.token_s / 2, tokens_per_s=good.tokens_per_s / 2)
    twin = replace(good, name="twin")
    assert [one.name for one in undominated([worse, good, doubled, fresher, twin])] == [good.name, "fresher"]


def test_row_grids_reach_from_one_to_the_largest():
    assert row_grid(0) == []
    assert row_grid(1) == [1]
    grid = row_grid(100)
    assert (grid[0], grid[-1]) == (1, 100)
    assert all(after <= 2 * before for before, after in pairwise(grid))


def test_gangs_have_whole_nodes_on_offer_and_cards_that_multiply(problem):
    for gang in problem.gangs:
        assert all(0 < count <= problem.offers[name].num_nodes for name, count in gang.nodes.items())
        assert gang.root in gang.nodes
        if len(gang.nodes) == 1:
            left = sum((gang.home_cards or {}).values())
            assert gang.tp * gang.pp * gang.dp + left == 8 * sum(gang.nodes.values())
        assert sum(gang.layers) == 28


def test_a_gang_with_no_fewer_nodes_is_faster_unless_it_publishes_elsewhere_or_leaves_cards_free(problem):
    for gang in problem.gangs:
        for other in problem.gangs:
            if gang is other or gang.root != other.root or (gang.home_cards or other.home_cards):
                continue
            if all(gang.nodes.get(name, 0) >= count for name, count in other.nodes.items()):
                assert gang.period_s < other.period_s


def test_a_node_may_train_on_some_cards_and_generate_on_the_others():
    one = problem_of(cluster(machines("a", 1, memory_bytes=80e9, **FAST)), work(QWEN_7B, bound=2))
    parts = [gang for gang in one.gangs if gang.home_cards]
    assert {gang.home_cards["a"] + gang.tp * gang.pp * gang.dp for gang in parts} == {8}
    assert fastest(one).solution.gang in {gang.name for gang in parts}
    apart = problem_of(cluster(machines("a", 1, **FAST)), work(QWEN_7B, bound=2, colocates=False))
    assert not any(gang.home_cards for gang in apart.gangs)


def test_a_pipeline_inside_a_class_waits_for_the_link_between_its_stages():
    step = work(groups_per_step=400)
    quick, slow = (cluster(machines("a", 4, memory_bytes=200e9, **FAST), same=same) for same in (50e9, 1e7))
    for pp in (2, 4):
        shape = (1, pp, 32 // pp)
        fast_s, slow_s = (
            min(
                gang.step_s
                for gang in _alone_on(place.classes["a"], 4, place, step, Constants())
                if (gang.tp, gang.pp, gang.dp) == shape
            )
            for place in (quick, slow)
        )
        assert slow_s > 2 * fast_s
        # Each node holds whole stages or a part of one, and its link carries a boundary's share of all activations.
        share = crossing_share(8, pp, 32 // pp, is_shared=False)
        assert slow_s >= boundary_s(step, 1e7, 1) * share


def test_layers_are_divided_for_the_slower_stage_and_only_where_they_fit():
    fast, tight = StageCost(1.0, 1e9, 1e9, 30e9), StageCost(3.0, 1e9, 1e9, 5e9)
    assert work().model.num_layers == 28
    assert divided(work(), [fast, replace(tight, room_bytes=20e9)]) == (21.0, (21, 7))
    assert divided(work(), [fast, tight]) == (23.0, (23, 5))
    assert divided(work(), [replace(fast, room_bytes=20e9), tight]) is None
    assert divided(work(), [fast, replace(tight, room_bytes=20e9)], layers=(14, 14)) == (42.0, (14, 14))
    assert divided(work(), [fast, tight], layers=(14, 14)) is None


def test_a_pipeline_waits_for_its_fullest_stage_in_all_that_it_does():
    place = cluster(machines("a", 16, memory_bytes=200e9, **FAST), same=1e15)  # boundaries between stages cost nothing
    step = work(groups_per_step=400)
    found = _alone_on(place.classes["a"], 16, place, step, Constants())
    gang = next(one for one in found if (one.tp, one.pp, one.dp) == (4, 16, 2))
    assert max(gang.layers) == 2  # of 28: 14 stages of two would be the model
    fabric, flops = fabric_of(place.classes["a"], place), 128 * 700e12 * Efficiencies().training_share
    alone_s = compute_s(step, flops, recompute=False) * 16 / 14 * bubble(step, 16, 2)
    talk_s = tp_s(step, Efficiencies(), fabric, 4, 14, 2) + dp_s(step, Efficiencies(), fabric, 4, 14, 2, gang.zero)
    assert gang.step_s == pytest.approx(alone_s + talk_s)


def test_two_classes_train_together_only_inside_a_zone():
    big = {"memory_bytes": 200e9, **FAST}
    near = cluster(machines("a", 1, **big), machines("b", 1, **big), between=100e9)
    far = cluster(machines("a", 1, **big), machines("b", 1, zone="there", **big), between=100e9)
    assert any(len(gang.nodes) == 2 for gang in problem_of(near, work()).gangs)
    assert all(len(gang.nodes) == 1 for gang in problem_of(far, work()).gangs)


def test_rollouts_get_headroom_unless_nothing_may_lie_ready():
    assert demand_of(work(bound=4, headroom=0.2)).headroom == 0.2
    assert demand_of(work(bound=0, headroom=0.2)).headroom == 0


def test_either_class_of_a_mixed_gang_may_publish():
    big = {"memory_bytes": 200e9, **FAST}
    place = cluster(machines("a", 1, **big), machines("b", 2, **big), same=100e9, between=100e9)
    mixed = [gang for gang in problem_of(place, work()).gangs if len(gang.nodes) == 2]
    assert mixed
    by_root = {root: {(gang.tp, gang.dp, gang.step_s) for gang in mixed if gang.root == root} for root in ("a", "b")}
    assert by_root["a"] == by_root["b"]


def test_mixed_gangs_split_by_speed():
    big = {"memory_bytes": 400e9}
    place = cluster(
        machines("a", 1, flops=300e12, **big), machines("b", 1, flops=100e12, **big), same=100e9, between=100e9
    )
    mixed = [gang for gang in problem_of(place, work()).gangs if len(gang.nodes) == 2]
    assert mixed
    for gang in mixed:
        if gang.pp == 2:
            assert gang.layers == (21, 7)
        else:
            assert gang.batch_shares == pytest.approx({"a": 0.75, "b": 0.25})


def test_layers_go_by_speed_and_every_stage_has_one():
    assert split_layers(28, [3.0, 1.0]) == (21, 7)
    assert split_layers(28, [1.0] * 4) == (7, 7, 7, 7)
    assert split_layers(10, [1.0, 1e-6]) == (9, 1)
    assert split_layers(6, [1, 1, 1e-9, 1e-9, 1e-9, 1e-9]) == (1, 1, 1, 1, 1, 1)


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 80), st.lists(st.floats(0.1, 10), min_size=1, max_size=8))
def test_no_layer_could_move_to_a_stage_that_would_end_sooner(num_layers, speeds):
    speeds = speeds[:num_layers]
    layers = split_layers(num_layers, speeds)
    assert sum(layers) == num_layers
    slowest = max(count / speed for count, speed in zip(layers, speeds, strict=True))
    stage = max(range(len(speeds)), key=lambda one: layers[one] / speeds[one])
    assert layers[stage] == 1 or all(
        (layers[one] + 1) / speeds[one] >= slowest - 1e-9 for one in range(len(speeds)) if one != stage
    )


def test_large_clusters_have_few_sizes_of_gang():
    assert node_grid(9) == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    grid = node_grid(8192)
    assert (grid[0], grid[-1]) == (1, 8192)
    assert len(grid) < 100
    assert all(after <= 1.11 * before for before, after in pairwise(grid) if before > 10)


def test_thousands_of_nodes_of_eight_classes_give_a_few_hundred_gangs():
    cards = [machines(f"c{speed}", 1024, flops=speed * 1e14, memory_bytes_per_s=speed * 1e12) for speed in range(1, 9)]
    problem = problem_of(cluster(*cards), work(groups_per_step=64))
    assert len(problem.gangs) < 1200
    assert len(problem.rollout) < 800


def test_demand_is_the_workloads_with_its_waste_and_its_rewards():
    demand = demand_of(work(waste_share=0.2, bound=3, reward=RewardMachines(seconds=2.0, num_slots=10)))
    assert (demand.trajectories, demand.bound, demand.tail_tokens) == (32, 3, 4000)
    assert demand.tokens == pytest.approx(32 * 1000 / 0.8)
    assert demand.lag_s == 2.0
    assert demand.reward_rate == 5.0


def test_a_slow_link_delays_the_class_behind_it_alone():
    near, far = machines("near", 1), machines("far", 1)
    place = cluster(near, far, same=5e9, between=1e8)
    lag_s = {column.offer: column.lag_s for column in problem_of(place, work()).rollout}
    size = update_bytes(work())
    assert lag_s["near"] == {"near": 0.0, "far": pytest.approx(size / 1e8)}
    assert lag_s["far"] == {"near": pytest.approx(size / 1e8), "far": 0.0}


def test_a_third_class_with_wider_links_shortens_the_way_and_a_narrower_one_is_not_named():
    place = cluster(machines("near", 1), machines("far", 1), machines("wide", 1), machines("slow", 1), between=1e8)
    wide = {frozenset(("wide", name)): Link(1e9, 0.0) for name in ("near", "far")}
    place = replace(place, links={**place.links, **wide})
    over_s = {column.offer: column.lag_over_s for column in problem_of(place, work()).rollout}
    size = update_bytes(work())
    assert over_s["far"]["near"] == {"wide": pytest.approx((size + CHUNK_BYTES) / 1e9)}
    assert "near" not in over_s["wide"]
    assert all(not column.lag_over_s for column in problem_of(place, work(bound=0)).rollout)


def test_the_reward_pool_is_paid_whatever_the_plan():
    assert problem_of(PLACE, work(reward=RewardMachines(1.0, 10, 0.5))).fixed_price_per_h == 5.0


def test_a_better_constant_makes_everything_faster():
    slow = Constants()
    fast = Constants(replace(slow.common, training_share=0.8, kv_read_share=1.0))
    before, after = problem_of(PLACE, work(), slow), problem_of(PLACE, work(), fast)
    assert min(gang.step_s for gang in after.gangs) < min(gang.step_s for gang in before.gangs)
    assert max(one.tokens_per_s for one in after.rollout) > max(one.tokens_per_s for one in before.rollout)


def test_a_model_that_no_card_can_generate_with_is_told_with_the_memory_that_would_do():
    # 320 cards train it in pieces under ZeRO-3, but a replica has four at most: 28 heads allow no more
    place = cluster(machines("small", 40, memory_bytes=4e9))
    with pytest.raises(UserError, match=r"^[^\n]*qwen2.5-7b[^\n]*class small has 4.0 GB per accelerator[^\n]*$"):
        problem_of(place, work())


def test_the_memory_that_is_told_does():
    place = cluster(machines("small", 1, memory_bytes=10e9))
    with pytest.raises(UserError, match="no class of machines has enough memory to train it") as caught:
        problem_of(place, work(QWEN_14B))
    told = float(str(caught.value).split(" GB per accelerator")[0].split()[-1]) * 1e9
    problem = problem_of(cluster(machines("small", 1, memory_bytes=told + 0.1e9)), work(QWEN_14B))
    assert problem.gangs
    assert problem.rollout


def test_usable_memory_leaves_the_runtime_its_share():
    assert usable_bytes(CARD, Efficiencies(memory_share=0.5)) == 40e9


def test_gangs_that_are_known_from_another_inventory_change_no_problem():
    known = {}
    problem_of(PLACE, work(), known=known)
    num_known = len(known)
    grown = cluster(machines("fast", 3, **FAST), PLACE.classes["wide"])
    slower = cluster(*PLACE.classes.values(), same=1e9)
    for other in (PLACE, grown, slower):
        assert problem_of(other, work(), known=known) == problem_of(other, work())
    assert len(known) == num_known + 2 + 3  # the class that grew and its pair; with other links all are made anew


def shared(problem):
    return [column for column in problem.rollout if column.is_home]


def test_cards_take_turns_only_with_bound_0_and_only_where_the_workload_lets_them():
    assert shared(problem_of(PLACE, work(bound=0)))
    for apart in (work(bound=1), work(bound=0, colocates=False)):
        assert [one for one in shared(problem_of(PLACE, apart)) if one.room_bytes] == []
        assert all(gang.kept_bytes == {} for gang in problem_of(PLACE, apart).gangs)


def test_a_card_that_takes_turns_holds_the_engine_beside_what_the_gang_keeps():
    problem = problem_of(PLACE, work(bound=0, groups_per_step=256))
    pairs = [(one, gang) for one in shared(problem) for gang in problem.gangs if one.offer in gang.nodes]
    assert {one.fits_beside(gang) for one, gang in pairs} == {True, False}
    for column, gang in pairs:
        card, kv_bytes = PLACE.classes[column.offer].accelerator, kv_bytes_per_row(work(), column.tp)
        engine_bytes = weight_bytes(QWEN_7B) / column.tp + column.concurrency * kv_bytes
        has_room = engine_bytes + gang.kept_bytes[column.offer] <= usable_bytes(card, Efficiencies())
        assert column.fits_beside(gang) is has_room


def test_what_a_gang_keeps_is_its_state_without_gradients():
    gang = next(gang for gang in problem_of(PLACE, work(bound=0)).gangs if gang.layers == (28,) and gang.zero == 1)
    num = num_parameters(QWEN_7B)
    assert [*gang.kept_bytes.values()] == pytest.approx([num / gang.tp * (2 + 12 / gang.dp)] * len(gang.nodes))


def test_a_gang_that_leaves_replicas_more_memory_stays_though_it_is_slower():
    gangs = problem_of(PLACE, work(bound=0)).gangs
    (fast, *others) = sorted((gang for gang in gangs if gang.nodes == {"fast": 1}), key=lambda gang: gang.period_s)
    assert others
    assert all(gang.kept_bytes["fast"] < 0.9 * fast.kept_bytes["fast"] for gang in others)


def test_no_card_takes_turns_where_the_state_leaves_no_room_for_an_answer():
    small = machines("small", 4, per_node=1, memory_bytes=43e9)
    problem = problem_of(cluster(small, machines("large", 1, zone="there")), work(bound=0))
    assert {"small": 4} in [gang.nodes for gang in problem.gangs]
    assert "small" in {column.offer for column in problem.rollout}
    assert {column.offer for column in shared(problem)} == {"large"}


def test_with_bound_0_slots_idle_at_the_end_no_answer_is_filled_again_and_shared_cards_load_all_weights():
    asked = work(bound=0)
    apart, waits = problem_of(PLACE, work(bound=1)), problem_of(PLACE, asked)
    rented = [column for column in apart.rollout if not column.is_home]

    def idle_s(column: RolloutColumn) -> float:
        card = PLACE.classes[column.offer].accelerator
        return tail_s(asked, card, Efficiencies(), column.tp, column.token_s)

    by_name = {column.name: column for column in waits.rollout}
    least_s = {one.name: by_name[one.name].blocking_s["wide"] - idle_s(by_name[one.name]) for one in rented}
    assert any(least_s[one.name] < one.blocking_s["wide"] for one in rented)
    assert all(seconds == pytest.approx(0.2) for seconds in least_s.values())
    for column in shared(waits):
        loaded_s = weight_bytes(QWEN_7B) / column.tp / PLACE.classes[column.offer].accelerator.host_bytes_per_s
        assert column.blocking_s["wide"] == pytest.approx(0.2 + loaded_s + idle_s(column))


def test_spot_nodes_generate_less_and_stop_the_gangs_that_they_are_part_of():
    def problem_with(reclaims_per_h):
        wide = replace(PLACE.classes["wide"], reclaims_per_h=reclaims_per_h, restart_s=600.0)
        return problem_of(replace(PLACE, classes={**PLACE.classes, "wide": wide}), work())

    safe, spot = problem_with(0.0), problem_with(0.5)
    rates = {column.name: column.tokens_per_s for column in safe.rollout}
    steps = {gang.name: gang.step_s for gang in safe.gangs}
    for column in spot.rollout:
        least = 0.0 if column.offer == "fast" else 0.5 * 600 / 3600
        assert rates[column.name] / column.tokens_per_s - 1 >= least - 1e-12
        assert column.offer == "wide" or rates[column.name] == column.tokens_per_s
    for gang in spot.gangs:
        if gang.name in steps:
            often = 0.5 * gang.nodes.get("wide", 0) / 3600
            before_s = steps[gang.name]
            assert gang.step_s == pytest.approx(before_s * (1 + often * (600 + before_s / 2)))
    whole = fastest(safe).solution.tau_s
    assert fastest(spot).solution.tau_s > whole


def test_every_gang_has_its_time_over_its_own_links_however_it_saves_memory():
    """A pipeline whose layers were moved until ZeRO-1 fits may also run with ZeRO-2 and other layers."""
    chosen = random_case(random.Random("2025/45"), 45)
    problem = problem_of(chosen.inventory, chosen.workload)
    assert any(gang.zero == 2 and len(gang.nodes) > 1 and gang.pp > 1 for gang in problem.gangs)
    for gang in problem.gangs:
        again = over_links(gang, chosen.inventory, chosen.workload, Constants())
        assert again.step_s == pytest.approx(gang.step_s, rel=1e-9)
