import pytest

from offbeat.errors import UserError
from offbeat.planner.inputs.hardware import Link
from offbeat.planner.inputs.inventory import load_inventory
from offbeat.planner.inputs.what_if import changed, parse_changes

TWO = """[classes.h800]
accelerator = "h800-hex"
nodes = 1
per_node = 8

[classes.h20]
accelerator = "h20"
nodes = 3
per_node = 8

[links]
between_nodes = 5.0
between_classes = 1.5
"""
OWN = "[classes.mine]\ntflops = 100\nmemory_gb = 24\nbandwidth_tb_s = 1\nnodes = 1\nper_node = 1\nowned = true\n"


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def write(text: str) -> str:
        (tmp_path / "c.toml").write_text(text)
        return "c.toml"

    return write


@pytest.fixture
def refusal(cluster):
    def ask(text: str) -> str:
        with pytest.raises(UserError) as caught:
            load_inventory(cluster(text))
        assert "\n" not in str(caught.value)
        return str(caught.value)

    return ask


def test_classes_take_what_they_do_not_say_from_the_catalogue(cluster):
    inventory = load_inventory(cluster(TWO))
    h800, h20 = inventory.classes["h800"], inventory.classes["h20"]
    assert (h800.accelerator.flops, h800.price_per_h, h800.num_accelerators) == (756e12, 5.28, 8)
    assert (h20.node_price_per_h, h20.num_accelerators, h20.is_owned) == (pytest.approx(14.8), 24, False)
    assert any("h20: $1.85/h" in line for line in inventory.assumptions)


def test_links_follow_from_the_defaults(cluster):
    inventory = load_inventory(cluster(TWO))
    assert inventory.link("h20", "h20") == Link(5e9)
    assert inventory.link("h20", "h800") == inventory.link("h800", "h20") == Link(1.5e9)


def test_the_more_particular_link_wins(cluster):
    text = TWO.replace(
        "per_node = 8\n\n[classes.h20]", 'per_node = 8\nzone = "a"\n\n[classes.h20]\nbetween_nodes = 7.0'
    )
    pair = '[[links.pair]]\nbetween = ["a", "here"]\ngb_s = 0.5\nshared = true\nlatency_ms = 9\n'
    inventory = load_inventory(cluster(text + pair))
    assert inventory.link("h20", "h20") == Link(7e9)
    assert inventory.link("h20", "h800") == Link(0.5e9, 0.009, True)
    closer = '[[links.pair]]\nbetween = ["h800", "h20"]\ngb_s = 0.75\n'
    assert load_inventory(cluster(text + pair + closer)).link("h20", "h800") == Link(0.75e9)
    assert load_inventory(cluster(text + closer + pair)).link("h20", "h800") == Link(0.75e9)


def test_a_measured_matrix_counts_the_slower_way(cluster, tmp_path):
    (tmp_path / "bw.csv").write_text("from,h800,h20\nh800,6,1.2\nh20,1.1,4\n")
    inventory = load_inventory(cluster(TWO + 'matrix_file = "bw.csv"\n'))
    assert (inventory.link("h800", "h800").bytes_per_s, inventory.link("h20", "h20").bytes_per_s) == (6e9, 4e9)
    assert inventory.link("h800", "h20").bytes_per_s == pytest.approx(1.1e9)
    assert any("the slower direction, 1.1 GB/s" in line for line in inventory.assumptions)
    rows = "[links.matrix]\nh800 = { h800 = 6, h20 = 1.2 }\nh20 = { h800 = 1.1, h20 = 4 }\n"
    assert load_inventory(cluster(TWO + rows)).links == inventory.links


def test_zones_share_their_link(cluster):
    text = TWO.replace("nodes = 3", 'nodes = 3\nzone = "far"') + "between_zones = 0.1\n"
    assert load_inventory(cluster(text)).link("h20", "h800") == Link(0.1e9, 0.02, True)


def test_own_figures_need_no_catalogue(cluster):
    machines = load_inventory(cluster(OWN)).classes["mine"]
    assert (machines.accelerator.flops, machines.accelerator.source, machines.price_per_h) == (100e12, "given", 0.0)
    assert machines.accelerator.link_bytes_per_s == machines.accelerator.host_bytes_per_s == 32e9


def test_own_figures_win_over_the_catalogue(cluster):
    card = load_inventory(cluster(TWO.replace("nodes = 3", "nodes = 3\nlink_gb_s = 64"))).classes["h20"].accelerator
    assert (card.link_bytes_per_s, card.flops) == (64e9, 148e12)


@pytest.mark.parametrize(
    "before, after, said",
    [
        ("nodes = 3", "node = 3", "c.toml:8: classes.h20.node = 3: unknown key; did you mean nodes?"),
        ("nodes = 3", "nodes = 0", "c.toml:8: classes.h20.nodes = 0: must be 1 or more"),
        ("nodes = 3", "nodes = 3\nprice = -1", "c.toml:9: classes.h20.price = -1: must be 0 or more"),
        ("nodes = 3", 'nodes = "3"', 'c.toml:8: classes.h20.nodes = "3": wants a whole number, not text'),
        ("nodes = 3", "", "c.toml:6: classes.h20.nodes: is missing"),
        ('"h20"', '"h2O"', "c.toml:7: classes.h20.accelerator 'h2O' is not in the catalogue; did you mean 'h20'?"),
        ("between_classes = 1.5", "", "the rate between h800 and h20 is not given; add links.between_classes"),
        ("between_nodes = 5.0", "", "c.toml:11: the rate between two nodes of h20 is not given"),
        ("between_nodes = 5.0", "between_nodes = 3200", "if the rate is in Gbit/s, write 400"),
        ("between_nodes = 5.0", "between_nodes = 0.00005", "is it in TB/s, perhaps?"),
        (
            "between_nodes",
            "between_node",
            "c.toml:12: links.between_node = 5.0: unknown key; did you mean between_nodes?",
        ),
        ("nodes = 3", "nodes = 3\nbandwidth_tb_s = 4000", "allowed 0.02 to 50; is it in GB/s, perhaps?"),
        ("nodes = 3", "nodes = 3\nprice = 800", "if that is the price of a node of 8 cards, write 100"),
        ("[links]", "[linkz]", "unknown section; did you mean links?"),
    ],
)
def test_a_mistake_is_one_line_with_its_place_and_remedy(refusal, before, after, said):
    assert said in refusal(TWO.replace(before, after))


@pytest.mark.parametrize(
    "rows, said",
    [
        ("h800 = { h800 = 6, h20 = 1 }", "is not square: the row of 'h20' is missing"),
        ("h800 = { h800 = 6 }\nh20 = { h800 = 1, h20 = 4 }", "is not square: the row of 'h800' lacks 'h20'"),
        ("h800 = { h800 = 6, h2o = 1 }", "there is no class 'h2o'; did you mean 'h20'?"),
        ("h800 = { h800 = 6, h20 = 0 }\nh20 = { h800 = 1, h20 = 4 }", "is 0 GB/s; it must be above 0"),
    ],
)
def test_a_matrix_must_be_square_over_the_classes(refusal, rows, said):
    assert said in refusal(f"{TWO}[links.matrix]\n{rows}\n")


def test_a_class_without_price_or_accelerator_says_what_to_add(refusal):
    assert "the catalogue has no price for h800-sxm; give $/h per accelerator, or owned = true" in refusal(
        TWO.replace("h800-hex", "h800")
    )
    assert "accelerator is missing; give an accelerator" in refusal("[classes.x]\nnodes = 1\nper_node = 2\n")
    assert "memory_gb is missing" in refusal(OWN.replace("memory_gb = 24\n", ""))
    assert refusal("[classes]\n") == "c.toml:1: [classes]: must have 1 or more entries"


def test_between_zones_no_link_is_that_fast(refusal):
    text = TWO.replace("nodes = 3", 'nodes = 3\nzone = "far"') + "between_zones = 100\n"
    assert "allowed 50 or less between zones; if the rate is in Gbit/s, write 12.5" in refusal(text)


def test_a_pair_must_name_what_there_is_and_only_once(refusal):
    pair = '[[links.pair]]\nbetween = ["h800", "h2O"]\ngb_s = 1.0\n'
    assert "no class or zone 'h2O'; did you mean 'h20'?" in refusal(TWO + pair)
    pair = pair.replace("h2O", "h20")
    assert "is given twice" in refusal(TWO + pair + pair)


def test_identical_classes_may_stand_side_by_side(cluster):
    twin = '[classes.twin]\naccelerator = "h20"\nnodes = 3\nper_node = 8\n'
    inventory = load_inventory(cluster(TWO + twin))
    assert inventory.link("h20", "twin") == Link(1.5e9)
    assert inventory.classes["twin"].accelerator == inventory.classes["h20"].accelerator


def test_nodes_are_added_and_removed_by_class_or_accelerator(cluster):
    inventory = load_inventory(cluster(TWO))
    other = changed(inventory, add={"h20": 2, "h800-hex": 1}, remove={"h20": 4})
    assert (other.classes["h20"].num_nodes, other.classes["h800"].num_nodes) == (1, 2)
    assert inventory.classes["h20"].num_nodes == 3
    gone = changed(inventory, remove={"h800": 1})
    assert list(gone.classes) == ["h20"]
    assert set(gone.links) == {frozenset(("h20",))}


def test_an_accelerator_that_the_file_lacks_becomes_a_class_by_its_defaults(cluster):
    inventory = changed(load_inventory(cluster(TWO)), add={"h100": 2})
    new = inventory.classes["h100"]
    assert (new.accelerator.name, new.per_node, new.num_nodes) == ("h100-sxm", 8, 2)
    assert inventory.link("h100", "h20") == Link(1.5e9)
    assert inventory.link("h100", "h100") == Link(5e9)
    assert "h100: a new class" in inventory.assumptions[-1]


@pytest.mark.parametrize(
    "add, remove, said",
    [
        ({}, {"h800": 2}, "remove h800:2: too many nodes; class h800 has 1"),
        ({}, {"h800": 1, "h20": 3}, "no node would be left in the cluster"),
        ({"h21": 1}, {}, "neither a class nor an accelerator of the catalogue; did you mean 'h20'?"),
        ({"h800-sxm": 1}, {}, "no default for price; add the class to the cluster's file"),
        ({}, {"b200": 1}, "remove b200: no class has this accelerator"),
    ],
)
def test_an_impossible_change_is_one_line(cluster, add, remove, said):
    with pytest.raises(UserError) as caught:
        changed(load_inventory(cluster(TWO)), add, remove)
    assert said in str(caught.value)


def test_a_new_class_asks_for_the_links_that_the_file_does_not_give(cluster):
    inventory = load_inventory(cluster(OWN))
    with pytest.raises(UserError, match=r"no default for links\.between_classes, links\.between_nodes"):
        changed(inventory, add={"h20": 2})
    with pytest.raises(UserError, match=r"add links\.between_nodes or classes\.mine\.between_nodes"):
        changed(inventory, add={"mine": 1})


def test_words_of_changes():
    assert parse_changes(["h20:2", "b200", "h20:1"], "--add") == {"h20": 3, "b200": 1}
    for word in ("h20:", "h20:0", ":2", "h20:-1", "h20:two"):
        with pytest.raises(UserError, match=f"--add {word}: write NAME:NODES"):
            parse_changes([word], "--add")


def test_a_processor_may_be_slower_than_any_accelerator(cluster, refusal):
    slow = OWN.replace("tflops = 100", "tflops = 0.07").replace("bandwidth_tb_s = 1", "bandwidth_tb_s = 0.01")
    card = load_inventory(cluster(slow.replace("mine", "cpu"))).classes["cpu"].accelerator
    assert (card.name, card.flops) == ("cpu", pytest.approx(0.07e12))
    assert "is it in PFLOPS, perhaps?" in refusal(slow)
    assert "is it in GFLOPS, perhaps?" in refusal(OWN.replace("mine", "cpu").replace("tflops = 100", "tflops = 700"))
