"""The page about the configuration says what the models say, and what it says is refused is refused."""

from __future__ import annotations

import re
import runpy

import pytest
from doc_reader import ROOT, blocks

from offbeat.cli.main import main
from offbeat.config import DEMO, from_dict, load
from offbeat.config.keys import known_keys
from offbeat.errors import UserError

PAGE = ROOT / "docs" / "configuration.md"


def test_the_tables_are_those_of_the_models():
    rendered = runpy.run_path(str(ROOT / "scripts" / "make_configuration_page.py"))["rendered"]
    assert PAGE.read_text() == rendered(PAGE.read_text()), "run python scripts/make_configuration_page.py"


def test_every_key_has_a_row_with_a_meaning():
    rows = re.findall(r"^\| `(\w+)` \|.*\| (.*) \|$", PAGE.read_text(), re.MULTILINE)
    assert {name for name, _ in rows} == {key.split(".")[1] for key in known_keys()} - {"source"}
    assert all(meaning.endswith(".") for _, meaning in rows)


def test_the_demo_on_the_page_is_the_built_in_one(tmp_path):
    (tmp_path / "demo.toml").write_text(blocks(PAGE, "toml")[0])
    assert load(tmp_path / "demo.toml") == from_dict(DEMO)


def test_the_mistakes_on_the_page_are_told_in_these_words(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text("[batch]\n" + 5 * "\n" + "group_sise = 16\n")
    for words in (["run.toml"], ["--optimizer.schedule", "cosin"], ["--batch.num-generations", "8"]):
        assert main(["train", *words]) == 2
    assert capsys.readouterr().err == blocks(PAGE, "")[0]


@pytest.mark.parametrize(
    "overrides",
    [
        ["--batch.min-group=9"],
        ["--batch.updates-per-step=3"],
        ["--optimizer.warmup-steps=4", "--run.steps=3"],
        ["--run.exact", "--rollout.slots=15"],
    ],
)
def test_keys_are_checked_against_each_other_as_the_page_says(overrides):
    named = overrides[-1].split("=")[0] if "--run.exact" in overrides else overrides[0].split("=")[0]
    with pytest.raises(UserError, match=named.replace("-", "_").strip("_")) as refused:
        load(None, overrides)
    assert f"`{named.removeprefix('--').replace('-', '_')}`" in PAGE.read_text()
    assert "\n" not in str(refused.value)
