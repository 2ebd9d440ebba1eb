"""Checkpoints: masters, moments, random state and step; nothing that the ledger knows.

A checkpoint is a folder of per-rank files and a manifest, written beside its place, flushed and renamed: it is whole or
not there, and an earlier one stays untouched until a later one is on disk. Files carry their digests, so a damaged one
is refused by name instead of being trained from.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from blake3 import blake3
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from offbeat.errors import OffbeatError, UserError
from offbeat.files import fsync_file, replace_folder

MANIFEST = "manifest.json"
FORMAT = 1
RNG = "rng.cpu"


@dataclass(frozen=True)
class Manifest:
    format: int
    step: int
    version: int
    """The version whose weights these are."""
    files: dict[str, str]
    """File name to blake3 digest."""


class Checkpoints:
    """The checkpoints of one run."""

    def __init__(self, folder: Path, keep: int = 2):
        self.folder, self.keep = folder, keep
        folder.mkdir(parents=True, exist_ok=True)

    def save(self, step: int, version: int, state: dict[str, Tensor]) -> Path:
        """Writes a checkpoint; when the disk fills up, the draft is removed and the earlier ones are intact."""
        final = self.folder / f"{step:08d}"
        draft = final.with_name(f".{final.name}.draft")
        try:
            shutil.rmtree(draft, ignore_errors=True)
            draft.mkdir()
            name = "rank0.safetensors"
            tensors = {key: value.detach().cpu().contiguous() for key, value in state.items()}
            save_file({**tensors, RNG: torch.get_rng_state()}, draft / name)
            fsync_file(draft / name)
            manifest = Manifest(FORMAT, step, version, {name: _digest(draft / name)})
            (draft / MANIFEST).write_text(json.dumps(asdict(manifest), indent=1))
            fsync_file(draft / MANIFEST)
            shutil.rmtree(final, ignore_errors=True)
            replace_folder(draft, final)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(draft, ignore_errors=True)
            raise OffbeatError(self._cannot_write(step, error)) from error
        self._drop_old()
        return final

    def _cannot_write(self, step: int, error: Exception) -> str:
        earlier = self.steps()
        kept = f"the checkpoint of step {earlier[-1]} is intact" if earlier else "there is no earlier one"
        reason = " ".join(str(error).split())
        return (
            f"cannot write the checkpoint of step {step} to {self.folder}: {reason}; {kept}; free space, then --resume"
        )

    def steps(self) -> list[int]:
        """Steps of whole checkpoints, oldest first."""
        return sorted(int(f.parent.name) for f in self.folder.glob(f"[0-9]*/{MANIFEST}"))

    def load(self, step: int) -> tuple[Manifest, dict[str, Tensor]]:
        """Reads a checkpoint and restores torch's random state."""
        folder = self.folder / f"{step:08d}"
        try:
            manifest = Manifest(**json.loads((folder / MANIFEST).read_text()))
        except (OSError, ValueError, TypeError) as error:
            raise _damaged(folder / MANIFEST) from error
        if manifest.format != FORMAT:
            raise UserError(f"{folder}: format {manifest.format}; this Offbeat reads format {FORMAT}")
        tensors: dict[str, Tensor] = {}
        for name, digest in manifest.files.items():
            file = folder / name
            if not file.is_file() or _digest(file) != digest:
                raise _damaged(file)
            tensors.update(load_file(file))
        torch.set_rng_state(tensors.pop(RNG))
        return manifest, tensors

    def _drop_old(self) -> None:
        for step in self.steps()[: -self.keep]:
            shutil.rmtree(self.folder / f"{step:08d}", ignore_errors=True)


def _damaged(file: Path) -> UserError:
    return UserError(f"{file}: is damaged; remove {file.parent} to resume from the checkpoint before it")


def _digest(file: Path) -> str:
    return blake3(max_threads=blake3.AUTO).update_mmap(file).hexdigest()
