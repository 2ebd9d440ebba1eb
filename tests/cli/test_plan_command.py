"""`offbeat plan` answers a person and a program, and every mistake in one line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from ledger_run import eval_groups, full_step, version, work

from offbeat.cli.main import main
from offbeat.errors import UserError
from offbeat.launch.run_folder import trained_lengths
from offbeat.ledger.ledger import Ledger
from offbeat.ledger.records import LedgerTerms
from offbeat.planner import plan as record

EXAMPLES = Path(__file__).parents[2] / "examples" / "planning"
CLUSTER, WORKLOAD = str(EXAMPLES / "cluster_hex_56.toml"), str(EXAMPLES / "workload_hex_7b.toml")
CLUSTER_TEXT, WORKLOAD_TEXT = Path(CLUSTER).read_text(), Path(WORKLOAD).read_text()


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def refused(capsys):
    """Runs a command that must be refused, and returns its one line."""

    def run(*words: str) -> str:
        assert main(["plan", *words]) == 2
        said = capsys.readouterr()
        assert said.out == ""
        assert said.err.startswith("offbeat: ")
        assert said.err.count("\n") == 1
        return said.err

    return run


def told(capsys: pytest.CaptureFixture[str], *words: str, status: int = 0) -> str:
    assert main(["plan", *words]) == status
    said = capsys.readouterr()
    assert said.err == ""
    return said.out


def edited(name: str, text: str, *changes: tuple[str, str]) -> str:
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    Path(name).write_text(text)
    return name


CLUSTER_MISTAKES = {
    "unknown accelerator": (('"h20"', '"h21"'), "classes.h20.accelerator 'h21' is not in the catalogue; did you mean"),
    "negative count": (("nodes = 6", "nodes = -6"), "classes.h20.nodes = -6"),
    "links missing": (("between_classes = 1.5", ""), "between_classes"),
    "wrong unit": (("price = 1.85", "price = 1850"), "allowed up to 100 $/h per card"),
}


@pytest.mark.parametrize("change, line", CLUSTER_MISTAKES.values(), ids=CLUSTER_MISTAKES)
def test_a_mistake_in_the_clusters_file_is_one_line(refused, change, line):
    said = refused(edited("cluster.toml", CLUSTER_TEXT, change), WORKLOAD)
    assert "cluster.toml" in said
    assert line in said


def test_a_model_that_fits_no_class_says_what_memory_would_do(refused):
    cluster = edited(
        "cluster.toml",
        CLUSTER_TEXT,
        ('"h800-hex"', '"l4"'),
        ('"h20"', '"l4"'),
        ("nodes = 6", "nodes = 1"),
        ("per_node = 8", "per_node = 1"),
    )
    said = refused(cluster, str(EXAMPLES / "workload_hex_14b.toml"))
    assert "GB per accelerator, or more nodes" in said


WORDS = {
    "no plan for the money": (["--budget", "3"], "no plan: budget: 3.00 $/h is too little"),
    "no plan so fast": (["--throughput", "1e9"], "tokens/s is the most; ask for that or less"),
    "no money": (["--budget", "0"], "no plan: budget: 0.00 $/h is too little"),
    "less than no money": (["--budget=-1"], "--budget is -1; it must be"),
    "not a number": (["--throughput", "nan"], "--throughput is nan; it must be"),
    "two aims": (["--budget", "9", "--throughput", "9"], "not allowed with argument --budget"),
    "an unknown class": (["--add", "h21:2"], "add h21: neither a class nor an accelerator of the catalogue"),
    "no nodes": (["--add", "h20:0"], "--add h20:0: write NAME:NODES"),
    "more than there are": (["--remove", "h20:9"], "remove h20:9: too many nodes; class h20 has 6"),
    "no constants": (["--constants", "none.toml"], "none.toml cannot be read: No such file"),
    "no plan there": (["--verify", "none.json"], "--verify none.json cannot be read: No such file"),
    "verify and an aim": (["--verify", "none.json", "--budget", "9"], "--budget and --verify do not go together"),
    "verify and no money": (["--verify", "none.json", "--budget", "0"], "--budget and --verify do not go together"),
    "json and words": (["--json", "--explain"], "--json and --explain do not go together"),
    "no folder": (["--frontier", "no/where.html"], "--frontier no/where.html: the folder no does not exist"),
    "misspelt": (["--buget", "3"], "--buget: unknown option; did you mean --budget?"),
}


@pytest.mark.parametrize("words, line", WORDS.values(), ids=WORDS)
def test_wrong_words_are_one_line(refused, words, line):
    assert line in refused(CLUSTER, WORKLOAD, *words)


def test_swapped_files_are_told_apart(refused):
    assert "workload_hex_7b.toml: describes a workload; give the cluster's file first" in refused(WORKLOAD, CLUSTER)
    assert "cluster_hex_56.toml: describes a cluster; give the workload's file second" in refused(CLUSTER, CLUSTER)


def test_an_empty_file_is_answered_with_an_example_that_works(refused, capsys):
    Path("empty.toml").touch()
    cluster = refused("empty.toml", WORKLOAD).partition("for example ")[2].replace(" and ", "\n")
    workload = refused(CLUSTER, "empty.toml").partition("for example ")[2]
    workload = workload.replace(", batch", "\nbatch").replace(", prompt", "\nprompt").replace(" and ", "\n")
    Path("cluster.toml").write_text(cluster)
    Path("workload.toml").write_text(workload)
    assert told(capsys, "cluster.toml", "workload.toml").startswith("Rent ")


def test_files_that_are_not_there_are_one_line(refused):
    assert "nowhere.toml" in refused("nowhere.toml", WORKLOAD)
    assert "nowhere.toml" in refused(CLUSTER, "nowhere.toml")


@pytest.mark.full
def test_bound_0_is_explained(capsys):
    workload = edited("workload.toml", WORKLOAD_TEXT, ("max_staleness = 8", "max_staleness = 0"))
    assert "max_staleness = 0" in told(capsys, CLUSTER, workload)


def test_bound_0_without_a_plan_says_what_would_do(refused):
    workload = edited("workload.toml", WORKLOAD_TEXT, ("max_staleness = 8", "max_staleness = 0"))
    assert "tokens/s is the most; ask for that or less" in refused(CLUSTER, workload, "--throughput", "34000")


@pytest.mark.parametrize("cluster", sorted(EXAMPLES.glob("cluster_*.toml")), ids=lambda file: file.stem)
def test_every_cluster_of_the_examples_gets_a_plan(capsys, cluster):
    found = record.from_json(told(capsys, str(cluster), WORKLOAD, "--json"))
    assert found.step.tokens_per_s > 0


@pytest.mark.parametrize("workload", sorted(EXAMPLES.glob("workload_*.toml")), ids=lambda file: file.stem)
def test_every_workload_of_the_examples_gets_a_plan(capsys, workload):
    assert told(capsys, CLUSTER, str(workload)).startswith("Rent ")


def test_a_saved_plan_is_verified_and_a_corrupted_one_is_not(capsys):
    saved = told(capsys, CLUSTER, WORKLOAD, "--json", "--budget", "80")
    Path("plan.json").write_text(saved)
    assert told(capsys, CLUSTER, WORKLOAD, "--verify", "plan.json").startswith("everything holds")
    plan = json.loads(saved)
    for part, field, value in (("solution", "tau_s", 1.0), ("step", "price_per_h", 1.0), ("certificate", "gap", -0.5)):
        assert plan[part][field] != value
        Path("bad.json").write_text(json.dumps({**plan, part: {**plan[part], field: value}}))
        assert "do not hold" in told(capsys, CLUSTER, WORKLOAD, "--verify", "bad.json", status=1)
    assert "do not hold" in told(capsys, CLUSTER, WORKLOAD, "--add", "h20:1", "--verify", "plan.json", status=1)


def test_a_file_that_is_no_plan_is_refused(refused):
    for text in ("{}", "no json", "[]"):
        Path("plan.json").write_text(text)
        assert "plan.json is not a plan: " in refused(CLUSTER, WORKLOAD, "--verify", "plan.json")


def test_nodes_can_be_added_and_removed(capsys):
    many = record.from_json(told(capsys, CLUSTER, WORKLOAD, "--add", "h800:2", "--json"))
    few = record.from_json(told(capsys, CLUSTER, WORKLOAD, "--remove", "h20:4", "--remove", "h20", "--json"))
    assert many.rent["h800"] > 1
    assert few.rent == {"h800": 1, "h20": 1}
    assert few.step.tokens_per_s < many.step.tokens_per_s


@pytest.mark.full
def test_explain_tells_limits_places_and_assumptions(capsys):
    out = told(capsys, CLUSTER, WORKLOAD, "--budget", "80", "--explain")
    assert "budget +10%" in out
    assert "training stage 0: h800-0 cards 0 1 2 3 4 5 6 7" in out
    assert "of the cost model are defaults, never measured" in out
    brief = told(capsys, CLUSTER, WORKLOAD, "--budget", "80")
    assert "one more node of h800" in brief
    assert "max_staleness = 9" not in brief


@pytest.mark.full
def test_the_frontier_is_a_page_of_its_own(capsys):
    out = told(capsys, CLUSTER, WORKLOAD, "--frontier", "out.html")
    page = Path("out.html").read_text()
    assert "out.html: " in out
    assert page.startswith("<!doctype html>")
    assert all(f"{name} alone" in page for name in ("h800", "h20"))


def test_constants_change_the_plan_and_its_assumptions(capsys):
    Path("constants.toml").write_text("[of_accelerator.h20]\ntraining_share = 0.1\n")
    fitted = record.from_json(told(capsys, CLUSTER, WORKLOAD, "--json", "--constants", "constants.toml"))
    assert any("h20: 13 of 14 constants" in line for line in fitted.assumptions)
    Path("constants.toml").write_text("[of_accelerator.h20]\ntraining_shard = 0.1\n")
    assert main(["plan", CLUSTER, WORKLOAD, "--constants", "constants.toml"]) == 2
    assert "did you mean 'training_share'?" in capsys.readouterr().err


def test_lengths_come_from_a_runs_ledger(tmp_path, capsys):
    with Ledger(tmp_path / "ledger.sqlite", LedgerTerms(min_group=2, max_staleness=1)) as ledger:
        ledger.publish(version(0, 0))
        full_step(ledger, 0)
        rows = [(row.num_tokens, len(trajectory.prompt)) for row, trajectory in ledger.walk_trajectories()]
        ledger.admit(eval_groups(1, require_version=1))
        work(ledger, 1)
        assert len(list(ledger.walk_trajectories())) > len(rows), "held-out answers, which are not what is trained on"
    answers, prompts = zip(*rows, strict=True)
    assert tuple(trained_lengths(str(tmp_path), "answer")) == answers
    assert tuple(trained_lengths(str(tmp_path), "prompt")) == prompts
    with pytest.raises(UserError, match="holds no ledger"):
        trained_lengths(str(tmp_path / "none"), "answer")
    law = WORKLOAD_TEXT[WORKLOAD_TEXT.index("median") : WORKLOAD_TEXT.index("[algorithm]")]
    workload = edited("workload.toml", WORKLOAD_TEXT, (law, f'run = "{tmp_path}"\nlongest = 27648\n\n'))
    plan = record.from_json(told(capsys, CLUSTER, workload, "--json"))
    assert plan.assumptions[0] == f"answer: lengths of the run {tmp_path}"
    plan_tokens = plan.step.tokens_per_s * plan.step.tau_s
    assert plan_tokens == pytest.approx(512 * sum(answers) / len(answers))


@pytest.mark.full
def test_cards_that_take_turns_are_told_kept_and_verified(capsys):
    waits = edited("workload.toml", WORKLOAD_TEXT, ("max_staleness = 8", "max_staleness = 0"))
    assert "in turn" in told(capsys, CLUSTER, waits)
    Path("plan.json").write_text(told(capsys, CLUSTER, waits, "--json"))
    assert told(capsys, CLUSTER, waits, "--verify", "plan.json").startswith("everything holds")
    apart = edited("apart.toml", WORKLOAD_TEXT, ("max_staleness = 8", "max_staleness = 0\ncolocate = false"))
    assert "one of them is always idle" in told(capsys, CLUSTER, apart)
    assert "do not hold" in told(capsys, CLUSTER, apart, "--verify", "plan.json", status=1)


@pytest.mark.full
def test_planning_needs_no_torch():
    code = (
        "import sys; from offbeat.cli.main import main; "
        f"main(['plan', {CLUSTER!r}, {WORKLOAD!r}]); print(*{{'torch', 'transformers'}} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.startswith("Rent ")
    assert done.stdout.splitlines()[-1] == ""
