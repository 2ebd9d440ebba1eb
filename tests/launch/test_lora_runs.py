"""Whole runs that train adapters: what they learn, what they leave on disk, and what can be made of it."""

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import offbeat
from offbeat.cli.main import main
from offbeat.config import from_dict, load
from offbeat.engines.protocol import Request
from offbeat.errors import UserError
from offbeat.launch.model_parts import make_embedded
from offbeat.ledger.ledger import Ledger
from offbeat.model.loading import TINY_FOLDER, load_model, state_tensors
from offbeat.observability.metric_files import read_metrics
from offbeat.tools.doctor.probes import training_bytes
from offbeat.tools.export import export_run
from offbeat.trajectory import Sampling
from offbeat.weights.version import ADAPTER_CONFIG, ADAPTER_FILE, Version, base_digest, folder_digest, weights_digest

pytest.importorskip("peft")
CPU = torch.device("cpu")


def small(folder: Path, name: str, **sections) -> dict:
    config = {
        "run": {"dir": str(folder), "name": name, "steps": 3, "threads": 1},
        "model": {"lora_rank": 4, "device": "cpu"},
        "batch": {"groups_per_step": 3, "group_size": 4},
        "rollout": {"max_new_tokens": 12, "slots": 16},
        "optimizer": {"lr": 3e-3},
        "eval": {"every": 0},
        "log": {"console": "quiet"},
    }
    for section, values in sections.items():
        config[section] = {**config.get(section, {}), **values}
    return config


def latest(run: Path) -> Version:
    with Ledger(run / "ledger.sqlite", read_only=True) as ledger:
        assert ledger.verify().violations == ()
        return ledger.latest_version()


async def greedy(config, version: Version, prompts: list[list[int]]) -> list[list[int]]:
    engine = make_embedded(config, "w")
    try:
        await engine.load(version)
        sampling = Sampling(max_new_tokens=12, temperature=0.0)
        made = [
            await engine.generate(Request(f"{i}", torch.tensor(prompt).numpy(), 0, sampling))
            for i, prompt in enumerate(prompts)
        ]
        return [generation.segments[0].tokens.tolist() for generation in made]
    finally:
        await engine.close()


@pytest.mark.parametrize("mode", ["alternate", "overlap"])
def test_a_run_trains_adapters_alone_and_engine_and_trainer_agree(tmp_path, mode):
    config = small(tmp_path, mode, schedule={"mode": mode}, loss={"kl_coef": 0.01}, checkpoint={"every": 1})
    summary = offbeat.train(config).summary
    assert summary["steps"] == 3
    run = tmp_path / mode
    rows = [row for row in read_metrics(run / "metrics.jsonl") if "reward" in row]
    assert all(row["logprob_gap"] < 1e-4 for row in rows if row["logprob_gap"] is not None)
    assert rows[0]["kl"] == pytest.approx(0, abs=1e-6), "the first version is the base"
    assert rows[-1]["kl"] > 1e-5, "the adapters have moved away from the reference, which is the base"
    version = latest(run)
    base = load_model("offbeat-tiny", torch.float32, CPU)
    assert base_digest(version.path) == weights_digest(state_tensors(base)), "the base is as it was"
    assert folder_digest(version.path) == version.digest
    assert not list((run / "weights").rglob("model.safetensors"))
    assert all(".lora_" in name for name in load_file(version.path / ADAPTER_FILE))
    for file in (run / "checkpoints").rglob("*.safetensors"):
        assert {name for name in load_file(file) if ".lora_" not in name} == {"rng.cpu"}


@pytest.mark.full
def test_an_exact_run_in_two_parts_equals_one_in_a_piece(tmp_path):
    exact = {"exact": True, "seed": 3}
    offbeat.train(small(tmp_path, "whole", run={**exact, "steps": 4}))
    offbeat.train(small(tmp_path, "parts", run={**exact, "steps": 2}))
    offbeat.train(small(tmp_path, "parts", run={**exact, "steps": 4}), resume=tmp_path / "parts")
    assert latest(tmp_path / "whole").digest == latest(tmp_path / "parts").digest


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    offbeat.train(small(folder, "run", run={"steps": 4}, optimizer={"lr": 1e-2}))
    return folder / "run"


def test_the_exported_model_is_a_plain_one_whose_greedy_tokens_are_the_engines(trained, tmp_path):
    import asyncio

    assert export_run(trained, tmp_path / "merged") == 4
    assert not (tmp_path / "merged" / ADAPTER_CONFIG).exists()
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32).eval()
    plain = load_model("offbeat-tiny", torch.float32, CPU)
    assert state_tensors(model).keys() == state_tensors(plain).keys()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "merged")
    prompts = [tokenizer(f"{a}+{b}=")["input_ids"] for a, b in ((1, 2), (12, 30), (55, 9))]
    ours = asyncio.run(greedy(load(trained / "config.json"), latest(trained), prompts))
    for prompt, tokens in zip(prompts, ours, strict=True):
        made = model.generate(
            torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=None, use_cache=True
        )
        assert made[0, len(prompt) :].tolist() == tokens
    assert weights_digest(state_tensors(model)) != weights_digest(state_tensors(plain))


@pytest.mark.full
def test_the_command_line_says_where_the_adapter_lies_and_writes_it_alone(trained, tmp_path, capsys, monkeypatch):
    peft = pytest.importorskip("peft")
    assert main(["export", str(trained), str(tmp_path / "merged")]) == 0
    assert str(latest(trained).path) in capsys.readouterr().out
    assert main(["export", str(trained), str(tmp_path / "adapter"), "--adapter"]) == 0
    assert sorted(file.name for file in (tmp_path / "adapter").iterdir()) == [ADAPTER_CONFIG, ADAPTER_FILE]
    named = json.loads((tmp_path / "adapter" / ADAPTER_CONFIG).read_text())["base_model_name_or_path"]
    assert named == load(trained / "config.json").model.path
    theirs = peft.PeftModel.from_pretrained(load_model("offbeat-tiny", torch.float32, CPU), tmp_path / "adapter")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32).eval()
    tokens = torch.arange(3, 12)[None]
    with torch.no_grad():
        assert torch.allclose(theirs(tokens).logits, merged(tokens).logits, atol=1e-4)
    capsys.readouterr()
    assert main(["eval", str(tmp_path / "merged"), "--prompts", "2", "--json"]) == 0
    alone = capsys.readouterr().out
    monkeypatch.setitem(sys.modules, "peft", None)
    assert main(["eval", str(tmp_path / "merged"), "--prompts", "2", "--json", "--model.lora-rank=4"]) == 0
    assert capsys.readouterr().out == alone, "a merged model has no adapters, whatever it was trained with"


@pytest.mark.full
def test_a_checkpoint_on_another_base_or_of_another_kind_of_adapter_is_refused(tmp_path):
    model = tmp_path / "model"
    load_model("offbeat-tiny", torch.float32, CPU).save_pretrained(model)
    AutoTokenizer.from_pretrained(TINY_FOLDER).save_pretrained(model)
    config = small(tmp_path, "run", run={"steps": 1}, model={"path": str(model)})
    offbeat.train(config)
    (manifest,) = (tmp_path / "run" / "checkpoints").rglob("manifest.json")
    whole = manifest.read_text()

    def told_after(change) -> str:
        saved = json.loads(whole)
        change(saved)
        manifest.write_text(json.dumps(saved))
        with pytest.raises(UserError) as caught:
            offbeat.train(small(tmp_path, "run", run={"steps": 2}, model={"path": str(model)}), resume=tmp_path / "run")
        return str(caught.value)

    def with_rank(saved: dict) -> None:
        saved["adapter"]["config"] = saved["adapter"]["config"].replace('"r": 4', '"r": 8')

    assert "the checkpoint has model.lora_rank = 8, but the run has 4" in told_after(with_rank)
    assert "holds all weights, but an adapter would be trained" in told_after(lambda saved: saved.pop("adapter"))
    manifest.write_text(whole)
    other = load_model("offbeat-tiny", torch.float32, CPU)
    with torch.no_grad():
        next(other.parameters()).mul_(1.01)
    other.save_pretrained(model)
    assert "the adapter belongs to a model with digest" in told_after(lambda saved: None)


def test_sglang_is_refused_and_memory_is_counted_without_states_for_frozen_weights():
    with pytest.raises(UserError, match=r'rollout.engine = "sglang": .* with model.lora_rank'):
        from_dict({"model": {"lora_rank": 4}, "rollout": {"engine": "sglang", "workers": 1}})
    options = {"loss": {"kl_coef": 0.1}, "model": {"dtype": "float32"}}
    full = from_dict(options)
    lora = from_dict({**options, "model": {"dtype": "float32", "lora_rank": 4}})
    assert training_bytes(lora, 10**6, on_gpu=False) == {"weights": 4 * 10**6, "engine": 4 * 10**6}
    assert sum(training_bytes(full, 10**6, on_gpu=False).values()) == (16 + 2 * 4) * 10**6
