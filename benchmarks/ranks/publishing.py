"""One rank of `publish-speed`: publishes versions of random weights, in which one value in a hundred changes.

`python -m benchmarks.ranks.publishing TASK.json OUT.json`, with torchrun's environment variables for several ranks. The
weights are those that a trainer holds: in the published dtype for one rank, rows of float32 masters for several. Two
versions follow a first one, which is made when there is none; the second of them is timed, since the first one still
takes its memory. Nothing is trained meanwhile.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.common.shapes import SHAPES
from offbeat.trainer.ranks import Gang, RankPlace, join_gang, meet
from offbeat.trainer.snapshot import Snapshot
from offbeat.trainer.version_parts import RowsOfVersion, rows_of
from offbeat.weights.divided import DividedTensors, like, serve_parts
from offbeat.weights.piece_store import FolderStore
from offbeat.weights.publish import Publisher
from offbeat.weights.signing import SigningKey

WITHIN_S = 120.0
CHANGED = 100
"""One value in this many changes from version to version."""


@dataclass(frozen=True)
class Publishing:
    """Task of all ranks: publish two versions after version 0."""

    shape: str
    device: str
    folder: str
    first: int
    """Number of the first of the two."""


def main(task: Publishing) -> dict[str, Any]:
    device, place = torch.device(task.device), RankPlace.of(os.environ)
    gang = None if place is None else _join(place, device)
    began_s = time.perf_counter()
    shapes = _shapes(task.shape)
    tensors = {name: _made(name, shape, device, gang) for name, shape in shapes.items()}
    copy = _copy_of(tensors, gang)
    folder = Path(task.folder)
    publisher = Publisher(folder, FolderStore(folder), SigningKey.load_or_create(folder.with_suffix(".key")))
    told: dict[str, Any] = {"made_s": time.perf_counter() - began_s}
    if gang is None:
        _write_first(publisher, tensors)
    for step in (1, 2):
        _change(tensors, shapes, step, gang)
        if gang is not None:
            gang.gather(b"")
        began_s = time.perf_counter()
        copied = copy()
        told["stands_still_s"] = time.perf_counter() - began_s
        number = task.first + step - 1
        parent = number - 1 if step == 2 else 0
        if gang is None:
            _write(publisher, number, parent, copied, told)
        else:
            _write_divided(publisher, gang, shapes, copied, number, parent, told)
    if gang is not None:
        gang.end()
    else:
        shutil.rmtree(publisher.path(task.first + 1))  # version 0 stays, from which several ranks go on
    return told


def _join(place: RankPlace, device: torch.device) -> Gang:
    return join_gang(place, meet(place, WITHIN_S), device, timeout_s=WITHIN_S, lost_after_s=60.0)


def _shapes(name: str) -> dict[str, torch.Size]:
    made = SHAPES[name].config()
    config = AutoConfig.for_model(made.pop("model_type"), **made)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return {name: parameter.shape for name, parameter in model.named_parameters()}


def _made(name: str, shape: torch.Size, device: torch.device, gang: Gang | None) -> Tensor:
    """Returns a random tensor in bfloat16; with several ranks, a tensor of whose float32 rows this rank holds some."""
    whole = torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(0, 0.02, generator=_random(name, 0, device))
    if gang is None:
        return whole
    rows = rows_of(shape[0], gang.rank, gang.size)
    own = whole[rows.start : rows.start + rows.num].float()
    mesh = DeviceMesh(device.type, torch.arange(gang.size))
    return DTensor.from_local(own, mesh, [Shard(0)], run_check=False, shape=shape, stride=whole.stride())


def _random(name: str, step: int, device: torch.device) -> torch.Generator:
    seed = int.from_bytes(blake3(f"{step} {name}".encode()).digest(length=7), "little")
    return torch.Generator(device).manual_seed(seed)


@torch.no_grad()
def _change(tensors: Mapping[str, Tensor], shapes: Mapping[str, torch.Size], step: int, gang: Gang | None) -> None:
    """Changes the last bit of one value in a hundred, of the same values for any number of ranks."""
    for name, tensor in tensors.items():
        held = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        total, random = shapes[name].numel(), _random(name, step, tensor.device)
        places = torch.randint(total, (max(total // CHANGED, 1),), generator=random, device=tensor.device)
        if gang is not None:
            first = rows_of(shapes[name][0], gang.rank, gang.size).start * (total // shapes[name][0])
            places = places[(places >= first) & (places < first + held.numel())] - first
        flat = held.view(-1)
        flat[places] = (flat[places].bfloat16().view(torch.int16) ^ 1).view(torch.bfloat16).to(flat.dtype)


def _copy_of(tensors: Mapping[str, Tensor], gang: Gang | None) -> Callable[[], Any]:
    """Returns the function for whose time training stands still."""
    if gang is None:
        snapshot = Snapshot("a version")
        return lambda: snapshot.take(tensors)
    rows, dtypes = RowsOfVersion(gang), dict.fromkeys(tensors, torch.bfloat16)
    return lambda: rows.take(tensors, dtypes)


def _write_first(publisher: Publisher, tensors: Mapping[str, Tensor]) -> None:
    publisher.write(0, 0, None, tensors)
    assert publisher.store is not None
    publisher.store.delete(publisher.store.list_pieces(), [])  # nobody fetches them, and they take disk


def _write(publisher: Publisher, number: int, parent: int, tensors: Mapping[str, Tensor], told: dict[str, Any]) -> None:
    version = publisher.write(number, number, parent, tensors)
    figures = publisher.figures
    assert figures is not None
    told |= {"digest": version.digest, "num_bytes": figures.num_bytes, "density": figures.density}
    told |= {"encode_s": figures.encode_s, "flush_s": figures.flush_s}
    if parent:
        shutil.rmtree(publisher.path(parent))


def _write_divided(
    publisher: Publisher,
    gang: Gang,
    shapes: Mapping[str, torch.Size],
    parts: Any,
    number: int,
    parent: int,
    told: dict[str, Any],
) -> None:
    inbox = publisher.folder / f".ranks-{number}"
    if gang.rank == 0:
        inbox.mkdir()
    gang.gather(b"")
    if gang.rank == 0:
        tensors = {name: like(shape, torch.bfloat16) for name, shape in shapes.items()}
        _write(publisher, number, parent, DividedTensors(tensors, parts, inbox, gang.size, WITHIN_S), told)
    else:
        serve_parts(parts, inbox, gang.rank, publisher.store, lambda: False)
    gang.gather(b"")


if __name__ == "__main__":
    given, out = map(Path, sys.argv[1:])
    out.write_text(json.dumps(main(Publishing(**json.loads(given.read_text())))))
