"""Writes a run's newest published weights as a Hugging Face folder, an adapter merged into what it stands on; or an
adapter alone, as peft has it."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from offbeat.config import load
from offbeat.errors import OffbeatError, UserError
from offbeat.files import fsync_file, replace_folder
from offbeat.launch import stopping, wiring
from offbeat.launch.folder import CONFIG, stored_config
from offbeat.ledger.ledger import Ledger
from offbeat.weights.adapter import base_digest
from offbeat.weights.folder import ADAPTER_CONFIG, ADAPTER_FILE, FILE_NAME, WeightFolder
from offbeat.weights.receive import Receiver
from offbeat.weights.sources import StoreSources
from offbeat.weights.verify import verify
from offbeat.weights.version import Version

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel


def export_run(run: Path, folder: Path, *, adapter_alone: bool = False) -> int:
    """Exports to a new folder, in the dtype that was published; returns the step of the weights."""
    stored_config(run)
    folder = folder.expanduser()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder}: is there already; name a new folder or remove it first")
    version, signers = _latest_version(run)
    with tempfile.TemporaryDirectory(prefix="offbeat-export-") as scratch:
        here = _whole(run, version, signers, Path(scratch))
        (_write_adapter if adapter_alone else _write)(run, here, folder)
    return version.step


def adapter_folder(run: Path) -> Path | None:
    """Where the newest adapter of a run lies; None where all weights were trained, or it lies in pieces."""
    place = WeightFolder(run / "weights").path(_latest_version(run)[0].number)
    return place if (place / ADAPTER_FILE).is_file() else None


def _latest_version(run: Path) -> tuple[Version, list[str]]:
    """With the keys that its manifest may be signed with."""
    file = run / "ledger.sqlite"
    version, signers = None, list[str]()
    if file.is_file():
        with Ledger(file, read_only=True) as ledger, ledger.naming_damage():
            version, signers = ledger.latest_version(), ledger.signers()
    if version is None:
        raise UserError(f"{run}: has published no weights yet; train at least one step first")
    return version, signers


def _whole(run: Path, version: Version, signers: Sequence[str], scratch: Path) -> Version:
    """The version, with its whole file: what a trainer elsewhere sent in pieces is put together in `scratch`."""
    place = WeightFolder(run / "weights").path(version.number)
    if place.is_dir() or not version.manifest:
        return replace(version, path=place)
    store = wiring.open_pieces(load(run / CONFIG), run / "weights")
    return stopping.run(Receiver(scratch, StoreSources(store), signers).fetch(version))


def _write(run: Path, version: Version, folder: Path) -> None:
    import torch
    from safetensors import SafetensorError

    from offbeat.model.loading import load_model, load_state, load_tokenizer, save_hf
    from offbeat.weights.store import read

    config = load(run / CONFIG)
    tensors = read(version)
    model = load_model(config.model.path, next(iter(tensors.values())).dtype, torch.device("cpu"))
    if base_digest(version.path) is None:
        load_state(model, tensors)
    else:
        _merge(model, version, tensors, config.model.path)
    tokenizer = load_tokenizer(config.model.tokenizer or config.model.path, config.model.chat_template)
    try:
        save_hf(model, tokenizer, folder)
    except (OSError, SafetensorError) as error:
        reason = " ".join(str(error).split())
        raise OffbeatError(f"{folder}: cannot be written: {reason}; mend that and try again") from error


def _merge(model: PreTrainedModel, version: Version, adapter: dict[str, Tensor], path: str) -> None:
    """Adds a version's adapter to the weights that it stands on."""
    from safetensors.torch import load_file

    from offbeat.model.loading import load_state, state_tensors
    from offbeat.model.lora import merge
    from offbeat.weights.digest import weights_digest

    wanted = base_digest(version.path)
    if version.base is not None:
        load_state(model, load_file(version.base / FILE_NAME))
    if (found := weights_digest(state_tensors(model))) != wanted:
        raise UserError(
            f"model.path = {path!r}: has digest {found[:12]}, and the adapter of version {version.number} stands on "
            f"{wanted:.12}; put the model there that the run began with"
        )
    merge(model, adapter, json.loads((version.path / ADAPTER_CONFIG).read_text(encoding="utf-8")))


def _write_adapter(run: Path, version: Version, folder: Path) -> None:
    verify(version)
    if base_digest(version.path) is None:
        raise UserError(f"{run}: trained all weights, so there is no adapter; leave out --adapter")
    told = json.loads((version.path / ADAPTER_CONFIG).read_text(encoding="utf-8"))
    told["base_model_name_or_path"] = load(run / CONFIG).model.path
    folder = folder.absolute()
    draft = folder.with_name(f".{folder.name}.{os.getpid()}.draft")
    try:
        draft.mkdir(parents=True)
        shutil.copyfile(version.path / ADAPTER_FILE, draft / ADAPTER_FILE)
        (draft / ADAPTER_CONFIG).write_text(json.dumps(told, indent=1), encoding="utf-8")
        for file in draft.iterdir():
            fsync_file(file)
        replace_folder(draft, folder)
    except OSError as error:
        raise OffbeatError(f"{folder}: cannot be written: {error.strerror}; mend that and try again") from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)
