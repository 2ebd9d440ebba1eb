"""A simulated run keeps the promises of a real one, and is the same every time."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.simulator import report
from offbeat.simulator.baselines import APRIL, AREAL, COPRIS, PIPELINE
from offbeat.simulator.fleet import SimulatedWorker, WorkerClass, fetch_times
from offbeat.simulator.lengths import GivenLengths, Lengths, LogNormal, constant, of_histogram, of_samples
from offbeat.simulator.memory_ledger import LedgerSettings
from offbeat.simulator.replica import EngineSpeed, Replica, linear
from offbeat.simulator.simulation import CoordinatorModel, FleetEvent, Scenario, Simulation, TrainerModel

FLEET = (
    WorkerClass("slow", 1, 8, EngineSpeed(linear(0.01, 0.0002, 8), load_s=0.05)),
    WorkerClass("fast", 2, 8, EngineSpeed(linear(0.01, 0.0002, 8, 3.0), 1e-7, 1e-5, load_s=0.05)),
)
OVERLAP = Scenario(FLEET, LedgerSettings(4, 3, 12), TrainerModel(fixed_s=0.8), overlap=True, over_provision="auto")
ROUNDS = replace(OVERLAP, overlap=False, over_provision=3.0, ledger=LedgerSettings(4, 3, 12, in_rounds=True))
SEQUENTIAL = replace(OVERLAP, overlap=False, over_provision=1.0, ledger=LedgerSettings(4, 0, 12))


def lengths(seed: int = 0, **others: float) -> Lengths:
    return Lengths(LogNormal(60, 1.0, 400), 4, prompt=constant(20), longest=400, seed=seed, **others)


def simulated(scenario: Scenario, seed: int = 0, **others: float) -> Simulation:
    simulation = Simulation(scenario, lengths(seed, **others))
    simulation.run()
    return simulation


@st.composite
def scenarios(draw: st.DrawFn) -> Scenario:
    mode = draw(st.sampled_from(["overlap", "rounds", "sequential"]))
    bound = 0 if mode == "sequential" else draw(st.integers(1, 4))
    factor = draw(st.one_of(st.just("auto"), st.floats(1, bound + 1))) if bound else 1.0
    events = [
        FleetEvent(at_s, kind, workers, count, seconds, 3.0)
        for at_s, kind, workers, count, seconds in draw(
            st.lists(
                st.tuples(
                    st.floats(0, 15),
                    st.sampled_from(["crash", "slow", "join"]),
                    st.sampled_from(["slow", "fast"]),
                    st.integers(1, 2),
                    st.floats(0.5, 8),
                ),
                max_size=4,
            )
        )
    ]
    kinds = tuple(
        replace(
            kind,
            kv_tokens=draw(st.sampled_from([math.inf, 900.0])),
            round_trip_s=draw(st.sampled_from([0.0, 0.03])),
            root_bytes_per_s=draw(st.sampled_from([math.inf, 2e6])),
            spread=draw(st.sampled_from([0.0, 0.3])),
        )
        for kind in FLEET
    )
    return replace(
        OVERLAP,
        fleet=kinds,
        ledger=LedgerSettings(draw(st.integers(1, 6)), bound, 6, in_rounds=mode == "rounds", max_no_signal=2.0),
        overlap=mode == "overlap",
        over_provision=factor,
        finishes=draw(st.booleans()) and mode == "overlap",
        keeps_kv=draw(st.booleans()),
        kv_lag=1,
        events=tuple(events),
        weight_bytes=1e6,
        lease_ttl_s=5.0,
        coordinator=CoordinatorModel(1e-3, 1e-3, draw(st.sampled_from([0.0, 0.02])), 2),
        trainer=TrainerModel(fixed_s=draw(st.sampled_from([0.05, 1.0])), publish_s=0.1),
        until_s=3000.0,
    )


@settings(max_examples=25, deadline=None)
@given(scenarios(), st.integers(0, 5), st.sampled_from([0.0, 0.3]))
def test_no_token_is_lost_and_none_is_trained_beyond_the_bound(scenario, seed, no_signal):
    simulation = simulated(scenario, seed, no_signal=no_signal)
    end = simulation.end
    assert end.num_steps == 6
    assert simulation.missing_tokens() == 0
    assert end.num_over == 0
    assert max(end.by_staleness, default=0) <= scenario.ledger.max_staleness
    assert sum(end.by_staleness.values()) == end.num_trained


@pytest.mark.parametrize("scenario", [OVERLAP, ROUNDS, SEQUENTIAL], ids=["overlap", "rounds", "sequential"])
def test_the_same_seed_gives_the_same_bytes(scenario):
    found = [report.to_json(report.figures(simulated(scenario, 7))) for _ in range(2)]
    assert found[0] == found[1]
    assert found[0] != report.to_json(report.figures(simulated(scenario, 8)))


def test_with_bound_zero_everything_is_fresh_and_engines_wait_for_the_trainer():
    simulation = simulated(SEQUENTIAL)
    assert list(simulation.end.by_staleness) == [0]
    found = report.figures(simulation)
    assert found["workers"]["fast"]["no work"] > 0.2
    assert report.figures(simulated(OVERLAP))["samples_per_s"] > 1.3 * found["samples_per_s"]


def test_workers_that_pull_are_faster_than_workers_that_get_equal_shares():
    pulling, dealt = (
        report.figures(simulated(replace(SEQUENTIAL, round_robin=dealt)))["samples_per_s"] for dealt in (False, True)
    )
    assert pulling > 1.05 * dealt


def test_a_crash_costs_the_tokens_of_the_crashed_worker_and_its_tasks_go_to_others():
    crash = FleetEvent(2.0, "crash", "fast", seconds=None)
    simulation = simulated(replace(OVERLAP, events=(crash,), lease_ttl_s=3.0))
    assert simulation.end.num_steps == 12
    assert simulation.end.wasted["worker lost"] > 0
    assert simulation.missing_tokens() == 0


def test_a_worker_that_is_told_of_its_end_loses_nothing():
    simulation = simulated(replace(OVERLAP, events=(FleetEvent(2.0, "reclaim", "fast", seconds=5.0),)))
    assert not simulation.end.wasted
    assert simulation.missing_tokens() == 0
    assert simulation.end.num_steps == 12


def test_more_workers_that_join_make_the_run_faster_and_stragglers_slower():
    def seconds(*events: FleetEvent) -> float:
        return simulated(replace(OVERLAP, trainer=TrainerModel(fixed_s=0.01), events=events)).end.at_s

    alone_s = seconds()
    assert seconds(FleetEvent(0.5, "join", "fast", 2)) < 0.9 * alone_s
    assert seconds(FleetEvent(0.5, "slow", "fast", 2, factor=3.0)) > 1.2 * alone_s


def test_a_slow_link_makes_tokens_older():
    fast = simulated(replace(OVERLAP, weight_bytes=1e6))
    slow_fleet = tuple(replace(kind, root_bytes_per_s=1e6) for kind in FLEET)
    slow = simulated(replace(OVERLAP, weight_bytes=1e6, fleet=slow_fleet))
    assert report.figures(slow)["staleness"] > report.figures(fast)["staleness"]


def test_areals_rule_trains_beyond_its_bound_where_ours_never_does():
    """Answers that overtake a long one let it grow old: admission alone does not bound staleness."""
    heavy = Lengths(LogNormal(30, 1.5, 3000), 4, prompt=constant(20), longest=3000, shared=0.5)
    theirs = Simulation(replace(OVERLAP, baseline=AREAL, ledger=LedgerSettings(4, 1, 60)), heavy)
    theirs.run()
    assert theirs.end.num_over > 0
    assert theirs.missing_tokens() == 0


@pytest.mark.parametrize("baseline", [PIPELINE, APRIL, COPRIS], ids=lambda one: one.name)
def test_other_policies_lose_no_token_either(baseline):
    scenario = OVERLAP if baseline is PIPELINE else ROUNDS
    simulation = simulated(replace(scenario, baseline=baseline, over_provision=2.0))
    assert simulation.end.num_steps == 12
    assert simulation.missing_tokens() == 0


def test_a_group_with_equal_rewards_is_replaced_within_limits():
    simulation = simulated(replace(OVERLAP, ledger=replace(OVERLAP.ledger, max_no_signal=3)), no_signal=0.3)
    assert simulation.ledger.num_groups_dropped["no signal"] > 0
    assert simulation.end.wasted["no signal"] > 0
    assert simulation.missing_tokens() == 0


def test_only_the_head_of_a_site_fetches_over_the_slow_link():
    kind = WorkerClass(
        "far", 5, 8, FLEET[0].speed, site="far", root_bytes_per_s=1e6, site_bytes_per_s=1e9, round_trip_s=0.1
    )
    workers = [SimulatedWorker(f"far-{i}", kind, Replica(kind.speed)) for i in range(5)]
    times = fetch_times(workers, 10e6)
    assert min(times.values()) == pytest.approx(10.0)
    assert max(times.values()) < 10.5
    assert fetch_times([SimulatedWorker("a", replace(kind, site=""), Replica(kind.speed))], 10e6) == {"a": 10.0}


def test_laws_have_their_means_and_siblings_are_alike_as_told():
    samples = of_samples([10, 20, 30, 40])
    bins = of_histogram([0, 100, 300], [3, 1])
    for law, mean in ((samples, 25), (bins, 0.75 * 50 + 0.25 * 200), (constant(7), 7)):
        drawn = Lengths(law, 8, prompt=constant(1), longest=10**6)
        values = [value for _ in range(500) for value in drawn.draw()[0]]
        assert sum(values) / len(values) == pytest.approx(mean, rel=0.05)

    def spread_between_groups(shared: float) -> float:
        drawn = Lengths(LogNormal(100, 0.5, 10**6), 8, prompt=constant(1), longest=10**6, shared=shared)
        means = [sum(math.log(value) for value in drawn.draw()[0]) / 8 for _ in range(500)]
        middle = sum(means) / len(means)
        return sum((mean - middle) ** 2 for mean in means) / len(means)

    assert spread_between_groups(0.0) == pytest.approx(0.25 / 8, rel=0.25)
    assert spread_between_groups(0.5) == pytest.approx(0.125 + 0.125 / 8, rel=0.25)


def test_given_lengths_begin_again_after_the_last():
    given_lengths = GivenLengths([([3, 4], 10), ([5, 6], 11)])
    assert [given_lengths.draw()[0] for _ in range(3)] == [[3, 4], [5, 6], [3, 4]]


def test_the_report_has_all_figures_and_the_trace_opens(tmp_path):
    simulation = Simulation(replace(OVERLAP, num_warmup=2), lengths(), records_spans=True)
    simulation.run()
    found = report.figures(simulation)
    for shares in (found["trainer"], *found["workers"].values()):
        assert sum(shares.values()) == pytest.approx(1.0)
    assert sum(found["tokens_by_staleness"].values()) == found["trained_tokens"]
    assert found["counted_steps"] == 10
    text = report.to_text(found, "a title")
    assert "samples trained" in text
    assert "fast" in text
    assert report.picture(found, "a <title>").startswith("<svg")
    report.write_trace(simulation, tmp_path / "trace.json")
    rows = json.loads((tmp_path / "trace.json").read_text())
    assert {"trainer", "slow-0"} <= {row["args"]["name"] for row in rows if row["ph"] == "M"}
    assert any(row.get("name") == "train" for row in rows)
