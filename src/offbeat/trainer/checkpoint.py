"""Checkpoints: master weights, optimizer moments, random state and step, but nothing that is in the ledger.

If an adapter is trained, only the adapter and the digest of its base are saved. Loading with another base or another
kind of adapter is refused.

A checkpoint is a folder with the trainer's tensors and a manifest. It is written as a draft, flushed and renamed, so it
is whole or absent, and an earlier checkpoint stays until a later one is on disk. The manifest holds the files' digests.
A damaged file raises an error that names the file. Tensors on a GPU are brought to the host one at a time.

A trainer of several ranks writes one file per rank, with the rank's rows of each tensor; its manifest (format 2) also
says which rows these are. Any number of ranks can load either format: each reads the rows that it needs.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from blake3 import blake3
from safetensors import safe_open
from torch import Tensor

from offbeat.errors import DeadlineError, DiskError, OffbeatError, UserError
from offbeat.files import fsync_file, remedy, replace_folder, write_atomic
from offbeat.testing.crash_points import crash_here
from offbeat.weights.encoding import dtype_name
from offbeat.weights.safetensor_file import lay_out, write_at
from offbeat.weights.version import Adapter

MANIFEST = "manifest.json"
IDENTITY = "trainer.id"
"""Name of the file with the trainer's random id, beside the folder of checkpoints."""
FORMAT, FORMAT_OF_ROWS = 1, 2
NOTE_EVERY_S = 0.02
"""Seconds between looks for another rank's note that its tensors are written."""
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
    rows: dict[str, dict[str, int]] = field(default_factory=dict)
    """For each file, the first row of each tensor of which the file holds only some rows; empty in format 1."""


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
            name = _file_of(0)
            digest = _write_tensors(draft / name, {**random_states(), **state})
            self._finish(draft, CheckpointManifest(FORMAT, step, version, {name: digest}, self._adapter))
        except OSError as error:
            shutil.rmtree(draft, ignore_errors=True)
            raise DiskError(self._cannot_write(step, error)) from error
        if not keeps_all:
            self._drop_old()
        return final

    def _finish(self, draft: Path, manifest: CheckpointManifest) -> None:
        """Writes the manifest into the draft, and makes the draft the checkpoint of its step."""
        content = asdict(manifest)
        if manifest.format == FORMAT:
            del content["rows"]  # earlier releases refuse what they do not know
        (draft / MANIFEST).write_text(json.dumps(content, indent=1))
        fsync_file(draft / MANIFEST)
        crash_here("checkpoint-drafted")
        final = self.folder / f"{manifest.step:08d}"
        shutil.rmtree(final, ignore_errors=True)
        replace_folder(draft, final)

    def begin_rows(self, step: int) -> Path:
        """Creates and returns an empty draft of the checkpoint of `step`, into which all ranks write (`save_rows`)."""
        draft = self.folder / f".{step:08d}.{secrets.token_hex(4)}.draft"
        try:
            for left in self.folder.glob(".*.draft"):  # of a gang that died
                shutil.rmtree(left, ignore_errors=True)
            draft.mkdir()
        except OSError as error:
            raise DiskError(self._cannot_write(step, error)) from error
        return draft

    def save_rows(self, draft: Path, rank: int, state: Mapping[str, Tensor], rows: Mapping[str, int]) -> None:
        """Writes one rank's tensors into a draft, and then a note that they are there, or why they are not. `rows`
        holds the first row of each tensor of which the rank has only some rows."""
        note: dict[str, object] = {"rows": dict(rows)}
        try:
            note["digest"] = _write_tensors(draft / _file_of(rank), state)
            crash_here("rows-written")
        except OSError as error:
            note["error"] = " ".join(str(error).split())
        write_atomic(draft / _note_of(rank), json.dumps(note).encode())

    def finish_rows(
        self, draft: Path, step: int, version: int, num_ranks: int, within_s: float, *, keeps_all: bool = False
    ) -> Path:
        """Waits until all ranks have written their tensors, and makes the draft a checkpoint. Raises `DeadlineError` if
        a rank has not done so within `within_s` seconds."""
        deadline_s, files, rows = time.monotonic() + within_s, {}, {}
        for rank in range(num_ranks):
            note = draft / _note_of(rank)
            while not note.is_file():
                if time.monotonic() > deadline_s:
                    raise DeadlineError(
                        f"rank {rank} has not written its part of the checkpoint of step {step} to {draft} within "
                        f"{within_s:g} s; all ranks must reach this folder"
                    )
                time.sleep(NOTE_EVERY_S)
            told = json.loads(note.read_text())
            if "error" in told:
                shutil.rmtree(draft, ignore_errors=True)
                raise DiskError(self._cannot_write(step, OSError(f"rank {rank}: {told['error']}")))
            files[_file_of(rank)], rows[_file_of(rank)] = told["digest"], told["rows"]
            note.unlink()
        try:
            self._finish(draft, CheckpointManifest(FORMAT_OF_ROWS, step, version, files, self._adapter, rows))
        except OSError as error:
            shutil.rmtree(draft, ignore_errors=True)
            raise DiskError(self._cannot_write(step, error)) from error
        if not keeps_all:
            self._drop_old()
        return self.folder / f"{step:08d}"

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
        manifest = self.read_manifest(step)
        for name in manifest.files:
            self.check_file(step, name, manifest)
        tensors = self.read(step, manifest, lambda name: None)
        restore_random({name: tensors.pop(name) for name in list(tensors) if name.startswith(RNG)})
        return manifest, tensors

    def read_manifest(self, step: int) -> CheckpointManifest:
        folder = self.folder / f"{step:08d}"
        try:
            manifest = CheckpointManifest(**json.loads((folder / MANIFEST).read_text()))
        except (OSError, ValueError, TypeError) as error:
            raise _damaged(folder / MANIFEST) from error
        if manifest.format not in (FORMAT, FORMAT_OF_ROWS):
            raise UserError(
                f"{folder}: this checkpoint has format {manifest.format}, this Offbeat reads formats {FORMAT} and "
                f"{FORMAT_OF_ROWS}; resume with the version of Offbeat that wrote it"
            )
        if problem := _other_adapter(manifest.adapter, self._adapter):
            raise UserError(f"{folder}: {problem}")
        return manifest

    def check_file(self, step: int, name: str, manifest: CheckpointManifest) -> None:
        """Raises a `UserError` if a file of a checkpoint is missing or damaged."""
        file = self.folder / f"{step:08d}" / name
        if not file.is_file() or _digest(file) != manifest.files[name]:
            raise _damaged(file)

    def read(
        self, step: int, manifest: CheckpointManifest, wanted: Callable[[str], tuple[int, int] | None]
    ) -> dict[str, Tensor]:
        """Returns the tensors of a checkpoint by name. `wanted` returns, for a tensor's name, the first row to read and
        the number of rows; None: all rows. Only these rows are read."""
        parts: dict[str, list[tuple[int, Tensor]]] = {}
        with ExitStack() as files:
            for name in manifest.files:
                file = self.folder / f"{step:08d}" / name
                stored = files.enter_context(safe_open(file, framework="pt"))
                starts = manifest.rows.get(name, {})
                for key in stored.keys():  # noqa: SIM118 - it is no dict
                    window = wanted(key)
                    if window is None:
                        found: Tensor = stored.get_tensor(key)
                    else:
                        held, start = stored.get_slice(key), starts.get(key, 0)
                        num = held.get_shape()[0]
                        first = min(max(window[0] - start, 0), num)
                        last = min(max(window[0] + window[1] - start, first), num)
                        found = held[first:last]
                    parts.setdefault(key, []).append((starts.get(key, 0), found))
        return {key: _joined(own) for key, own in parts.items()}

    def _drop_old(self) -> None:
        for step in self.steps()[: -self.keep]:
            shutil.rmtree(self.folder / f"{step:08d}", ignore_errors=True)


def _joined(parts: Sequence[tuple[int, Tensor]]) -> Tensor:
    """Returns a tensor whose rows are those of `parts`, each given with the place of its first row."""
    if len(parts) == 1:
        return parts[0][1]
    return torch.cat([rows for _, rows in sorted(parts, key=lambda part: part[0])])


def _file_of(rank: int) -> str:
    return f"rank{rank}.safetensors"


def _note_of(rank: int) -> str:
    return f"rank{rank}.json"


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


def random_state_of(states: Mapping[str, Tensor], rank: int) -> dict[str, Tensor]:
    """Returns rank 0's saved random states; for another rank, states that are derived from them."""
    if rank:
        seed = int.from_bytes(blake3(states[f"{RNG}cpu"].numpy().tobytes()).digest(length=7), "little") + rank
        return {f"{RNG}cpu": torch.Generator().manual_seed(seed).get_state()}
    return dict(states)


def restore_random(states: dict[str, Tensor]) -> None:
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
