"""One rank of a benchmark: trains a random model on random answers, and tells what came out of it as JSON.

`python -m benchmarks.ranks.one_rank TASK.json OUT.json`, with torchrun's environment variables for several ranks.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from offbeat.model.devices import be_deterministic
from offbeat.model.loading import load_model, load_without_weights
from offbeat.model.lora import AdapterDisabled, Lora, attach
from offbeat.trainer.advantages import GaeSettings
from offbeat.trainer.checkpoint import Checkpoints
from offbeat.trainer.microbatch_size import MicrobatchSize
from offbeat.trainer.packing import Sample
from offbeat.trainer.policy import AdamSettings, Policy
from offbeat.trainer.ranks import Gang, RankPlace, join_gang, meet
from offbeat.trainer.step import StepSettings, train_step
from offbeat.trainer.trainer import OneRank
from offbeat.weights.divided import DividedTensors
from offbeat.weights.piece_store import FolderStore
from offbeat.weights.publish import Publisher
from offbeat.weights.signing import SigningKey
from offbeat.weights.version import weights_digest

WITHIN_S = 300.0


@dataclass(frozen=True)
class Task:
    """Task of all ranks: training steps `first` to `last` of a model."""

    last: int
    first: int = 0
    exact: bool = True
    lora: bool = False
    value_head: bool = False
    updates_per_step: int = 1
    width: int = 64
    layers: int = 2
    vocabulary: int = 512
    dtype: str = "float32"
    device: str = "cpu"
    tokens_per_microbatch: int = 256
    groups: int = 4
    group_size: int = 4
    prompt: int = 16
    median: int = 48
    longest: int = 192
    folder: str | None = None
    """Folder of checkpoints: step `first` is loaded from it, step `last` saved; None: neither."""
    path: str | None = None
    """Folder of the model; None: a random model of the size above."""
    publishes: str | None = None
    """Folder into which a version is published after the last step, and after one step more; None: none is."""
    in_gang: bool = False
    """Whether a single rank uses FSDP2, too."""


def main(task: Task) -> dict[str, Any]:
    torch.set_num_threads(1)
    device = torch.device(task.device)
    if task.exact:
        be_deterministic(device)
    gang = _gang(device, task)
    if gang is not None:
        import offbeat.trainer.sharded  # noqa: F401 - which takes memory of its own
    _forget_peak()
    before = _peak_bytes()
    policy = _policy(task, device, gang)
    loaded = _peak_bytes()
    _forget_peak()
    settings = StepSettings(
        updates_per_step=task.updates_per_step,
        tokens_per_microbatch=task.tokens_per_microbatch,
        gae=GaeSettings() if task.value_head else None,
        kl_coef=0.1 if task.lora else 0.0,
    )
    reference: Any = AdapterDisabled(policy.model) if task.lora else None
    parts = (policy, reference, settings, MicrobatchSize(task.tokens_per_microbatch), _checkpoints(task))
    if task.first:
        _load(gang, parts, task.first)
    seconds, tokens, rows = [], [], []
    for step in range(task.first, task.last):
        samples = samples_of(task, step)
        if gang is not None:
            gang.gather(b"")
        began_s = time.perf_counter()
        rows.append(train_step(policy, samples, settings, 1e-3, reference))
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - began_s)
        tokens.append(sum(sample.num_tokens for sample in samples))
    trained = _peak_bytes()
    _forget_peak()
    if task.folder:
        _save(gang, parts, task.last)
    saved = _peak_bytes()
    _forget_peak()
    versions = _publish(task, gang, parts) if task.publishes else []
    published = dict(policy.published)
    told = {
        "digest": weights_digest(published) if published else "",
        "norms": [row.grad_norm for row in rows],
        "losses": [row.loss for row in rows],
        "seconds": seconds,
        "tokens": tokens,
        "peak_bytes": {"start": before, "load": loaded, "train": trained, "save": saved, "publish": _peak_bytes()},
        "versions": versions,
        "held_bytes": sum(master.nbytes for master in policy.masters),
    }
    if gang is not None:
        gang.end()
    return told


def samples_of(task: Task, step: int) -> list[Sample]:
    rng = np.random.default_rng(step)
    samples = []
    for group in range(task.groups):
        prompt = rng.integers(0, task.vocabulary, task.prompt)
        for _ in range(task.group_size):
            length = int(min(max(rng.lognormal(np.log(task.median), 0.8), 2), task.longest))
            response = rng.integers(0, task.vocabulary, length)
            logprobs = np.full(length, -np.log(task.vocabulary), np.float32)
            samples.append(Sample(group, prompt, response, logprobs, np.ones(length, bool), float(rng.random())))
    return samples


def _gang(device: torch.device, task: Task) -> Gang | None:
    place = RankPlace.of(os.environ)
    if place is None and task.in_gang:
        place = RankPlace(0, 1, 0, 1, "127.0.0.1", int(os.environ["MASTER_PORT"]))
    if place is None:
        return None
    return join_gang(place, meet(place, WITHIN_S), device, timeout_s=WITHIN_S, lost_after_s=60.0)


def _policy(task: Task, device: torch.device, gang: Gang | None) -> Policy:
    if task.path is not None:
        return _policy_from_file(task, device, gang)
    model = make_model(task)
    options: dict[str, Any] = {"has_value_head": task.value_head, "exact": task.exact}
    if gang is None:
        model.to(device)  # type: ignore[arg-type]
        return Policy(model, AdamSettings(), **options)
    from offbeat.trainer.sharded import ShardedPolicy

    return ShardedPolicy(model, AdamSettings(), **options, gang=gang)


def _policy_from_file(task: Task, device: torch.device, gang: Gang | None) -> Policy:
    assert task.path is not None
    dtype = getattr(torch, task.dtype)
    if gang is None:
        return Policy(load_model(task.path, dtype, device), AdamSettings(), exact=task.exact)
    from offbeat.trainer.sharded import ShardedPolicy

    model = load_without_weights(task.path, dtype)
    assert model is not None
    return ShardedPolicy(model, AdamSettings(), exact=task.exact, gang=gang, path=task.path)


def make_model(task: Task) -> PreTrainedModel:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=task.vocabulary,
        hidden_size=task.width,
        intermediate_size=3 * task.width,
        num_hidden_layers=task.layers,
        num_attention_heads=max(task.width // 64, 2),
        num_key_value_heads=max(task.width // 128, 1),
        max_position_embeddings=4096,
        tie_word_embeddings=True,
    )
    model = Qwen2ForCausalLM(config).to(getattr(torch, task.dtype)).eval()
    model.config.use_cache = False
    if task.lora:
        attach(model, Lora(8, 16.0), seed=1)
    return model


def _checkpoints(task: Task) -> Any:
    return Checkpoints(Path(task.folder), keep=100) if task.folder else None


def _load(gang: Gang | None, parts: tuple[Any, ...], step: int) -> None:
    if gang is None:
        OneRank(*parts).load(step)
        return
    from offbeat.trainer.gang import Rank

    Rank(gang, *parts).load_rows(step)


def _save(gang: Gang | None, parts: tuple[Any, ...], step: int) -> None:
    if gang is None:
        OneRank(*parts).begin_save(step, step)[0]()
        return
    from offbeat.trainer.gang import Rank

    rank = Rank(gang, *parts)
    own = str(rank.checkpoints.begin_rows(step)) if gang.rank == 0 else ""
    draft = Path(gang.gather(own.encode())[0].decode())
    rank.save_rows(draft)
    if gang.rank == 0:
        rank.checkpoints.finish_rows(draft, step, step, gang.size, WITHIN_S)
    gang.gather(b"")


def _publish(task: Task, gang: Gang | None, parts: tuple[Any, ...]) -> list[dict[str, Any]]:
    """Publishes two versions, with a step between them; returns digest, coded bytes and seconds of each, on rank 0."""
    assert task.publishes is not None
    policy, reference, settings, _, _ = parts
    folder, versions = Path(task.publishes), []
    publisher = Publisher(folder, FolderStore(folder), SigningKey.load_or_create(folder.with_suffix(f".{os.getpid()}")))
    for number in range(2):
        if number:
            train_step(policy, samples_of(task, task.last), settings, 1e-6, reference)
        began_s = time.perf_counter()
        tensors = policy.published if gang is None else _divided(gang, parts, folder)
        taken_s = time.perf_counter() - began_s
        if tensors is not None:
            version = publisher.write(number, number, number - 1 if number else None, tensors)
            figures = publisher.figures
            assert figures is not None
            coded = sum(figures.coded_bytes.values())
            seconds = {"stands_still_s": taken_s, "whole_s": time.perf_counter() - began_s}
            versions.append({"digest": version.digest, "coded_bytes": coded, "num_bytes": figures.num_bytes, **seconds})
        if gang is not None:
            gang.gather(b"")
    return versions


def _divided(gang: Gang, parts: tuple[Any, ...], folder: Path) -> DividedTensors | None:
    from offbeat.trainer.gang import Rank

    if gang.rank == 0:
        inbox = folder / f".ranks-{time.monotonic_ns()}"
        inbox.mkdir(parents=True)
        gang.gather(str(inbox).encode())
        shapes, own = parts[0].own_parts()
        return DividedTensors(shapes, own, inbox, gang.size, WITHIN_S)
    Rank(gang, *parts, store=FolderStore(folder)).serve_weights(Path(gang.gather(b"")[0].decode()))
    return None


def _peak_bytes() -> int:
    """Returns the largest resident memory of this process since its start, or since `_forget_peak`: all pages, those of
    libraries and of mapped files, too. (The peak that getrusage tells begins with that of the parent process.)"""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


def _forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


if __name__ == "__main__":
    given, out = map(Path, sys.argv[1:])
    out.write_text(json.dumps(main(Task(**json.loads(given.read_text())))))
