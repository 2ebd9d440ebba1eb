"""A batch that a step broke on, kept in one file with all that repeating the step takes.

    broken/step-00000012.batch      the batch, the run's configuration, and what was found
    broken/step-00000012.weights/   the published weights that it was trained from: further names of the same files

A file is whole or not there. Nothing here is needed to go on with a run; whoever has seen enough may delete it.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import zstandard

from offbeat.errors import UserError
from offbeat.files import link_folder, write_atomic
from offbeat.learn.finite import NotFinite
from offbeat.ledger.records import Batch, Member

log = logging.getLogger(__name__)

FORMAT = 1
SUFFIX = ".batch"


@dataclass(frozen=True)
class Broken:
    """What is in the file."""

    format: int
    batch: Batch
    version: int
    """Whose weights the step began with."""
    lr: float
    tensor: str
    """What was not finite, and where, as `NotFinite` has it."""
    sample: int | None
    token: int | None
    num_updates: int
    config: dict[str, Any]

    @property
    def members(self) -> list[Member]:
        """In the order of the samples."""
        return [member for group in self.batch.groups for member in group.members]


def place(error: NotFinite, batch: Batch) -> tuple[int | None, str]:
    """The task that it was found in, where that is known, and the place in words."""
    if error.sample is None:
        return None, ""
    task = [member.task for group in batch.groups for member in group.members][error.sample]
    return task, f"task {task}" + ("" if error.token is None else f", token {error.token}")


def save(folder: Path, broken: Broken, weights: Path) -> Path:
    """Writes the file, and beside it the weights in the folder of their version; raises OSError where the batch cannot
    be written. Without the weights it can still be read."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"step-{broken.batch.step:08d}{SUFFIX}"
    try:
        link_folder(weights, weights_of(file))
    except OSError as error:
        log.warning("%s: the weights were not kept: %s", file, error)
    packed = zstandard.compress(msgspec.msgpack.encode(broken, enc_hook=_to_wire))
    write_atomic(file, packed)
    return file


def weights_of(file: Path) -> Path:
    return file.with_suffix(".weights")


def read(file: Path) -> Broken:
    try:
        packed = zstandard.decompress(file.read_bytes())
        form = msgspec.msgpack.decode(packed, type=dict)["format"]
        if form != FORMAT:
            raise UserError(f"{file}: format {form}; this Offbeat reads format {FORMAT}")
        return msgspec.msgpack.decode(packed, type=Broken, dec_hook=_from_wire)
    except OSError as error:
        raise UserError(f"{file}: cannot be read: {error.strerror}; give a file of a run's broken/") from error
    except (zstandard.ZstdError, msgspec.MsgspecError, KeyError) as error:
        raise UserError(f"{file}: holds no saved batch, or is damaged; give a file of a run's broken/") from error


def _to_wire(value: Any) -> Any:
    assert isinstance(value, np.ndarray), f"a {type(value).__name__} in a batch"
    return {"dtype": value.dtype.str, "shape": list(value.shape), "data": value.tobytes()}


def _from_wire(kind: type, value: Any) -> Any:
    assert kind is np.ndarray, f"a {kind.__name__} in a batch"
    return np.frombuffer(value["data"], np.dtype(value["dtype"])).reshape(value["shape"])
