"""The page about algorithms says what the configuration says: presets, corrections, advantages, refusals."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
from doc_reader import ROOT, SMALL_WORDS, Reader, blocks

from offbeat.cli.main import main
from offbeat.config import load
from offbeat.config.schema import (
    ADVANTAGES,
    BEYOND_SIBLINGS,
    IMPORTANCE,
    OWN,
    PRESETS,
    RELEASED,
    Aggregate,
    BatchConfig,
    Preset,
)
from offbeat.rewards.pool import OVERLONG, penalty
from offbeat.trainer.advantages import ADVANTAGES as RULES
from offbeat.trainer.losses import DIVERGENCES, VETO
from offbeat.trainer.step import BUCKET_NAMES, StalenessMetrics, StepMetrics

PAGE = ROOT / "docs" / "algorithms.md"
TEXT = PAGE.read_text()


def table(head: str) -> list[list[str]]:
    """The rows of the table whose first column is so called, cell by cell."""
    rows = TEXT.partition(f"| {head} |")[2].partition("\n\n")[0].splitlines()[2:]
    assert rows, f"no table begins with {head}"
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def bare(cell: str) -> str:
    return cell.strip("`")


def as_shown(name: str, preset: Preset) -> list[str]:
    clips = [f"{preset.clip_low:.10g}", f"{preset.clip_high:.10g}"] if "clip" in preset.policy else ["none", "none"]
    policy, drops = preset.policy.replace("_", " "), "yes" if preset.drop_no_signal else "no"
    return [f"`{name}`", policy, f"`{preset.advantage}`", f"`{preset.aggregate}`", *clips, drops]


def test_the_presets_on_the_page_are_those_of_the_configuration():
    assert table("`loss.name`") == [as_shown(name, preset) for name, preset in PRESETS.items()]


def test_the_examples_on_the_page_make_as_many_updates_as_it_says():
    for example, updates, *_ in table("example"):
        assert load(ROOT / "examples" / bare(example)).batch.updates_per_step == int(updates)


def test_every_preset_has_a_section_of_its_own():
    sections = {name for title in re.findall(r"^### (.*)$", TEXT, re.MULTILINE) for name in title.split(", ")}
    assert set(PRESETS) <= sections


def test_every_preset_of_the_page_passes_the_checks_in_both_schedules():
    for name in PRESETS:
        for mode in ("alternate", "overlap"):
            load(None, [f"--loss.name={name}", f"--schedule.mode={mode}"])


def test_what_the_page_says_of_an_own_loss_is_its_preset():
    said = TEXT.partition("## A loss or an advantage of your own")[2].partition("## ")[0]
    assert f"`advantage` is `{OWN.advantage}` and `aggregate` is `{OWN.aggregate}`" in " ".join(said.split())


def test_every_advantage_is_on_the_page_with_its_value():
    rows = {bare(name): value for name, _, value in table("`loss.advantage`")}
    assert tuple(rows) == ADVANTAGES
    for name in ("group", "mean", "leave_one_out", "siblings"):
        best, others, count = re.fullmatch(r"(\S+), (\S+) x (\d)", rows[name]).groups()
        found = RULES[name](np.array([1.0, 0, 0, 0]), np.zeros(4, int))
        assert found == pytest.approx([float(best), *[float(others)] * int(count)], abs=1e-6)


def test_every_gate_is_on_the_page_with_the_advantages_that_it_brings():
    rows = {bare(row[0]): row[3] for row in table("`batch.gate`")}
    assert list(rows) == list(BatchConfig.model_fields["gate"].annotation.__args__)
    for preset, brought in RELEASED.items():
        assert re.search(rf"`{brought}` for (the preset's )?`{preset}`", rows["release"])
    for name in BEYOND_SIBLINGS:
        assert f"`{name}`" in rows["batch"]


def test_every_aggregation_and_every_divergence_is_on_the_page():
    assert [bare(row[0]) for row in table("`loss.aggregate`")] == list(Aggregate.__args__)
    assert [bare(row[0]) for row in table("`loss.kl`")] == list(DIVERGENCES)


def test_every_correction_is_on_the_page_with_its_limits():
    rows = {bare(row[0]): " ".join(row[1:3]) for row in table("`loss.correction`")}
    assert set(rows) == set(IMPORTANCE)
    for name, said in rows.items():
        low, high = IMPORTANCE[name]
        if name not in ("off", "decoupled"):
            assert re.search(rf"\b{high:g}\b", said), name
        if low:
            assert f"outside {low:g} to {high:g}" in said, name
    assert f"ρ < {VETO:.4f}" in rows["sequence_mask"]


def test_the_metrics_to_watch_exist():
    bucket = StalenessMetrics(num_tokens=1, ess=1, behaviour_kl=0, clip_share=0, kept_share=1)
    metrics = StepMetrics(*[0.0] * 12, signal_share=1.0)
    told = set(replace(metrics, by_staleness={name: bucket for name in BUCKET_NAMES}).row())
    watched = {bare(row[0]) for row in table("metric")}
    assert {name.replace("AGE", "0") for name in watched} <= told
    assert f"one of {', '.join(BUCKET_NAMES)}:" in " ".join(TEXT.split())


def test_the_overlong_penalty_is_that_of_the_page():
    said = re.search(r"limit of (\d+) and L = (\d+):\n(.*?)\. It is", TEXT, re.DOTALL)
    limit, near = int(said[1]), int(said[2])
    lengths = re.findall(r"(\d+) (?:tokens )?lose ([\d.]+\d|\d)", said[3])
    assert len(lengths) == 3
    for length, lost in lengths:
        assert penalty(int(length), limit, near) == pytest.approx(-float(lost))
    assert f"named `{OVERLONG}`" in TEXT


def test_what_check_loss_says_of_the_example_is_on_the_page(reader: Reader):
    (shown,) = [block for block in blocks(PAGE, "") if block.startswith("✓")]
    assert reader.succeed("check-loss", "examples/own_loss.py:loss") == shown


def test_a_loss_that_normalises_what_it_sees_fails_the_check_that_the_page_says(reader: Reader):
    code = "def loss(tokens, settings):\n    return -tokens.advantages * tokens.logprobs / {0}\n"
    (reader.folder / "dividing.py").write_text(code.format("tokens.mask.sum().clamp(min=1)"))
    said = reader.offbeat("check-loss", "dividing.py:loss")
    (shown,) = [block for block in blocks(PAGE, "") if block.startswith("✓")]
    third = shown.splitlines()[2].removeprefix("✓ ")
    assert said.status == 1
    assert f"✗ {third}" in said.out


def test_the_advantage_on_the_page_passes_the_check(reader: Reader):
    (code,) = [block for block in blocks(PAGE, "python") if "def advantage(" in block]
    (reader.folder / "median.py").write_text(code)
    assert reader.succeed("check-loss", "median.py:advantage").endswith("everything holds\n")


def test_an_uncorrected_run_with_older_weights_is_refused_in_the_words_of_the_page(capsys):
    uncorrected = ["train", "--schedule.mode=overlap", "--loss.correction=off", "--dry-run"]
    assert main(uncorrected) == 2
    (refusal,) = [block for block in blocks(PAGE, "") if block.startswith("offbeat: ")]
    assert capsys.readouterr().err == refusal


@pytest.mark.full
@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_trains(name: str, reader: Reader):
    reader.succeed("train", *SMALL_WORDS, f"--loss.name={name}", f"--run.name=preset-{name.replace('+', 'p')}")


@pytest.mark.parametrize("name", [name for name in IMPORTANCE if name != "off"])
def test_every_correction_trains_where_workers_never_stop(name: str, reader: Reader):
    words = [f"--loss.correction={name}", "--schedule.mode=overlap", f"--run.name=correction-{name}"]
    reader.succeed("train", *SMALL_WORDS, *words)
