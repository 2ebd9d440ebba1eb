"""What a placed plan really takes goes back into its columns; the best placed plan is kept and its record is true."""

from __future__ import annotations

import dataclasses
import itertools
import random
from pathlib import Path

import pytest

from offbeat.planner import plan as record
from offbeat.planner.columns.columns import problem_of
from offbeat.planner.cost.constants import Constants
from offbeat.planner.inputs.hardware import Inventory, at_best
from offbeat.planner.inputs.inventory import load_inventory
from offbeat.planner.inputs.workload_file import load_workload
from offbeat.planner.place.placing import Placer
from offbeat.planner.planning import MAX_ROUNDS, fastest_round, plan, rounds
from offbeat.planner.report import text
from offbeat.planner.solve.search import fastest
from offbeat.planner.verifying import verify

EXAMPLES = Path(__file__).parents[2] / "examples" / "planning"
HEX = load_inventory(EXAMPLES / "cluster_hex_56.toml")
SEVEN = load_workload(EXAMPLES / "workload_hex_7b.toml")
GB = 1e9


def with_nodes(**counts: int) -> Inventory:
    classes = {name: dataclasses.replace(HEX.classes[name], num_nodes=num) for name, num in counts.items()}
    return dataclasses.replace(HEX, classes=classes)


def badly_linked(inventory: Inventory, names: set[str], gb_s: float) -> Inventory:
    """Everything to and from these nodes goes at another rate."""
    every = [f"{name}-{i}" for name, machines in inventory.classes.items() for i in range(machines.num_nodes)]
    pairs = (frozenset(pair) for pair in itertools.combinations(every, 2))
    return dataclasses.replace(inventory, measured={pair: gb_s * GB for pair in pairs if pair & names})


def all_rounds(inventory: Inventory):
    problem = problem_of(inventory, SEVEN)
    first = fastest(problem)
    return first, rounds(Placer(inventory, SEVEN, Constants(), problem), first, fastest)


def nodes_of(groups) -> set[str]:
    return {group.node for group in groups}


def trainers(found: record.Plan) -> set[str]:
    return nodes_of(group for stage in found.training.stages for group in stage)


@pytest.mark.full
def test_a_gang_stays_off_a_badly_linked_node_where_others_are_free():
    usual = plan(with_nodes(h800=3, h20=6), SEVEN)
    inventory = badly_linked(with_nodes(h800=4, h20=6), {"h800-0"}, 0.05)
    found = plan(inventory, SEVEN)
    assert "h800-0" not in trainers(found)
    assert found.step.tau_s <= usual.step.tau_s * 1.002
    assert verify(found, inventory, SEVEN) == []


@pytest.mark.full
def test_a_gang_that_cannot_avoid_bad_links_is_corrected_and_another_wins():
    inventory = badly_linked(with_nodes(h800=2, h20=6), {"h800-0", "h800-1"}, 0.02)
    inventory = dataclasses.replace(
        inventory, measured={**inventory.measured, frozenset(("h800-0", "h20-0")): 1.5 * GB}
    )
    first, found = all_rounds(inventory)
    assert len(found) > 1
    assert found[0].placing.step_s > 1.02 * found[0].placing.assumed.step_s
    best = fastest_round(found)
    assert best.solution.gang != first.solution.gang
    assert best.placing.tau_s < found[0].placing.tau_s


@pytest.mark.parametrize("seed", range(5))
def test_rounds_end_and_are_never_worse_than_the_first_placed_plan(seed):
    draw = random.Random(seed)
    inventory = with_nodes(h800=2, h20=3)
    names = [f"{name}-{i}" for name, machines in inventory.classes.items() for i in range(machines.num_nodes)]
    measured = {frozenset(pair): draw.choice([0.02, 0.2, 2, 10]) * GB for pair in itertools.combinations(names, 2)}
    inventory = dataclasses.replace(inventory, measured=measured)
    first, found = all_rounds(inventory)
    assert 1 <= len(found) <= 1 + MAX_ROUNDS
    best = fastest_round(found)
    assert first.tau_lo_s <= best.placing.tau_s <= found[0].placing.tau_s
    for each in found:
        assert each.placing.tau_s >= each.solution.tau_s
        assert each.placing.step_s >= each.placing.assumed.step_s
    made = plan(inventory, SEVEN)
    assert made.step.tau_s == best.placing.tau_s
    assert made.certificate.gap >= made.placement.gap - 1e-12
    assert verify(record.from_json(record.to_json(made)), inventory, SEVEN) == []


@pytest.fixture(scope="module")
def slow() -> Inventory:
    """No two nodes of the training class reach each other well, but some pair elsewhere does."""
    return badly_linked(with_nodes(h800=1, h20=3), {"h20-2"}, 0.02)


def test_places_that_cost_time_are_counted_in_the_step_the_gap_and_the_account(slow):
    problem = problem_of(slow, SEVEN)
    first = fastest(problem)
    found = plan(slow, SEVEN)
    assert found.step.tokens_per_s == pytest.approx(problem.demand.tokens / found.step.tau_s)
    assert found.step.tau_lo_s == first.certificate.tau_lo_s
    assert found.placement.gap == pytest.approx(found.step.tau_s / first.certificate.tau_lo_s - 1)
    costs = found.training.step_s > found.placement.assumed_step_s or found.placement.lags_s != (
        found.placement.assumed_lags_s
    )
    assert ("Placement: " in text.format_plan(found)) == costs
    assert costs


@pytest.mark.parametrize(
    "part, fields",
    [
        ("solution", {"tau_s": 0.999}),
        ("training", {"step_s": 0.5}),
        ("placement", {"gap": 0.5}),
        ("placement", {"assumed_step_s": 0.5}),
    ],
)
def test_a_placed_figure_that_was_made_better_is_found(slow, part, fields):
    made = plan(slow, SEVEN)
    better = {name: getattr(getattr(made, part), name) * share for name, share in fields.items()}
    saved = dataclasses.replace(made, **{part: dataclasses.replace(getattr(made, part), **better)})
    assert verify(saved, slow, SEVEN)


def test_alike_nodes_cost_nothing_and_are_solved_once():
    first, found = all_rounds(HEX)
    assert len(found) == 1
    assert found[0].placing.tau_s == first.solution.tau_s
    assert found[0].placing.step_s == found[0].placing.assumed.step_s


def test_the_best_links_of_a_class_are_those_of_its_best_pair():
    links = with_nodes(h800=1, h20=3).links
    some = badly_linked(with_nodes(h800=1, h20=3), {"h20-2"}, 0.02)
    assert at_best(some).links[frozenset(("h20",))] == links[frozenset(("h20",))]
    every = badly_linked(with_nodes(h800=1, h20=3), {"h20-0", "h20-1", "h20-2"}, 0.02)
    assert at_best(every).links[frozenset(("h20",))].bytes_per_s == 0.02 * GB
    fast = badly_linked(with_nodes(h800=1, h20=3), {"h20-2"}, 20)
    assert at_best(fast).links[frozenset(("h20",))].bytes_per_s == 20 * GB
