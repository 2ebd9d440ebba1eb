"""Recorded updates: the changes of a model in training, step by step, small enough to copy to another machine.

A recording holds the codes of a model's parts for each step, and the digest of the initial weights, but not the weights
themselves. On disk it is split into files NAME.0, NAME.1 and so on. Together they hold the length of a header, the
header in JSON, and the codes, part by part.
"""

from __future__ import annotations

import random
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import msgspec

from offbeat.errors import UserError
from offbeat.weights.manifest import Coding

FILE_BYTES = 15 * 1024 * 1024


class PartCodes(msgspec.Struct, frozen=True):
    """A part of a tensor, with the coding of each step."""

    tensor: str
    dtype: str
    start: int
    """Its first byte within the tensor."""
    num_bytes: int
    codes: list[tuple[Coding, int]]
    """Coding and length, by step."""


class Whole(msgspec.Struct, frozen=True):
    """Effect of one step on the whole model, including parts that the recording does not hold."""

    num_changed: int
    num_coded_bytes: int
    mean_reward: float


class Header(msgspec.Struct, frozen=True):
    base_digest: str
    lr: float
    num_items: int
    """Number of items of the whole model."""
    steps: list[Whole]
    parts: list[PartCodes]


class Recording(NamedTuple):
    header: Header
    data: list[list[bytes]]
    """Codes by part and step."""

    @property
    def num_bytes(self) -> int:
        return sum(len(code) for codes in self.data for code in codes)


def write(recording: Recording, folder: Path) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    header = msgspec.json.encode(recording.header)
    whole = b"".join([len(header).to_bytes(8, "little"), header, *(code for codes in recording.data for code in codes)])
    paths = []
    for index, start in enumerate(range(0, len(whole), FILE_BYTES)):
        paths.append(folder / f"lr-{recording.header.lr:g}.{index}")
        paths[-1].write_bytes(whole[start : start + FILE_BYTES])
    return paths


def read(first: Path) -> Recording:
    """Reads the recording whose first file is given, named NAME.0."""
    files = [first]
    while (following := first.with_suffix(f".{len(files)}")).is_file():
        files.append(following)
    whole = b"".join(file.read_bytes() for file in files)
    length = int.from_bytes(whole[:8], "little")
    try:
        header = msgspec.json.decode(whole[8 : 8 + length], type=Header)
    except msgspec.DecodeError as error:
        raise UserError(f"{first}: not a recording ({error}); benchmarks.weights.record makes them") from error
    data: list[list[bytes]] = []
    start = 8 + length
    for part in header.parts:
        data.append([])
        for _, num_bytes in part.codes:
            data[-1].append(whole[start : start + num_bytes])
            start += num_bytes
    if start != len(whole):
        raise UserError(f"{first}: {len(whole)} bytes in {len(files)} files, but {start} by its header; copy them all")
    return Recording(header, data)


def sample(recording: Recording, max_bytes: int) -> Recording:
    """Returns randomly chosen parts with all their steps, up to a size; small parts are not preferred."""
    order = list(range(len(recording.data)))
    random.Random(0).shuffle(order)
    sizes = [sum(map(len, recording.data[index])) for index in order]
    chosen = [index for index, end in zip(order, accumulate(sizes), strict=True) if end <= max_bytes]
    parts = [recording.header.parts[index] for index in sorted(chosen)]
    header = msgspec.structs.replace(recording.header, parts=parts)
    return Recording(header, [recording.data[index] for index in sorted(chosen)])
