"""Checkpoints: masters, moments, random state and step; nothing that the ledger knows.

Of a policy that trains an adapter they hold the adapter alone, and what it stands on by its digest: with another base,
or another kind of adapter, they are refused.

A checkpoint is a folder of per-rank files and a manifest, written beside its place, flushed and renamed: it is whole or
not there, and an earlier one stays untouched until a later one is on disk. Files carry their digests, so a damaged one
is refused by name instead of being trained from.
"""

from __future__ import annotations

import json
import secrets
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from blake3 import blake3
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from offbeat.errors import DiskError, OffbeatError, UserError
from offbeat.files import fsync_file, remedy, replace_folder, write_atomic
from offbeat.weights.adapter import Adapter

MANIFEST = "manifest.json"
IDENTITY = "trainer.id"
"""Beside the folder of checkpoints."""
FORMAT = 1
RNG = "rng."
"""Begins the names of random states, one for each device that draws random numbers."""


@dataclass(frozen=True)
class Manifest:
    format: int
    step: int
    version: int
    """The version whose weights these are."""
    files: dict[str, str]
    """File name to blake3 digest."""
    adapter: dict[str, str] | None = None
    """Of an adapter, the digest of its base and how the two are put together."""


class Checkpoints:
    """The checkpoints of one run."""

    def __init__(self, folder: Path, keep: int = 2, adapter: Adapter | None = None):
        self.folder, self.keep = folder, keep
        self._adapter = None if adapter is None else {"base": adapter.base, "config": adapter.config}
        folder.mkdir(parents=True, exist_ok=True)

    def save(self, step: int, version: int, state: dict[str, Tensor], *, keeps_all: bool = False) -> Path:
        """Writes a checkpoint; when the disk fills up, the draft is removed and the earlier ones are intact. With
        `keeps_all` none of them goes for it: someone may want to go back further."""
        final = self.folder / f"{step:08d}"
        draft = final.with_name(f".{final.name}.draft")
        try:
            shutil.rmtree(draft, ignore_errors=True)
            draft.mkdir()
            name = "rank0.safetensors"
            tensors = {key: value.detach().cpu().contiguous() for key, value in state.items()}
            save_file({**tensors, **_random_states()}, draft / name)
            fsync_file(draft / name)
            manifest = Manifest(FORMAT, step, version, {name: _digest(draft / name)}, self._adapter)
            (draft / MANIFEST).write_text(json.dumps(asdict(manifest), indent=1))
            fsync_file(draft / MANIFEST)
            shutil.rmtree(final, ignore_errors=True)
            replace_folder(draft, final)
        except (OSError, SafetensorError) as error:
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
            "--resume the run"
        )

    def identity(self) -> str:
        """Text that tells this place of checkpoints from every other, made when it is first asked for."""
        file = self.folder.with_name(IDENTITY)
        try:
            if not file.is_file():
                write_atomic(file, secrets.token_hex(16).encode())
            return file.read_text()
        except OSError as error:
            raise OffbeatError(
                f"{file}: cannot be written or read: {error.strerror}; mend that, then --resume"
            ) from error

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


def _random_states() -> dict[str, Tensor]:
    """The random states of the CPU and of every CUDA device, by name. A loss of the user's own may draw on either."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return {f"{RNG}cpu": torch.get_rng_state(), **{f"{RNG}cuda.{i}": state for i, state in enumerate(cuda)}}


def _restore_random(states: dict[str, Tensor]) -> None:
    """Sets the random states of the devices that are here: a run may go on with fewer, or with none but the CPU."""
    torch.set_rng_state(states[f"{RNG}cpu"])
    for i in range(torch.cuda.device_count()):
        if f"{RNG}cuda.{i}" in states:
            torch.cuda.set_rng_state(states[f"{RNG}cuda.{i}"], i)


def _other_adapter(saved: dict[str, str] | None, now: dict[str, str] | None) -> str | None:
    """Why what was saved cannot be carried on with the model that there is now."""
    if saved == now:
        return None
    if saved is None or now is None:
        was, is_now = ("all weights", "an adapter") if saved is None else ("an adapter", "all weights")
        return f"holds {was}, and {is_now} would be trained; set model.lora_rank back"
    before, after = json.loads(saved["config"]), json.loads(now["config"])
    for key, name in (("r", "lora_rank"), ("lora_alpha", "lora_alpha"), ("target_modules", "lora_targets")):
        if before.get(key) != after.get(key):
            return f"was trained with model.{name} = {before.get(key)}, which is {after.get(key)} now; set it back"
    if saved["base"] != now["base"]:
        return (
            f"its adapter stands on a model with digest {saved['base'][:12]}, and model.path holds {now['base'][:12]}; "
            "give it the model that the run began with, in the same dtype"
        )
    return "holds another kind of adapter than would be trained; use the Offbeat that wrote it"


def _damaged(file: Path) -> UserError:
    return UserError(f"{file}: is damaged; remove {file.parent} to resume from the checkpoint before it")


def _digest(file: Path) -> str:
    return blake3(max_threads=blake3.AUTO).update_mmap(file).hexdigest()
