"""Writes a run's newest published weights as a Hugging Face folder, with an adapter merged into its base; or writes the
adapter alone, in peft's format.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors.torch import load_file
from torch import Tensor

from offbeat.config import load
from offbeat.errors import OffbeatError, UserError
from offbeat.files import fsync_file, replace_folder
from offbeat.launch import stopping, wiring
from offbeat.launch.run_folder import CONFIG, stored_config
from offbeat.ledger.ledger import Ledger
from offbeat.weights.download import StoreSources
from offbeat.weights.receive import Receiver
from offbeat.weights.version import (
    ADAPTER_CONFIG,
    ADAPTER_FILE,
    FILE_NAME,
    Version,
    WeightFolder,
    base_digest,
    verify,
    weights_file,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def export_run(run: Path, folder: Path, *, adapter_alone: bool = False) -> int:
    """Writes the newest weights of `run` to the new folder `folder`, in the published dtype, and returns their step.
    With `adapter_alone`, writes only the adapter, in peft's format."""
    stored_config(run)
    folder = folder.expanduser()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder}: exists already and is not an empty folder; name a new folder or remove it first")
    version, signers = _latest_version(run)
    with tempfile.TemporaryDirectory(prefix="offbeat-export-") as scratch:
        here = _whole(run, version, signers, Path(scratch))
        (_write_adapter if adapter_alone else _write)(run, here, folder)
    return version.step


def adapter_folder(run: Path) -> Path | None:
    """Returns the folder of a run's newest adapter. Returns None if the run trains all weights, or if the adapter is
    stored only in pieces, as a remote trainer sends it."""
    folder = WeightFolder(run / "weights").path(_latest_version(run)[0].number)
    return folder if (folder / ADAPTER_FILE).is_file() else None


def _latest_version(run: Path) -> tuple[Version, list[str]]:
    """Returns a run's newest version of the weights, and the public keys of trainers that may sign its manifest."""
    file = run / "ledger.sqlite"
    version, signers = None, list[str]()
    if file.is_file():
        with Ledger(file, read_only=True) as ledger, ledger.naming_damage():
            version, signers = ledger.latest_version(), ledger.signers()
    if version is None:
        raise UserError(f"{run}: has published no weights yet; train at least one step first")
    return version, signers


def _whole(run: Path, version: Version, signers: Sequence[str], scratch: Path) -> Version:
    """Returns the version with the path of a folder that holds its complete weights. If a remote trainer sent them in
    pieces, they are assembled in `scratch`."""
    folder = WeightFolder(run / "weights").path(version.number)
    if folder.is_dir() or not version.manifest:
        return replace(version, path=folder)
    store = wiring.open_pieces(load(run / CONFIG), run / "weights")
    return stopping.run(Receiver(scratch, StoreSources(store), signers).fetch(version))


def _write(run: Path, version: Version, folder: Path) -> None:
    import torch
    from safetensors import SafetensorError

    from offbeat.model.loading import load_model, load_state, load_tokenizer, save_hf

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
        raise OffbeatError(f"{folder}: cannot be written: {reason}; fix that and try again") from error


def _merge(model: PreTrainedModel, version: Version, adapter: dict[str, Tensor], path: str) -> None:
    """Loads the base of an adapter into `model`, checks the digest of the base, and merges the adapter into it."""
    from offbeat.model.loading import load_state, state_tensors
    from offbeat.model.lora import merge
    from offbeat.weights.version import weights_digest

    wanted = base_digest(version.path)
    if version.base is not None:
        load_state(model, load_file(version.base / FILE_NAME))
    if (found := weights_digest(state_tensors(model))) != wanted:
        raise UserError(
            f"model.path = {path!r}: its weights have digest {found[:12]}, but the adapter of version {version.number} "
            f"was trained on weights with digest {wanted:.12}; restore the model that the run began with"
        )
    merge(model, adapter, json.loads((version.path / ADAPTER_CONFIG).read_text(encoding="utf-8")))


def _write_adapter(run: Path, version: Version, folder: Path) -> None:
    verify(version)
    if base_digest(version.path) is None:
        raise UserError(f"{run}: trained all weights, so there is no adapter; leave out --adapter")
    config = json.loads((version.path / ADAPTER_CONFIG).read_text(encoding="utf-8"))
    config["base_model_name_or_path"] = load(run / CONFIG).model.path
    folder = folder.absolute()
    draft = folder.with_name(f".{folder.name}.{os.getpid()}.draft")
    try:
        draft.mkdir(parents=True)
        shutil.copyfile(version.path / ADAPTER_FILE, draft / ADAPTER_FILE)
        (draft / ADAPTER_CONFIG).write_text(json.dumps(config, indent=1), encoding="utf-8")
        for file in draft.iterdir():
            fsync_file(file)
        replace_folder(draft, folder)
    except OSError as error:
        raise OffbeatError(f"{folder}: cannot be written: {error.strerror}; fix that and try again") from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def read(version: Version) -> dict[str, Tensor]:
    """Reads the tensors of a version. Raises `WeightsError` if their digest differs from the published digest."""
    verify(version)
    return load_file(weights_file(version.path))
