"""Writes a run's newest published weights as a Hugging Face folder."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from offbeat.config import load
from offbeat.errors import OffbeatError, UserError
from offbeat.launch.folder import CONFIG, stored_config
from offbeat.ledger.ledger import Ledger
from offbeat.weights.version import Version


def export_run(run: Path, folder: Path) -> int:
    """Exports to a new folder, in the dtype that was published; returns the step of the weights."""
    stored_config(run)
    folder = folder.expanduser()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder}: is there already; name a new folder or remove it first")
    version = _latest_version(run)
    _write(run, version, folder)
    return version.step


def _latest_version(run: Path) -> Version:
    file = run / "ledger.sqlite"
    version = None
    if file.is_file():
        with Ledger(file, read_only=True) as ledger, ledger.naming_damage():
            version = ledger.latest_version()
    if version is None:
        raise UserError(f"{run}: has published no weights yet; train at least one step first")
    return version


def _write(run: Path, version: Version, folder: Path) -> None:
    import torch
    from safetensors import SafetensorError

    from offbeat.model.loading import load_model, load_state, load_tokenizer, save_hf
    from offbeat.weights.store import WeightStore, read

    config = load(run / CONFIG)
    tensors = read(replace(version, path=WeightStore(run / "weights").path(version.number)))
    model = load_model(config.model.path, next(iter(tensors.values())).dtype, torch.device("cpu"))
    load_state(model, tensors)
    tokenizer = load_tokenizer(config.model.tokenizer or config.model.path, config.model.chat_template)
    try:
        save_hf(model, tokenizer, folder)
    except (OSError, SafetensorError) as error:
        reason = " ".join(str(error).split())
        raise OffbeatError(f"{folder}: cannot be written: {reason}; mend that and try again") from error
