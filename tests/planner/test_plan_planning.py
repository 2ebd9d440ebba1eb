"""A plan is a record that adds up, comes back from JSON as it was, and is found out when somebody changes it."""

import dataclasses
import itertools
from collections import Counter
from pathlib import Path

import pytest

import offbeat
from offbeat.errors import UserError
from offbeat.planner import plan as record
from offbeat.planner.cost.constants import Constants, HeldOut
from offbeat.planner.inputs import what_if
from offbeat.planner.inputs.hardware import Inventory
from offbeat.planner.inputs.inventory import load_inventory
from offbeat.planner.inputs.workload_file import load_workload
from offbeat.planner.planning import plan
from offbeat.planner.report import frontier as fleets_module
from offbeat.planner.report import text
from offbeat.planner.report.frontier import Point, alone, frontier_page, homogeneous, mixed, split_by_class, ticks
from offbeat.planner.report.text import remarks_on, what_would_help
from offbeat.planner.solve.search import GAP
from offbeat.planner.verifying import verify

EXAMPLES = Path(__file__).parents[2] / "examples" / "planning"
HEX = load_inventory(EXAMPLES / "cluster_hex_56.toml")
LAB = load_inventory(EXAMPLES / "cluster_lab.toml")
SEVEN = load_workload(EXAMPLES / "workload_hex_7b.toml")
FOURTEEN = load_workload(EXAMPLES / "workload_hex_14b.toml")


@pytest.fixture(scope="module")
def found() -> record.Plan:
    return plan(HEX, FOURTEEN)


def cards(groups) -> list[tuple[str, int]]:
    return [(group.node, card) for group in groups for card in range(group.first, group.first + group.size)]


def test_prices_and_rates_of_a_plan_add_up(found):
    nodes = {name: HEX.classes[name].node_price_per_h for name in HEX.classes}
    assert found.step.price_per_h == pytest.approx(sum(nodes[name] * num for name, num in found.rent.items()))
    assert found.step.tokens_per_s * found.step.tau_s == pytest.approx(FOURTEEN.generated_tokens_per_step)
    hourly_tokens = found.step.tokens_per_s * 3600
    assert found.step.price_per_million_tokens == pytest.approx(found.step.price_per_h / hourly_tokens * 1e6)
    busy = [
        max(found.step.tau_s - pool.blocking_s, 0) * pool.tokens_per_s * pool.num_replicas for pool in found.rollout
    ]
    assert sum(busy) >= FOURTEEN.generated_tokens_per_step * (1 - 1e-9)
    assert sum(pool.weight * pool.num_replicas for pool in found.rollout) == pytest.approx(1)


def test_every_card_has_one_duty_and_every_replica_a_place(found):
    training = cards(itertools.chain(*found.training.stages))
    rolling = [card for pool in found.rollout for card in cards(pool.places)]
    assert len(set(training + rolling)) == len(training) + len(rolling)
    assert len(training) == sum(num * HEX.classes[name].per_node for name, num in found.training.nodes.items())
    assert [len(pool.places) for pool in found.rollout] == [pool.num_replicas for pool in found.rollout]
    assert {hop.receiver for hop in found.sync.hops} >= {node for node, _ in rolling}
    assert found.sync.seconds >= found.sync.lower_bound_s


def test_a_plan_comes_back_from_json_as_it_was(found):
    assert record.from_json(record.to_json(found)) == found
    with pytest.raises(UserError, match=r"^p\.json is not a plan: .*offbeat plan --json$"):
        record.from_json('{"model": "x"}', "p.json")


@pytest.mark.full
def test_the_checker_accepts_what_was_planned_under_any_aim(found):
    assert verify(found, HEX, FOURTEEN) == []
    for aim in ({"budget": 60.0}, {"throughput": 9000.0}):
        assert verify(plan(HEX, FOURTEEN, **aim), HEX, FOURTEEN) == []


def changed(found: record.Plan, part: str, **fields) -> record.Plan:
    return dataclasses.replace(found, **{part: dataclasses.replace(getattr(found, part), **fields)})


@pytest.mark.parametrize(
    "part, fields, told",
    [
        ("solution", {"tau_s": 20.0}, "gang:"),
        ("solution", {"nodes": {"h20": 6}}, "hardware:"),
        ("solution", {"gang": "none such"}, "names:"),
        ("certificate", {"tau_lo_s": 1e9}, "certificate:"),
        ("certificate", {"gap": -0.5}, "certificate:"),
        ("certificate", {"columns_sha256": "0"}, "certificate:"),
        ("certificate", {"held_out_error": 0.01}, "record: certificate.held_out_error is 0.01 in the plan, but"),
        ("step", {"price_per_h": 1.0}, "record: step.price_per_h is 1.0"),
        ("sync", {"seconds": 0.0}, "record: sync.seconds"),
        ("training", {"tp": 3}, "record: training.tp is 3"),
    ],
)
def test_the_checker_finds_what_was_changed(found, part, fields, told):
    broken = verify(changed(found, part, **fields), HEX, FOURTEEN)
    assert any(line.startswith(told) for line in broken), broken


def test_the_checker_finds_a_gap_of_the_price_that_is_too_small():
    cheap = plan(HEX, FOURTEEN, throughput=9000.0)
    lowered = changed(cheap, "certificate", price_cap=cheap.certificate.price_cap // 2)
    assert any("but the plan is" in line for line in verify(lowered, HEX, FOURTEEN))


def test_the_checker_rejects_a_plan_for_other_machines(found):
    other = load_inventory(EXAMPLES / "cluster_hex_40.toml")
    assert "question: cluster_sha256: it is for other files; plan again" in verify(found, other, FOURTEEN)


def test_a_smaller_budget_is_kept_and_the_cheapest_plan_reaches_its_throughput():
    small = plan(HEX, FOURTEEN, budget=60.0)
    assert small.step.price_per_h <= 60.0
    cheap = plan(HEX, FOURTEEN, throughput=small.step.tokens_per_s)
    assert cheap.step.tokens_per_s >= small.step.tokens_per_s * (1 - 1e-9)
    assert cheap.step.price_per_h <= small.step.price_per_h + 1e-6


@pytest.mark.parametrize(
    "aim, told",
    [
        ({"budget": 5.0}, "no plan: budget: 5.00 .* suffices"),
        ({"throughput": 1e9}, "no plan: throughput: .* is the most"),
        ({"budget": 0.0}, "no plan: budget: 0.00 .* suffices"),
        ({"budget": -1.0}, "budget is -1; it must be"),
        ({"throughput": 0.0}, "throughput is 0; it must be"),
    ],
)
def test_what_cannot_be_is_one_line_with_a_remedy(aim, told):
    with pytest.raises(UserError, match=told) as error:
        plan(HEX, FOURTEEN, **aim)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("colocates, told", [(True, "on the training nodes"), (False, "one of them is always idle")])
def test_bound_0_is_planned_and_explained(colocates, told):
    found = plan(HEX, dataclasses.replace(SEVEN, bound=0, colocates=colocates))
    assert found.note.startswith("max_staleness = 0")
    assert told in found.note
    assert found.note in text.format_plan(found)
    assert found.staleness.mean_age == 0
    assert "take turns" in found.limit
    assert any(pool.shares_gang for pool in found.rollout) is colocates
    generated = [pool.num_replicas * pool.tokens_per_s * (found.step.tau_s - pool.blocking_s) for pool in found.rollout]
    assert sum(generated) == pytest.approx(SEVEN.generated_tokens_per_step, rel=0.02)


@pytest.mark.parametrize("aim", [{}, {"budget": 100.0}, {"throughput": 8000.0}])
def test_replicas_that_share_stand_on_the_gangs_cards_and_cost_nothing_more(aim):
    waits = dataclasses.replace(FOURTEEN, bound=0)
    found = plan(HEX, waits, **aim)
    training = set(cards(itertools.chain(*found.training.stages)))
    shared = [pool for pool in found.rollout if pool.shares_gang]
    assert shared
    for pool in found.rollout:
        at = cards(pool.places)
        assert len(at) == len(set(at)) == pool.num_replicas * pool.tp
        assert set(at) <= training if pool.shares_gang else not set(at) & training
    assert found.rent == dict(Counter(found.training.nodes) + Counter(found.solution.nodes))
    at = {group.node for pool in found.rollout for group in pool.places}
    assert {hop.receiver for hop in found.sync.hops} | {found.sync.root} >= at
    assert any("cards that take turns" in line for line in found.assumptions)
    assert "in turn" in text.format_plan(found)
    assert verify(found, HEX, waits) == []
    assert record.from_json(record.to_json(found)) == found


def test_taking_turns_on_the_same_cards_is_no_slower_than_idling_and_needs_less():
    shared, apart = (plan(HEX, dataclasses.replace(SEVEN, bound=0, colocates=one)).step for one in (True, False))
    assert shared.tokens_per_s > apart.tokens_per_s * (1 - GAP)
    assert shared.price_per_million_tokens < apart.price_per_million_tokens


@pytest.mark.full
def test_what_a_bound_of_1_brings_is_told_by_plans_that_do_not_take_turns():
    waits = dataclasses.replace(SEVEN, bound=0)
    base, other = plan(HEX, waits), plan(HEX, dataclasses.replace(SEVEN, bound=1))
    (told,) = [line for line in what_would_help(HEX, waits, base) if line.startswith("max_staleness = 1:")]
    rate = f"≈{round(other.step.tokens_per_s, -3):,.0f}"  # two digits, as nothing was measured
    assert f"{rate} tokens/s at {other.step.price_per_h:,.2f} $/h" in told


def test_the_words_on_training_compare_it_with_each_class_alone():
    found = plan(HEX, SEVEN)
    seconds = float(found.training.why.split()[0])
    assert seconds == pytest.approx(found.training.step_s, rel=0.01)
    alone_s = [float(word.rstrip(",")) for word in found.training.why.split("alone ")[1:] for word in word.split()[:1]]
    assert len(alone_s) == len(HEX.classes)
    assert seconds <= min(alone_s)
    assert "$/M trained" in plan(HEX, SEVEN, throughput=found.step.tokens_per_s / 2).training.why


def test_an_alias_is_an_assumption_that_says_which_card_it_stands_for(tmp_path):
    file = tmp_path / "cluster.toml"
    file.write_text('[classes.mine]\naccelerator = "a100"\nnodes = 1\nper_node = 8\nprice = 1.0\n')
    assert 'mine: "a100" stands for a100-80gb' in load_inventory(file).assumptions


def test_the_error_of_the_cost_model_is_known_only_when_every_card_was_measured():
    errors = {"h20.decode": HeldOut(0.06, 0.1, 0.2, 9), "h20.train": HeldOut(0.08, 0.1, 0.2, 4)}
    half = plan(HEX, SEVEN, constants=Constants(errors=errors))
    assert half.certificate.held_out_error is None
    assert "not fitted, so rates (≈) may be wrong by a factor" in text.format_plan(half)
    whole = plan(HEX, SEVEN, constants=Constants(errors={**errors, "h800-hex.decode": HeldOut(0.03, 0.1, 0.2, 9)}))
    assert whole.certificate.held_out_error == 0.08
    assert "off by 8.0% on held-out" in text.format_plan(whole)
    assert f" {whole.step.tokens_per_s:,.0f} tokens/s (±8%), " in text.sentence(whole)
    assert [pool.rate_error for pool in whole.rollout if pool.offer == "h20"] == [0.06] * len(whole.rollout)
    assert "± 6%" in text.format_plan(whole)
    assert "÷× 1.5" in text.format_plan(whole), "training on h800 was never measured"
    assert f" ≈{round(half.step.tokens_per_s, -3):,.0f} tokens/s (" in text.sentence(half)


@pytest.mark.parametrize("bound", [0, 1, 2, 4, 8])
def test_a_single_node_of_eight_cards_is_enough_for_every_bound(bound):
    one = what_if.changed(HEX, remove={"h20": HEX.classes["h20"].num_nodes, "h800": HEX.classes["h800"].num_nodes - 1})
    asked = dataclasses.replace(SEVEN, bound=bound)
    found = plan(one, asked)
    assert found.rent == {"h800": 1}
    assert verify(found, one, asked) == []
    trains = {card for stage in found.training.stages for group in stage for card in _cards(group)}
    generates = {card for pool in found.rollout for group in pool.places for card in _cards(group)}
    assert trains | generates <= set(range(8))
    assert bool(trains & generates) == (bound == 0), "with a bound above 0 no card does both"


def _cards(group):
    return range(group.first, group.first + group.size)


def test_a_single_card_takes_turns_whatever_the_bound():
    card = dataclasses.replace(HEX.classes["h20"], per_node=1, num_nodes=1)
    small = dataclasses.replace(load_workload(EXAMPLES / "workload_hex_1.5b.toml"), bound=4)
    found = plan(Inventory({"h20": card}), small)
    assert found.takes_turns
    assert found.staleness.bound == 0
    assert verify(found, Inventory({"h20": card}), small) == []
    apart = dataclasses.replace(small, colocates=False)
    with pytest.raises(UserError, match="no plan: hardware"):
        plan(Inventory({"h20": card}), apart)


def test_a_class_given_as_two_alike_ones_is_planned_as_one():
    machines = HEX.classes["h20"]
    links = {**HEX.links, frozenset(("other",)): HEX.links[frozenset(("h20",))]}
    links |= {
        frozenset(("other", "h20")): HEX.links[frozenset(("h20",))],
        frozenset(("other", "h800")): HEX.links[frozenset(("h20", "h800"))],
    }
    classes = {
        **HEX.classes,
        "h20": dataclasses.replace(machines, num_nodes=1),
        "other": dataclasses.replace(machines, name="other", num_nodes=machines.num_nodes - 1),
    }
    halves = dataclasses.replace(HEX, classes=classes, links=links)
    found, whole = plan(halves, SEVEN), plan(HEX, SEVEN)
    assert found.step.tau_s == whole.step.tau_s
    assert set(found.rent) <= {"h800", "h20+other"}
    assert any("h20 and other: alike" in line for line in found.assumptions)
    assert verify(found, halves, SEVEN) == []


def test_a_sentence_rents_only_what_is_not_owned():
    mine = {name: dataclasses.replace(each, is_owned=True) for name, each in HEX.classes.items() if name == "h800"}
    found = plan(dataclasses.replace(HEX, classes={**HEX.classes, **mine}), SEVEN, budget=90)
    assert text.sentence(found).startswith("Rent 3 nodes of h20 and use 1 node of h800 for 86.64 $/h")


def test_the_account_begins_with_what_to_rent_and_tells_every_assumption(found):
    told = text.format_plan(found, ["one more node of h20: nothing"], in_full=True)
    first = told.splitlines()[0]
    assert first.startswith("Rent ")
    assert all(word in first for word in ("$/h", "tokens/s", found.limit))
    assert all(line in told for line in found.assumptions)
    assert "trains" in told
    assert "generates" in told
    assert "Gap: " in told


@pytest.mark.full
def test_one_more_node_lets_larger_gangs_in():
    base = plan(HEX, SEVEN)
    (h800,) = [line for line in what_would_help(HEX, SEVEN, base, nodes_alone=True) if "h800" in line]
    grown = plan(what_if.changed(HEX, add={"h800": 1}), SEVEN)
    gain = grown.step.tokens_per_s / base.step.tokens_per_s - 1
    assert gain > 0.1
    assert f"{gain:+.1%}" in h800


@pytest.mark.full
def test_at_a_throughput_a_further_node_is_told_by_what_it_saves():
    cheap = plan(HEX, SEVEN, throughput=34_000.0)
    lines = what_would_help(HEX, SEVEN, cheap)
    grown = plan(what_if.changed(HEX, add={"h800": 1}), SEVEN, throughput=34_000.0)
    saving = 1 - grown.step.price_per_h / cheap.step.price_per_h
    told = "nothing" if saving <= 1e-3 else f"{-saving:.1%} of the price, {grown.step.price_per_h:,.2f} $/h"
    assert f"one more node of h800: {told}" in lines
    assert any(line.startswith("max_staleness = 9:") for line in lines)


@pytest.mark.full
def test_a_cheaper_plan_that_is_almost_as_fast_is_told_with_the_budget_that_gives_it():
    (line,) = remarks_on(HEX, SEVEN, plan(HEX, SEVEN))
    assert line.startswith("Cheaper: 86.64 $/h (-15%) gives ≈34,000 tokens/s (-2%)")
    cheaper = plan(HEX, SEVEN, budget=86.64)
    assert cheaper.step.price_per_h == pytest.approx(86.64)
    assert f"≈{round(cheaper.step.tokens_per_s, -3):,.0f}" in line
    assert "--budget 86.64 plans that" in line
    assert line in text.format_plan(cheaper, remarks=[line]).splitlines()
    assert remarks_on(HEX, SEVEN, plan(HEX, SEVEN, throughput=33_000)) == []


def test_free_machines_that_stay_idle_and_prices_of_the_catalogue_are_told(tmp_path):
    file = tmp_path / "cluster.toml"
    mine = '[classes.mine]\naccelerator = "rtx-4090"\nnodes = 2\nper_node = 1\nowned = true\n'
    rented = '[classes.h100]\naccelerator = "h100-sxm"\nnodes = 2\nper_node = 8\n'
    file.write_text(f"{mine}{rented}[links]\nbetween_nodes = 5.0\nbetween_classes = 0.01\n")
    inventory = load_inventory(file)
    idle, prices = remarks_on(inventory, SEVEN, plan(inventory, SEVEN))
    assert idle.startswith("Idle: 2 of the 2 cards of mine, although they cost nothing: training sets the pace")
    assert prices.startswith("Prices: from the catalogue, in $/h per card: h100 4.45; set price in")


def test_a_class_of_one_node_is_planned_and_its_second_node_is_left_unknown():
    found = plan(LAB, SEVEN)
    assert found.step.price_per_h == 0
    assert text.sentence(found).startswith("Use ")
    assert plan(LAB, SEVEN, budget=0.0).rent == found.rent
    assert any(line.startswith("one more node of a100: unknown") for line in what_would_help(LAB, SEVEN, found))


@pytest.mark.full
def test_the_mix_is_never_dearer_than_a_class_that_it_contains():
    points = mixed(HEX, SEVEN)
    assert all(one.price_per_h > other.price_per_h for one, other in itertools.pairwise(points))
    only = mixed(alone(HEX, "h20", 6 * HEX.classes["h20"].node_price_per_h), SEVEN)
    slower = [point for point in only if point.tokens_per_s <= points[0].tokens_per_s]
    assert slower
    for point in slower:
        least = plan(HEX, SEVEN, throughput=point.tokens_per_s * (1 - 1e-6)).step.price_per_h
        assert least <= point.price_per_h * (1 + 1e-3)


def test_a_fleet_of_one_class_has_the_nodes_that_the_same_money_buys():
    money = sum(machines.node_price_per_h * machines.num_nodes for machines in HEX.classes.values())
    assert money == pytest.approx(131.04)
    assert alone(HEX, "h800", money).classes["h800"].num_nodes == 3
    assert alone(HEX, "h20", money).classes["h20"].num_nodes == 8
    assert alone(LAB, "a100", 0.0).classes["a100"].num_nodes == 1


def test_a_fleet_without_a_plan_is_named_on_the_page_and_nothing_is_fetched():
    page = frontier_page("7B <b>", [Point(10, 100), Point(5, 60)], {"h800": [Point(9, 50)], "l4": []})
    assert "7B &lt;b&gt;" in page
    assert page.count(" tokens/s at ") == 3
    assert "No plan exists for: l4 alone." in page
    assert not any(word in page for word in ("<script", "http:", "https:", "<link", "@import"))


def test_the_split_by_class_is_drawn_and_told():
    page = frontier_page("7B", [Point(10, 100)], {"h800": [Point(9, 50)]}, Point(12, 80))
    assert "split by class: 80 tokens/s at 12.00 $/h" in page
    assert "what AReaL-Hex (arXiv 2511.00796) evidently ran" in page
    assert "AReaL-Hex" not in frontier_page("7B", [Point(10, 100)], {})


def test_the_split_by_class_rents_everything_and_is_never_faster_than_the_best_mix():
    split = split_by_class(HEX, SEVEN)
    assert split is not None
    assert split.price_per_h == pytest.approx(131.04)
    best = plan(HEX, SEVEN).step.tokens_per_s
    assert 0 < split.tokens_per_s <= best * 1.001


def test_generation_waits_for_every_copy_of_the_split_by_class(monkeypatch):
    def tokens_per_s(copies: float) -> float:
        monkeypatch.setattr(fleets_module, "COPIES", copies)
        split = split_by_class(HEX, SEVEN)
        assert split is not None
        return split.tokens_per_s

    assert tokens_per_s(1.0) >= tokens_per_s(5.0) > tokens_per_s(50.0)


def test_one_class_cannot_be_split():
    assert split_by_class(alone(HEX, "h20", 100.0), SEVEN) is None


def test_a_model_that_fits_no_fleet_leaves_it_empty():
    fleets = homogeneous(LAB, SEVEN)
    assert set(fleets) == {"4090", "a100"}
    assert fleets["a100"] == []


@pytest.mark.parametrize("top, last", [(7.0, 8.0), (100.0, 100.0), (0.0, 1.0), (131.04, 150.0)])
def test_ticks_are_round_and_reach_the_top(top, last):
    assert ticks(top)[0] == 0
    assert ticks(top)[-1] == pytest.approx(last)


def test_python_plans_from_files():
    files = EXAMPLES / "cluster_hex_56.toml", EXAMPLES / "workload_hex_14b.toml"
    assert offbeat.make_plan(*files, budget=60.0).step == plan(HEX, FOURTEEN, budget=60.0).step
