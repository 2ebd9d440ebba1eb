"""Checkpoints: master weights, optimizer moments, random state and step, but nothing that is in the ledger.

If an adapter is trained, only the adapter and the digest of its base are saved. Loading with another base or another
kind of adapter is refused.

A checkpoint is a folder with the trainer's tensors and a manifest. It is written as a draft, flushed and renamed, so it
is whole or absent, and an earlier checkpoint stays until a later one is on disk. The manifest holds the files' digests.
A damaged file raises an error that names the file. Tensors on a GPU are brought to the host one at a time.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from blake3 import blake3
from safetensors.torch import load_file
from torch import Tensor

from offbeat.errors import DiskError, OffbeatError, UserError
from offbeat.files import fsync_file, remedy, replace_folder, write_atomic
from offbeat.testing.crash_points import crash_here
from offbeat.weights.encoding import dtype_name
from offbeat.weights.safetensor_file import lay_out, write_at
from offbeat.weights.version import Adapter

MANIFEST = "manifest.json"
IDENTITY = "trainer.id"
"""Name of the file with the trainer's random id, beside the folder of checkpoints."""
FORMAT = 1
RNG = "rng."
"""Prefix of the names of random states; each device that draws random numbers has one."""


@dataclass(frozen=True)
class CheckpointManifest:
    format: int
    step: int
    version: int
    """Number of the version that has these weights."""
    files: dict[str, str]
    """blake3 digest of each file, by name."""
    adapter: dict[str, str] | None = None
    """Digest of the adapter's base (`base`) and its configuration (`config`); None: all weights are trained."""


class Checkpoints:
    """The checkpoints of one run, each in a folder of its own below `folder`; the latest `keep` are kept. `adapter` is
    the adapter that is trained; None: all weights are trained."""

    def __init__(self, folder: Path, keep: int = 2, adapter: Adapter | None = None):
        self.folder, self.keep = folder, keep
        self._adapter = None if adapter is None else {"base": adapter.base, "config": adapter.config}
        folder.mkdir(parents=True, exist_ok=True)

    def save(self, step: int, version: int, state: Mapping[str, Tensor], *, keeps_all: bool = False) -> Path:
        """Writes a checkpoint and returns its folder. Then deletes all but the latest `self.keep` checkpoints, or none
        with `keeps_all`. If the disk is full, the draft is removed and earlier checkpoints stay intact. Random states
        that are missing from `state` are saved as they are now."""
        final = self.folder / f"{step:08d}"
        draft = final.with_name(f".{final.name}.draft")
        try:
            shutil.rmtree(draft, ignore_errors=True)
            draft.mkdir()
            name = "rank0.safetensors"
            digest = _write_tensors(draft / name, {**random_states(), **state})
            manifest = CheckpointManifest(FORMAT, step, version, {name: digest}, self._adapter)
            (draft / MANIFEST).write_text(json.dumps(asdict(manifest), indent=1))
            fsync_file(draft / MANIFEST)
            crash_here("checkpoint-drafted")
            shutil.rmtree(final, ignore_errors=True)
            replace_folder(draft, final)
        except OSError as error:
            shutil.rmtree(draft, ignore_errors=True)
            raise DiskError(self._cannot_write(step, error)) from error
        if not keeps_all:
            self._drop_old()
        return final

    def _cannot_write(self, step: int, error: Exception) -> str:
        earlier = self.steps()
        kept = f"the checkpoint of step {earlier[-1]} is intact" if earlier else "there is no earlier one"
        reason = " ".join(str(error).split())
        return (
            f"cannot write the checkpoint of step {step} to {self.folder}: {reason}; {kept}; {remedy(error)}, then "
            "resume the run"
        )

    def identity(self) -> str:
        """Returns the trainer's random id, created on first use. The coordinator recognises by it a trainer that was
        restarted before its first checkpoint."""
        file = self.folder.with_name(IDENTITY)
        try:
            if not file.is_file():
                write_atomic(file, secrets.token_hex(16).encode())
            return file.read_text()
        except OSError as error:
            raise OffbeatError(
                f"{file}: cannot be read or written: {error.strerror}; check its permissions, then resume the run"
            ) from error

    def steps(self) -> list[int]:
        """Returns the steps of all whole checkpoints, oldest first."""
        return sorted(int(f.parent.name) for f in self.folder.glob(f"[0-9]*/{MANIFEST}"))

    def load(self, step: int) -> tuple[CheckpointManifest, dict[str, Tensor]]:
        """Returns the manifest and tensors of the checkpoint of `step`, and restores torch's random state from it."""
        folder = self.folder / f"{step:08d}"
        try:
            manifest = CheckpointManifest(**json.loads((folder / MANIFEST).read_text()))
        except (OSError, ValueError, TypeError) as error:
            raise _damaged(folder / MANIFEST) from error
        if manifest.format != FORMAT:
            raise UserError(
                f"{folder}: this checkpoint has format {manifest.format}, this Offbeat reads format {FORMAT}; resume "
                "with the version of Offbeat that wrote it"
            )
        if problem := _other_adapter(manifest.adapter, self._adapter):
            raise UserError(f"{folder}: {problem}")
        tensors: dict[str, Tensor] = {}
        for name, digest in manifest.files.items():
            file = folder / name
            if not file.is_file() or _digest(file) != digest:
                raise _damaged(file)
            tensors.update(load_file(file))
        _restore_random({name: tensors.pop(name) for name in list(tensors) if name.startswith(RNG)})
        return manifest, tensors

    def _drop_old(self) -> None:
        for step in self.steps()[: -self.keep]:
            shutil.rmtree(self.folder / f"{step:08d}", ignore_errors=True)


def _write_tensors(file: Path, tensors: Mapping[str, Tensor]) -> str:
    """Writes a safetensors file, makes it durable, and returns its digest."""
    sizes = ((key, dtype_name(key, value), list(value.shape), value.nbytes) for key, value in tensors.items())
    head, places = lay_out(sizes)
    digest = blake3(head, max_threads=blake3.AUTO)
    with open(file, "wb", buffering=0) as out:
        write_at(out, 0, head)
        for key, place in places.items():  # in the order of the file
            data = tensors[key].detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
            write_at(out, place.start, data)
            digest.update(data.data)
        os.fsync(out.fileno())
    return digest.hexdigest()


def random_states() -> dict[str, Tensor]:
    """Returns the random states of the CPU and of every CUDA device by name; a user's loss may use any of them."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return {f"{RNG}cpu": torch.get_rng_state(), **{f"{RNG}cuda.{i}": state for i, state in enumerate(cuda)}}


def _restore_random(states: dict[str, Tensor]) -> None:
    """Restores the random states of the devices that this machine has; a run may resume with fewer GPUs."""
    torch.set_rng_state(states[f"{RNG}cpu"])
    for i in range(torch.cuda.device_count()):
        if f"{RNG}cuda.{i}" in states:
            torch.cuda.set_rng_state(states[f"{RNG}cuda.{i}"], i)


def _other_adapter(saved: dict[str, str] | None, now: dict[str, str] | None) -> str | None:
    """Returns why a checkpoint with adapter `saved` does not fit a model with adapter `now`; None if it does."""
    if saved == now:
        return None
    if saved is None or now is None:
        was, is_now = ("all weights", "an adapter") if saved is None else ("an adapter", "all weights")
        return (
            f"the checkpoint holds {was}, but {is_now} would be trained; set model.lora_rank back to its earlier value"
        )
    before, after = json.loads(saved["config"]), json.loads(now["config"])
    for key, name in (("r", "lora_rank"), ("lora_alpha", "lora_alpha"), ("target_modules", "lora_targets")):
        if before.get(key) != after.get(key):
            return f"the checkpoint has model.{name} = {before.get(key)}, but the run has {after.get(key)}; set it back"
    if saved["base"] != now["base"]:
        return (
            f"the adapter belongs to a model with digest {saved['base'][:12]}, but model.path has {now['base'][:12]}; "
            "use the model that the run began with, in the same dtype"
        )
    return (
        "the adapter of the checkpoint and that of the run differ in configuration; use the version of Offbeat that "
        "wrote the checkpoint"
    )


def _damaged(file: Path) -> UserError:
    return UserError(f"{file} is damaged; remove {file.parent} to resume from the checkpoint before it")


def _digest(file: Path) -> str:
    return blake3(max_threads=blake3.AUTO).update_mmap(file).hexdigest()
