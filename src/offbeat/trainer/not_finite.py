"""Steps that met NaN or infinity: the error, and the dump from which `offbeat replay` repeats the step.

    broken/step-00000013.batch      the batch, the run's configuration, and where NaN or infinity was found
    broken/step-00000013.weights/   the published weights that the step began with, as hard links or copies

A dump is written by an atomic rename. Resuming a run does not need the dump; users may delete it.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import zstandard

from offbeat.errors import OffbeatError, UserError
from offbeat.files import link_folder, write_atomic
from offbeat.ledger.records import Batch, Member
from offbeat.trainer.checkpoint import Checkpoints
from offbeat.trajectory import array_from_wire, array_to_wire
from offbeat.weights.version import Version

log = logging.getLogger(__name__)

FORMAT = 1
SUFFIX = ".batch"


class NotFinite(OffbeatError):
    """A tensor of the current step holds NaN or infinity; no weights were updated with it."""

    def __init__(self, tensor: str, sample: int | None = None, token: int | None = None):
        super().__init__(f"{tensor} is not finite")
        self.tensor = tensor
        """Description in words, such as "the loss" or "the gradient of" a weight."""
        self.sample, self.token = sample, token
        """Index of the sample in the batch, and index of the token in its response; None: unknown."""
        self.num_updates = 0
        """Number of optimizer updates that the same step had already made."""
        self.is_agreed = True  # every rank computes with the same sums, and raises it


@dataclass(frozen=True)
class FailedStepDump:
    """Content of the dump of a failed step: what is needed to repeat it, and where NaN or infinity was found."""

    format: int
    batch: Batch
    version: int
    """Number of the version with whose weights the step began."""
    lr: float
    tensor: str
    """Name of the value that was not finite, such as "the loss". This field, `sample`, `token` and `num_updates` are
    copied from the `NotFinite`."""
    sample: int | None
    token: int | None
    num_updates: int
    config: dict[str, Any]

    @property
    def members(self) -> list[Member]:
        """All answers of the batch, group by group; the field `sample` is an index into this list."""
        return [member for group in self.batch.groups for member in group.members]


class FailedStep:
    """A training step that ended with `NotFinite`; writes the step's dump and composes the message for users."""

    def __init__(self, step: int, error: NotFinite, batch: Batch, version: Version, lr: float, config: dict[str, Any]):
        self.step, self.error, self.batch, self.version, self.lr, self.config = step, error, batch, version, lr, config
        self.task, self.place = locate(error, batch)
        self.file: Path | None = None
        self._kept = ""

    def dump(self, folder: Path) -> None:
        error, version = self.error, self.version
        found = (error.tensor, error.sample, error.token, error.num_updates)
        content = FailedStepDump(FORMAT, self.batch, version.number, self.lr, *found, self.config)
        try:
            self.file = save(folder, content, version.path)
            self._kept = f"is kept as {self.file}; to find the cause, run offbeat replay {self.file}"
        except OSError as problem:
            self._kept = f"could not be kept in {folder}: {problem.strerror}"

    def event(self) -> dict[str, Any]:
        return {
            "step": self.step + 1,
            "version": self.version.number,
            "tensor": self.error.tensor,
            "task": self.task,
            "token": self.error.token,
            "file": None if self.file is None else str(self.file),
        }

    def message(self, saved_step: int | None, checkpoints: Checkpoints) -> str:
        """Returns the message for users; `saved_step` is the step of the latest checkpoint, None without one."""
        return (
            f"step {self.step + 1}: {self.error}{f' ({self.place})' if self.place else ''}; its batch (step "
            f"{self.batch.step + 1}, from version {self.version.number}) {self._kept}; "
            f"{self._recovery_hint(saved_step, checkpoints)}"
        )

    def _recovery_hint(self, saved_step: int | None, checkpoints: Checkpoints) -> str:
        if self.error.num_updates:
            begin = "the start" if saved_step is None else f"the checkpoint of step {saved_step}"
            return f"--resume goes back to {begin}; resume with a smaller optimizer.lr, or check the data"
        if saved_step != self.step:
            return "resume with a smaller optimizer.lr, or check the data"
        is_only = checkpoints.steps() == [saved_step]
        return (
            "--resume tries the same batch again: fix the data or the loss first, or remove "
            f"{checkpoints.folder / f'{saved_step:08d}'} and resume "
            f"{'with --from-scratch' if is_only else 'from the checkpoint before it'} and a smaller optimizer.lr"
        )


def locate(error: NotFinite, batch: Batch) -> tuple[int | None, str]:
    """Returns the id of the task whose answer has the NaN or infinity, and the place in words; (None, "") if the place
    is unknown."""
    if error.sample is None:
        return None, ""
    task = [member.task for group in batch.groups for member in group.members][error.sample]
    return task, f"task {task}" + ("" if error.token is None else f", token {error.token}")


def save(folder: Path, dump: FailedStepDump, weights: Path) -> Path:
    """Writes a dump, with hard links to the weights (or copies of them) beside it, and returns its file. Raises OSError
    if the batch cannot be written. If only the weights cannot be kept, logs a warning."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"step-{dump.batch.step + 1:08d}{SUFFIX}"
    try:
        link_folder(weights, weights_of(file))
    except OSError as error:
        log.warning(
            "%s: the weights with which the failed step began could not be kept beside this file: %s", file, error
        )
    write_atomic(file, zstandard.compress(msgspec.msgpack.encode(dump, enc_hook=_to_wire)))
    return file


def weights_of(file: Path) -> Path:
    return file.with_suffix(".weights")


def read(file: Path) -> FailedStepDump:
    try:
        packed = zstandard.decompress(file.read_bytes())
        form = msgspec.msgpack.decode(packed, type=dict)["format"]
        if form != FORMAT:
            raise UserError(
                f"{file} has format {form}, this Offbeat reads format {FORMAT}; use the version of Offbeat that wrote "
                "the file"
            )
        return msgspec.msgpack.decode(packed, type=FailedStepDump, dec_hook=_from_wire)
    except OSError as error:
        raise UserError(
            f"{file}: cannot be read: {error.strerror}; give a .batch file from the folder broken/ of a run"
        ) from error
    except (zstandard.ZstdError, msgspec.MsgspecError, KeyError) as error:
        raise UserError(
            f"{file} is damaged or not a saved batch; give a .batch file from the folder broken/ of a run"
        ) from error


def _to_wire(value: Any) -> Any:
    assert isinstance(value, np.ndarray), f"this is a bug: cannot write a {type(value).__name__} to a dump"
    return array_to_wire(value)


def _from_wire(kind: type, value: Any) -> Any:
    assert kind is np.ndarray, f"this is a bug: cannot read a {kind.__name__} from a dump"
    return array_from_wire(**value)
