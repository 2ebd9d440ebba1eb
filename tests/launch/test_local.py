"""Whole runs of the shipped model, small enough to be quick."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import offbeat
from offbeat.cli.main import main
from offbeat.config import from_dict
from offbeat.errors import UserError
from offbeat.launch import wiring
from offbeat.ledger.ledger import Ledger
from offbeat.observability.metric_files import read_metrics
from offbeat.tools.evaluate import evaluate
from offbeat.tools.export import export_run, read


def small(folder: Path, name: str, **sections) -> dict:
    config = {
        "run": {"dir": str(folder), "name": name, "steps": 3, "threads": 1},
        "batch": {"groups_per_step": 3, "group_size": 4},
        "rollout": {"max_new_tokens": 12, "slots": 16},
        "optimizer": {"lr": 1e-4},
        "eval": {"every": 2, "prompts": 5},
        "log": {"console": "quiet"},
    }
    for section, values in sections.items():
        config[section] = {**config.get(section, {}), **values} if isinstance(values, dict) else values
    return config


def test_a_run_leaves_everything_a_person_asks_for(tmp_path):
    summary = offbeat.train(small(tmp_path, "first")).summary
    run = tmp_path / "first"
    assert json.loads((run / "summary.json").read_text()) == summary
    assert summary["steps"] == 3
    assert summary["trajectories"] == {"accepted": 36, "trained": 36, "waiting": 0, "dropped": 0}
    assert summary["max_staleness_trained"] == 0
    assert summary["versions"] == 4
    rows = read_metrics(run / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert [row["step"] for row in rows if "eval_mean@1" in row] == [0, 2, 3]
    assert all(row["logprob_gap"] < 1e-4 for row in rows if "reward" in row)
    assert all(row["time_generate_s"] > 0 for row in rows if "reward" in row)
    with Ledger(run / "ledger.sqlite", read_only=True) as ledger:
        assert ledger.verify().violations == ()
        version = ledger.latest_version()

    assert export_run(run, tmp_path / "exported") == 3
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "exported", dtype=torch.float32)
    for name, tensor in read(version).items():
        assert torch.equal(exported.state_dict()[name], tensor), name
    assert AutoTokenizer.from_pretrained(tmp_path / "exported").decode([52, 50]) == "42"


@pytest.mark.full
def test_a_finished_run_goes_on_for_more_steps(tmp_path):
    offbeat.train(small(tmp_path, "longer"))
    summary = offbeat.train(small(tmp_path, "longer", run={"steps": 5}), resume=tmp_path / "longer").summary
    assert summary["steps"] == 5
    assert summary["trajectories"]["trained"] == 60
    rows = read_metrics(tmp_path / "longer" / "metrics.jsonl")
    assert [row["attempt"] for row in rows if "reward" in row] == [1, 1, 1, 2, 2]


def test_a_run_in_two_parts_equals_one_in_a_piece(tmp_path):
    exact = {"exact": True, "seed": 3}
    offbeat.train(small(tmp_path, "whole", run={**exact, "steps": 4}))
    offbeat.train(small(tmp_path, "parts", run={**exact, "steps": 2}))
    offbeat.train(small(tmp_path, "parts", run={**exact, "steps": 4}), resume=tmp_path / "parts")
    digests = []
    for name in ("whole", "parts"):
        with Ledger(tmp_path / name / "ledger.sqlite", read_only=True) as ledger:
            digests.append(ledger.latest_version().digest)
    assert digests[0] == digests[1]


@pytest.mark.full
def test_several_updates_a_reference_and_checkpointed_gradients_run(tmp_path):
    summary = offbeat.train(
        small(
            tmp_path,
            "rich",
            batch={"groups_per_step": 4, "updates_per_step": 2},
            loss={"kl_coef": 0.1},
            model={"gradient_checkpointing": True},
            optimizer={"schedule": "cosine", "warmup_steps": 1},
        )
    ).summary
    rows = read_metrics(tmp_path / "rich" / "metrics.jsonl")
    assert summary["steps"] == 3
    assert rows[-1]["kl"] > 0
    assert rows[-1]["num_microbatches"] == 2


def test_sources_are_mixed_by_weight_and_told_apart_in_the_metrics(tmp_path):
    tasks = [{"source": "arithmetic", "level": 1}, {"source": "arithmetic", "level": 2, "weight": 2.0}]
    offbeat.train(small(tmp_path, "mixed", task=tasks))
    row = read_metrics(tmp_path / "mixed" / "metrics.jsonl")[-1]
    assert {"reward/arithmetic", "reward/arithmetic-2", "eval/arithmetic_mean@1"} <= row.keys()
    with Ledger(tmp_path / "mixed" / "ledger.sqlite", read_only=True) as ledger:
        assert ledger.cursor().drawn == {"arithmetic": 3, "arithmetic-2": 6}


def test_bfloat16_weights_train_too(tmp_path):
    summary = offbeat.train(small(tmp_path, "half", model={"dtype": "bfloat16"})).summary
    assert summary["steps"] == 3
    with Ledger(tmp_path / "half" / "ledger.sqlite", read_only=True) as ledger:
        assert {tensor.dtype for tensor in read(ledger.latest_version()).values()} == {torch.bfloat16}


def test_another_chat_template_on_resume_is_refused(tmp_path):
    template = tmp_path / "template.jinja"
    template.write_text("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    chat = {"model": {"chat_template": str(template)}}
    offbeat.train(small(tmp_path, "chat", **chat))
    template.write_text("{% for m in messages %}> {{ m['content'] }}{% endfor %}")
    with pytest.raises(UserError, match=r"model\.chat_template: the run began with"):
        offbeat.train(small(tmp_path, "chat", run={"steps": 4}, **chat), resume=tmp_path / "chat")


def test_evaluation_of_a_model_gives_mean_and_pass_at_k():
    config = from_dict({"eval": {"prompts": 40, "samples": 4}, "run": {"threads": 1}})
    figures = evaluate(config, wiring.make_mixture(config))
    assert figures["eval_prompts"] == 40
    assert figures["eval_failed"] == 0
    assert 0.1 < figures["eval_mean@4"] < 0.6
    assert figures["eval_mean@4"] < figures["eval_pass@4"] <= 1.0


@pytest.mark.full
def test_a_copied_run_goes_on_elsewhere_without_its_original(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    offbeat.train(small(Path("runs"), "a"))
    shutil.copytree("runs/a", "elsewhere/b")
    shutil.rmtree("runs")
    (tmp_path / "elsewhere" / "b" / "metrics.jsonl").open("ab").write(b"\xff\x00 no row\n")
    assert main(["train", "--resume", "--name=b", "--run.dir=elsewhere", "--run.steps=5"]) == 0
    assert main(["ledger", "verify", "elsewhere/b"]) == 0
    assert main(["export", "elsewhere/b", "exported"]) == 0
    stored = json.loads(Path("elsewhere/b/config.json").read_text())
    assert stored["run"]["name"] == "b"
    assert json.loads(Path("elsewhere/b/summary.json").read_text())["steps"] == 5
