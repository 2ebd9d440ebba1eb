"""The page about weights between machines is true: trainer and workers with disks of their own, of one site."""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import torch
from doc_reader import ROOT, blocks
from terminals import SMALL, Terminals

from offbeat.model.loading import load_model, load_tokenizer

pytestmark = pytest.mark.full
(JOIN,) = [line for block in blocks(ROOT / "docs" / "weights.md", "sh") for line in block.splitlines()]
(SERVE, TRAINER) = blocks(ROOT / "docs" / "swarm.md", "sh")[-1].splitlines()
BF16 = "--model.dtype=bfloat16 --loss.max-logprob-gap=10 --optimizer.lr=1e-5"
FIGURE = re.compile(r'offbeat_worker_weights_total{worker="(.*)",figure="(.*)"} (.*)')


def figures(url: str) -> dict[tuple[str, str], float]:
    """What the workers told of themselves; nothing while nobody listens."""
    try:
        with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
            return {(worker, name): float(value) for worker, name, value in FIGURE.findall(answer.read().decode())}
    except (urllib.error.URLError, ConnectionError):
        return {}


ADAPTERS = "--model.lora-rank=4 --optimizer.lr=3e-3 --weights.deltas=always"


def test_adapters_reach_workers_with_disks_of_their_own_and_the_base_only_those_that_have_another(terminals: Terminals):
    """One worker has the run's model; the other has one of the same shape with other weights."""
    pytest.importorskip("peft")
    model = load_model("offbeat-tiny", torch.float32, torch.device("cpu"))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.3)
    model.save_pretrained(terminals.folder / "other")
    load_tokenizer("offbeat-tiny").save_pretrained(terminals.folder / "other")
    serve = terminals.start(SERVE, SMALL, ADAPTERS, "--run.steps=40 --serve.port", terminals.port)
    run = terminals.folder / "runs" / "swarm"
    terminals.until("the coordinator listens", lambda: (run / "serve.json").is_file())
    trainer = terminals.start(TRAINER)
    join = JOIN.partition(" --site")[0]
    same = terminals.start(join, "--fetch-weights --name same")
    other = terminals.start(join, "--fetch-weights --name other --model.path other")
    windows = (serve, trainer, same, other)
    assert [terminals.wait(window) for window in windows] == [0, 0, 0, 0], terminals.screen()
    assert "everything holds" in terminals.say("offbeat ledger verify runs/swarm")
    steps = [row for row in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()) if "reward" in row]
    assert {row["weights_kind"] for row in steps} == {"adapter"}
    base = (terminals.folder / "other" / "model.safetensors").stat().st_size
    assert all(row["weights_bytes"] < 0.06 * base for row in steps)
    assert all(row["logprob_gap"] < 1e-4 for row in steps if row["logprob_gap"] is not None)
    assert sum(row["left_out"] for row in steps) == 0, "somebody served the adapters on another base"
    kept = {
        name: {path.name for path in folder_of(terminals, name).rglob("*.safetensors")} for name in ("same", "other")
    }
    assert kept == {"same": {"adapter_model.safetensors"}, "other": {"adapter_model.safetensors", "model.safetensors"}}
    told = json.loads(terminals.say("offbeat ledger show runs/swarm --json"))
    assert {producer["worker"] for producer in told["producers"]} == {"same", "other"}
    assert terminals.say("offbeat export runs/swarm merged")


def folder_of(terminals: Terminals, worker: str) -> Path:
    (found,) = [path for path in (terminals.folder / "cache").rglob("weights") if worker in str(path.parent)]
    return found


def test_versions_reach_workers_with_disks_of_their_own_as_what_changed(terminals: Terminals):
    # With a checkpoint each step, no version is written behind the next step, and each row tells of its own version.
    serve = terminals.start(SERVE, SMALL, BF16, "--run.steps=30 --checkpoint.every=1 --serve.port", terminals.port)
    run = terminals.folder / "runs" / "swarm"
    terminals.until("the coordinator listens", lambda: (run / "serve.json").is_file())
    trainer = terminals.start(TRAINER)
    workers = [terminals.start(JOIN, "--fetch-weights --name", name) for name in ("one", "two")]
    seen: dict[tuple[str, str], float] = {}

    def is_over() -> bool:
        seen.update(figures(f"http://127.0.0.1:{terminals.port}"))
        return serve.poll() is not None

    terminals.until("the run ends", is_over)
    assert [terminals.wait(window) for window in (serve, trainer, *workers)] == [0, 0, 0, 0], terminals.screen()
    assert "everything holds" in terminals.say("offbeat ledger verify runs/swarm")
    steps = [row for row in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()) if "reward" in row]
    kinds = [row["weights_kind"] for row in steps]
    assert kinds[:20] == (["delta"] * 9 + ["full"]) * 2, kinds
    deltas = [row for row in steps if row["weights_kind"] == "delta"]
    assert all(0 < row["weights_density"] < 0.2 and row["weights_bytes"] < 200_000 for row in deltas)
    assert terminals.say("offbeat export runs/swarm model")
    model = terminals.folder / "model" / "model.safetensors"
    told = [name for name in ("one", "two") if ("delta_bytes" in {figure for worker, figure in seen if worker == name})]
    assert told, seen  # a worker tells with its heartbeats, which one that had little to do may not have come to
    for name in told:
        assert seen[name, "versions"] >= 2
        assert seen[name, "full_bytes"] < model.stat().st_size, "more than the first version came whole"
        assert seen[name, "still_s"] > 0
