import re
import tomllib
from importlib import resources

import pytest

from offbeat.errors import UserError
from offbeat.planner.inputs import hardware
from offbeat.planner.inputs.hardware import accelerator, entry


def test_figures_come_in_si_units():
    card = accelerator("h20")
    assert (card.flops, card.memory_bytes, card.memory_bytes_per_s) == (148e12, 96e9, 4e12)
    assert (card.link_bytes_per_s, card.host_bytes_per_s, card.price_per_h) == (450e9, 64e9, 1.85)


@pytest.mark.parametrize(
    "alias, name",
    [("h100", "h100-sxm"), ("H100 SXM", "h100-sxm"), ("a100", "a100-80gb"), ("4090", "rtx-4090"), ("B200", "b200")],
)
def test_an_alias_stands_for_its_accelerator(alias, name):
    assert accelerator(alias) is accelerator(name)
    assert accelerator(alias).name == name


def test_the_h800_of_the_paper_is_not_the_sxm_part():
    paper, sxm = accelerator("h800-hex"), accelerator("h800")
    assert (paper.flops, paper.memory_bytes_per_s, paper.price_per_h) == (756e12, 2e12, 5.28)
    assert (sxm.flops, sxm.memory_bytes_per_s, sxm.price_per_h) == (989e12, 3.35e12, None)
    assert paper.link_bytes_per_s == sxm.link_bytes_per_s == 200e9


def test_the_price_is_as_far_above_the_lowest_as_below_the_highest():
    found = entry("h100-sxm")
    assert found.price_range is not None
    low, high = found.price_range
    price = found.accelerator.price_per_h
    assert price is not None
    assert price / low == pytest.approx(high / price, rel=0.01)


def test_an_unknown_name_is_answered_with_the_nearest():
    with pytest.raises(UserError, match=re.escape("accelerator 'h200sxm2' is not in the catalogue; did you mean")):
        accelerator("h200sxm2")
    with pytest.raises(UserError, match="there are a100-40gb"):
        accelerator("quantum")


@pytest.mark.parametrize("name", hardware.names())
def test_every_entry_is_plausible_and_says_where_it_comes_from(name):
    card = accelerator(name)
    assert 20 < card.flops / card.memory_bytes_per_s < 500  # the ridge of a real part, so no unit slipped
    assert 16e9 <= card.memory_bytes <= 300e9
    assert card.link_bytes_per_s >= 32e9
    assert card.host_bytes_per_s in (32e9, 64e9)
    assert len(card.source) > 20


def test_no_alias_stands_for_two():
    tables = tomllib.loads(resources.files("offbeat.planner.inputs").joinpath("catalogue.toml").read_text())
    words = [word for name, table in tables.items() for word in (name, *table.get("aliases", ()))]
    assert len(words) == len(set(words))
