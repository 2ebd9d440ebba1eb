"""Writes a run's newest published weights as a Hugging Face folder."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from offbeat.config import load
from offbeat.errors import UserError
from offbeat.launch.folder import CONFIG, stored_config
from offbeat.ledger.ledger import Ledger
from offbeat.model.loading import load_model, load_state, load_tokenizer, save_hf
from offbeat.weights.store import WeightStore, read


def export_run(run: Path, folder: Path) -> int:
    """Exports to a new folder, in the dtype that was published; returns the step of the weights."""
    stored_config(run)
    config = load(run / CONFIG)
    with Ledger(run / "ledger.sqlite", read_only=True) as ledger:
        version = ledger.latest_version()
    if version is None:
        raise UserError(f"{run}: has published no weights yet; train at least one step first")
    tensors = read(replace(version, path=WeightStore(run / "weights").path(version.number)))
    model = load_model(config.model.path, next(iter(tensors.values())).dtype, torch.device("cpu"))
    load_state(model, tensors)
    tokenizer = load_tokenizer(config.model.tokenizer or config.model.path, config.model.chat_template)
    save_hf(model, tokenizer, folder)
    return version.step
