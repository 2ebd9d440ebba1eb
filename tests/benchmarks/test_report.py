"""What benchmarks print: bars that a quick run leaves open where it cannot tell, a table, and one line of JSON."""

from __future__ import annotations

import importlib
import json

import pytest
from test_quick_forms import BARS

from benchmarks.__main__ import available, table
from benchmarks.ledger import measure as ledger
from benchmarks.report import QUICK_FACTOR, Bar, Unmeasured, at_least, at_most, show
from benchmarks.weights import sizes as weights


@pytest.mark.parametrize("bound, better", [(at_least, QUICK_FACTOR), (at_most, 1 / QUICK_FACTOR)])
def test_a_bar_holds_by_its_median_and_a_quick_run_decides_only_what_is_clear(bound, better):
    target, near, clear, missed = 2.0, 2.0 * better**0.5, 2.0 * better * better**0.01, 2.0 / better / better**0.01
    assert bound(target, [missed, near, near], quick=False).holds is True
    assert bound(target, [missed, missed, near], quick=False).holds is False
    assert bound(target, [near] * 3, quick=True).holds is None
    assert bound(target, [clear, clear, near], quick=True).holds is None
    assert bound(target, [clear] * 3, quick=True).holds is True
    assert bound(target, [missed] * 3, quick=True).holds is False
    assert bound(target, [3.0, 1.0, 2.5], quick=False) == Bar(2.5, target, bound is at_least, (1.0, 3.0))


def test_the_last_line_is_json_with_every_bar_and_where_it_was_measured(capsys):
    bars = {"speed": Bar(1.5, 1.0, True, (1.0, 2.0)), "room": Unmeasured(3.0)}
    show("dance", ("who", "turns"), [("hen", "7")], bars, quick=True)
    printed = capsys.readouterr().out
    assert "speed: 1.5 (1 to 2), target 1: holds" in printed
    assert "room: not measured, target 3" in printed
    line = json.loads(printed.splitlines()[-1])
    assert (line["benchmark"], line["quick"]) == ("dance", True)
    assert line["bars"]["speed"] == {"value": 1.5, "target": 1.0, "holds": True, "spread": [1.0, 2.0]}
    assert line["bars"]["room"]["value"] is None
    assert {"commit", "cores", "accelerator"} <= set(line)


@pytest.mark.parametrize("name", available())
def test_a_benchmark_can_be_imported_and_started(name):
    assert callable(importlib.import_module(f"benchmarks.{name}.__main__").main)


def test_every_quick_form_that_is_tested_is_a_benchmark():
    assert set(BARS) <= set(available())


@pytest.mark.parametrize("quick", [True, False])
def test_bars_of_the_ledger_are_those_of_its_quick_form(quick):
    growth = {operation: [(1.0, 1.2)] for operation in ("submit", "lease", "claim")}
    figures = {"submissions": {1: [(9.0, 10.0)], 16: [(5.0, 10.0)]}, "claims": [(2.0, 1.0)], "growth": growth}
    bars = ledger.bars_of(figures, quick)
    assert {name: bar.target for name, bar in bars.items()} == BARS["ledger"]
    assert bars["seconds of a claim, large over small"].holds is (None if quick else True)
    if not quick:
        assert [bar.holds for bar in bars.values()] == [True, False, True, True, True, True]


def test_bars_of_weights_are_those_of_the_quick_form_and_a_stand_in_decides_nothing():
    found = {"is_real": False, "over_entropy": 1.0, "over_rivals": {"zstd": 0.5}, "over_full": 0.001, "lr": 1e-6}
    bars = weights.bars_of([{**found, "name": "a stand-in"}, {**found, "name": "made up"}], quick=False)
    assert {name: bar.target for name, bar in bars.items()} == BARS["weights"]
    assert {name for name, bar in bars.items() if bar.holds is None} == {n for n in bars if n.endswith("real updates")}


def test_the_table_of_all_benchmarks_has_columns_as_wide_as_their_widest():
    assert table([("a", "b"), ("long", "x")]) == "a     b\n-------\nlong  x"
