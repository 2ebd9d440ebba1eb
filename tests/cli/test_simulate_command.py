"""`offbeat simulate` answers a person and a program, and every mistake in one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from ledger_run import full_step, version

from offbeat.cli.main import main
from offbeat.config.load import from_dict, resolved
from offbeat.ledger.ledger import Ledger
from offbeat.ledger.records import LedgerTerms

SMALL = """
[run]
steps = 6
[batch]
groups_per_step = 4
group_size = 4
[answer]
median = 40
sigma = 0.8
longest = 200
[workers.fast]
slots = 8
base_s = 0.004
price = 2.0
[workers.slow]
count = 2
slots = 8
base_s = 0.01
[trainer]
fixed_s = 0.3
"""


@pytest.fixture(autouse=True)
def in_a_folder_with_a_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("sim.toml").write_text(SMALL)


def found(capsys: pytest.CaptureFixture[str], *words: str) -> dict:
    assert main(["simulate", *words, "--json"]) == 0
    said = capsys.readouterr()
    assert said.err == ""
    return json.loads(said.out)


def edited(*changes: tuple[str, str]) -> str:
    text = SMALL
    for old, new in changes:
        assert old in text
        text = text.replace(old, new, 1)
    Path("edited.toml").write_text(text)
    return "edited.toml"


def test_a_person_gets_the_figures_and_the_files(capsys):
    assert main(["simulate", "sim.toml", "--trace", "t.json", "--picture", "p.svg"]) == 0
    said = capsys.readouterr().out
    for word in ("samples trained", "trainer: trains", "staleness", "per million trained tokens", "fast", "slow"):
        assert word in said
    assert json.loads(Path("t.json").read_text())
    assert Path("p.svg").read_text().startswith("<svg")


def test_the_same_file_gives_the_same_bytes(capsys):
    outputs = []
    for seed in ("1", "1", "2"):
        main(["simulate", "sim.toml", "--json", "--seed", seed])
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1]


def test_what_if_changes_what_is_simulated(capsys):
    as_is = found(capsys, "sim.toml")
    more = found(capsys, "sim.toml", "--workers", "slow:+4")
    assert more["samples_per_s"] > as_is["samples_per_s"]
    assert set(found(capsys, "sim.toml", "--max-staleness", "1")["tokens_by_staleness"]) <= {"0", "1"}
    assert found(capsys, "sim.toml", "--steps", "3")["steps"] == 3
    fixed = found(capsys, "sim.toml", "--over-provision", "1")
    assert fixed["samples_per_s"] < as_is["samples_per_s"]


@pytest.mark.parametrize(
    "words, part",
    [
        ((), "give either CONFIG.toml or --replay RUN"),
        (("sim.toml", "--replay", "x"), "give either CONFIG.toml or --replay RUN"),
        (("--replay", "x"), "x"),
        (("sim.toml", "--workers", "slow:-3"), "slow has 2"),
        (("sim.toml", "--workers", "quick:+1"), "no workers 'quick'"),
        (("sim.toml", "--workers", "many"), "write it like +2"),
        (("sim.toml", "--max-staleness", "-1"), "--max-staleness is -1"),
        (("sim.toml", "--over-provision", "9"), "from 1 to max_staleness + 1 = 5"),
        (("sim.toml", "--plan", "plan.json"), "needs cluster and workload"),
        (("sim.toml", "--trace", "nowhere/t.json"), "the folder nowhere does not exist"),
        (("none.toml",), "none.toml"),
    ],
)
def test_a_mistake_on_the_command_line_is_one_line(capsys, words, part):
    assert main(["simulate", *words]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    assert part in said.err


@pytest.mark.parametrize(
    "changes, part",
    [
        ([("[answer]\nmedian = 40", "[answer]\nmedium = 40")], "medium"),
        ([("median = 40\n", "")], "give tokens, or median + sigma + longest"),
        ([("[trainer]\nfixed_s = 0.3", "")], "[trainer] is missing"),
        ([("base_s = 0.004", "base_s = 0.0")], "workers.fast: base_s and per_row_s are both 0"),
        ([("steps = 6", "steps = 6\nwarmup = 6")], "run.warmup = 6: must be below run.steps"),
        ([("[trainer]", '[policy]\nname = "arreal"\n[trainer]')], "unknown policy; did you mean"),
        ([("[trainer]", '[policy]\nname = "april"\n[trainer]')], 'needs schedule.mode = "alternate"'),
        ([("[trainer]", '[[events]]\nat_s = 1\nkind = "crash"\nworkers = "slwo"\n[trainer]')], "no such workers"),
        ([("[trainer]", "[schedule]\nover_provision = 9.0\n[trainer]")], "allowed 1 to max_staleness + 1 = 5"),
    ],
)
def test_a_mistake_in_the_file_is_one_line_with_its_place(capsys, changes, part):
    assert main(["simulate", edited(*changes)]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert part in said


def test_a_run_that_cannot_end_says_so_with_status_1(capsys):
    stuck = edited(
        ("count = 2\n", ""), ("[trainer]", '[[events]]\nat_s = 0.1\nkind = "crash"\nworkers = "slow"\n[trainer]')
    )
    Path(stuck).write_text(
        Path(stuck).read_text().replace("[workers.fast]\nslots = 8\nbase_s = 0.004\nprice = 2.0\n", "")
    )
    assert main(["simulate", stuck]) == 1
    assert "No step was finished" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["areal", "april", "copris", "pipeline"])
def test_policies_of_other_systems_run(capsys, name):
    mode = "alternate" if name in ("april", "copris") else "overlap"
    file = edited(
        ("[trainer]", f'[schedule]\nmode = "{mode}"\nmax_staleness = 2\n[policy]\nname = "{name}"\n[trainer]')
    )
    assert found(capsys, file)["steps"] == 6


def a_run(folder: Path) -> Path:
    """The folder of a run with two trained steps, as far as a simulation reads it."""
    folder.mkdir()
    config = from_dict(
        {"batch": {"groups_per_step": 2, "group_size": 3}, "schedule": {"mode": "overlap"}, "rollout": {"slots": 4}}
    )
    (folder / "config.json").write_text(json.dumps(resolved(config)))
    with Ledger(folder / "ledger.sqlite", LedgerTerms(min_group=2, max_staleness=1)) as ledger:
        ledger.publish(version(0, 0))
        for step in range(2):
            full_step(ledger, step, size=3)
        ledger.execute("UPDATE trajectories SET accepted_at = accepted_at + 0.5")
    rows = [
        {"step": step + 1, "tokens": 40, "num_row_tokens": 60, "time_train_s": 0.3, "time_publish_s": 0.1,
         "time_wait_s": 1.0, "time_reward_s": 0.01}
        for step in range(2)
    ]  # fmt: skip
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return folder


def test_a_finished_run_is_simulated_with_its_lengths_and_workers(capsys, tmp_path):
    run = a_run(tmp_path / "a")
    with Ledger(run / "ledger.sqlite", read_only=True) as ledger:
        num_tokens = sum(row.num_tokens for row, _ in ledger.walk_trajectories())
    as_it_was = found(capsys, "--replay", str(run))
    assert as_it_was["steps"] == 2
    assert list(as_it_was["workers"]) == ["w"]
    assert as_it_was["trained_tokens"] == num_tokens
    faster = found(capsys, "--replay", str(run), "--workers", "+2", "--max-staleness", "2", "--steps", "20")
    assert faster["samples_per_s"] > as_it_was["samples_per_s"]
    assert set(faster["tokens_by_staleness"]) <= {"0", "1", "2"}


def test_a_folder_without_a_trained_step_cannot_be_simulated(capsys, tmp_path):
    run = a_run(tmp_path / "a")
    (run / "metrics.jsonl").unlink()
    assert main(["simulate", "--replay", str(run)]) == 2
    assert "has no metrics of a trained step" in capsys.readouterr().err
