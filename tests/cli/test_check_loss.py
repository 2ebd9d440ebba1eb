"""`offbeat check-loss`: a line for each check, and a status that a script can use."""

import json
from pathlib import Path

import pytest

from offbeat.cli.main import main

OWN = """
def loss(tokens, settings):
    return -tokens.log_ratio.exp() * tokens.advantages


def mean_of_all(tokens, settings):
    found = loss(tokens, settings)
    return found / tokens.mask.sum()


def wrong_way(tokens, settings):
    return -loss(tokens, settings)


def advantage(rewards, groups):
    return rewards - rewards.mean()


def unnamed(a, b):
    return -a.log_ratio.exp() * a.advantages
"""


@pytest.fixture(autouse=True)
def own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text(OWN)


def said(capsys, status, *words):
    assert main(["check-loss", *words]) == status
    told = capsys.readouterr()
    return told.out if status < 2 else told.err.strip()


def test_a_loss_that_keeps_the_contract_has_a_tick_for_each_check(capsys):
    lines = said(capsys, 0, "own.py:loss").splitlines()
    assert lines[-1] == "own.py:loss, as a loss: everything holds"
    assert {line[:2] for line in lines[:-1]} == {"✓ "}


def test_a_loss_that_does_not_is_told_why_and_ends_with_status_1(capsys):
    out = said(capsys, 1, "own.py:mean_of_all")
    assert "\n✗ sequences have no influence on each other: a value is " in out
    assert out.endswith("checks do not hold\n")


def test_a_warning_leaves_the_status_at_0(capsys):
    out = said(capsys, 0, "own.py:wrong_way")
    sentence = "\n! fresh tokens of better answers become likelier, of worse ones less likely: "
    assert f"{sentence}the loss moves 22 of 22 tokens the wrong way" in out


def test_an_advantage_is_known_by_its_parameters(capsys):
    out = said(capsys, 0, "own.py:advantage")
    assert "! groups have no influence on each other" in out
    assert out.endswith("own.py:advantage, as an advantage: everything holds\n")


def test_programs_get_json(capsys):
    told = json.loads(said(capsys, 1, "own.py:mean_of_all", "--json"))
    assert (told["function"], told["kind"], told["holds"]) == ("own.py:mean_of_all", "loss", False)
    assert {"check": "returns one finite number per token", "mark": "holds", "detail": ""} in told["checks"]


def test_other_names_of_parameters_want_the_kind(capsys):
    assert "own.py:unnamed: takes a, b; a loss takes tokens and settings" in said(capsys, 2, "own.py:unnamed")
    assert "everything holds" in said(capsys, 0, "own.py:unnamed", "--kind=loss")


def test_what_is_not_there_is_told(capsys):
    assert said(capsys, 2, "own.py:los").endswith("has no function 'los'; did you mean 'loss'?")
    assert "write module:function or file.py:function" in said(capsys, 2, "clip")
