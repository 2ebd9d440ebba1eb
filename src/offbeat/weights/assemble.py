"""Assembles a version's whole file from a base and a chain of manifests, in one pass over the parts.

Each part (up to 16 MiB of a tensor) is read from the base, changed by one manifest after the other and written to the
new file. Several parts are processed at a time. A part that the chain changes is hashed and compared with the last
manifest. An unchanged part is copied without a check, because the base was verified when it was made.

Guarantees: the file appears whole, flushed and verified, or not at all; the base never changes; repeating a call has
the same result. Memory holds only a few parts and the pieces that contain them.
"""

from __future__ import annotations

import shutil
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from threading import Lock
from typing import BinaryIO, NamedTuple

from blake3 import blake3

from offbeat.files import fsync_file
from offbeat.weights.codec import CodecError, decode
from offbeat.weights.manifest import Coding, Kind, Manifest, Part, TensorEntry
from offbeat.weights.safetensor_file import Stored, copy_at, file_layout, in_parallel, lay_out, read_at, write_at
from offbeat.weights.version import (
    ADAPTER_CONFIG,
    ADAPTER_FILE,
    BASE,
    FILE_NAME,
    PIECE_BYTES,
    WeightsError,
    put_in_place,
)

GetPiece = Callable[[str], bytes | memoryview]


class AssemblyStep(NamedTuple):
    """Change of a part (up to 16 MiB of a tensor) by one manifest; `piece` is the digest of the piece that holds the
    coded change."""

    piece: str
    part: Part


@dataclass(frozen=True)
class Job:
    """Plan for one part (up to 16 MiB of a tensor) of the new file: where it lies, and the changes that produce it."""

    tensor: TensorEntry
    index: int
    target: int
    """Offset of the part's first byte in the new file."""
    origin: int | None
    """Offset of the part's first byte in the base; None: the part does not depend on the base."""
    steps: list[AssemblyStep]
    """Changes to apply, in order; empty: the part equals the base's."""

    @property
    def num_bytes(self) -> int:
        return self.tensor.part_bytes(self.index)


def assemble(chain: Sequence[Manifest], base: Path | None, piece: GetPiece, final: Path) -> None:
    """Writes to the folder `final` the weights of the last version in `chain`. Each manifest of the chain builds on the
    one before; `base` is the folder of the version that the first manifest builds on, None if that manifest is full.

    `base` is not hashed: the caller has verified it. `piece` returns the bytes of a piece by digest. It is called once
    for each piece, from any thread; its result is held until no part needs it, so a memory map is best. Raises
    `WeightsError`, which names the version and the tensor, if something contradicts a manifest. Errors of `piece` and
    OSError pass through.
    """
    _check_chain(chain, base)
    draft = final.with_name(f".{final.name}.draft")
    for left in (draft, final.with_name(f".{final.name}.old.draft")):
        shutil.rmtree(left, ignore_errors=True)
    draft.mkdir(parents=True)
    try:
        for file in _fill(draft, chain, base, piece):
            fsync_file(file)
        put_in_place(draft, final)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise


def _fill(folder: Path, chain: Sequence[Manifest], base: Path | None, piece: GetPiece) -> list[Path]:
    """Writes the files of the last version in `chain` into an empty folder; returns their paths."""
    version = chain[-1]
    if version.base is None or not isinstance(version.adapter, str):
        _assemble_file(chain, base, piece, folder / FILE_NAME)
        return [folder / FILE_NAME]
    _assemble_file(chain, None, piece, folder / ADAPTER_FILE, {BASE: version.base.digest})
    (folder / ADAPTER_CONFIG).write_text(version.adapter, encoding="utf-8")
    return [folder / ADAPTER_FILE, folder / ADAPTER_CONFIG]


def _check_chain(chain: Sequence[Manifest], base: Path | None) -> None:
    if (chain[0].kind is Kind.DELTA) != (base is not None):
        raise WeightsError(
            f"version {chain[0].number}: its kind is {chain[0].kind.value}, so it cannot be assembled "
            f"{'with' if base else 'without'} a base; this is a bug"
        )
    for before, manifest in pairwise(chain):
        stands_on = manifest.base
        if manifest.kind is not Kind.DELTA or stands_on is None:
            raise WeightsError(
                f"version {manifest.number}: its kind is {manifest.kind.value}, with{'out' * (stands_on is None)} a "
                "base; in a chain, all but the first must be deltas with a base; this is a bug"
            )
        if (stands_on.number, stands_on.digest) != (before.number, before.digest):
            raise WeightsError(
                f"version {manifest.number} consists of changes to version {stands_on.number} (digest "
                f"{stands_on.digest[:12]}), but the version assembled before it is {before.number} (digest "
                f"{before.digest[:12]})"
            )


def _assemble_file(
    chain: Sequence[Manifest], base: Path | None, piece: GetPiece, path: Path, metadata: Mapping[str, str] | None = None
) -> None:
    version = chain[-1]
    tensors = ((entry.name, entry.dtype, entry.shape, entry.num_bytes) for entry in version.tensors)
    head, places = lay_out(tensors, metadata)
    with ExitStack() as files:
        old = None if base is None else files.enter_context(open(base / FILE_NAME, "rb"))
        try:
            origins = {} if old is None else file_layout(old)
        except (ValueError, KeyError, TypeError) as error:
            raise WeightsError(f"version {version.number}: its base in {base} cannot be read: {error}") from error
        jobs = list(_plan(chain, places, origins))
        new = files.enter_context(open(path, "wb"))
        new.truncate(max([len(head), *(place.stop for place in places.values())]))
        write_at(new, 0, head)
        write = partial(_write_part, version.number, old, new, _Pieces(piece, jobs))
        deque(in_parallel(write, jobs), maxlen=0)


def _plan(chain: Sequence[Manifest], places: dict[str, Stored], origins: dict[str, Stored]) -> Iterator[Job]:
    """Yields one job for each part of the last version's tensors, in order. `places` is the layout of the new file,
    `origins` that of the base's file."""
    tensors = [{entry.name: entry for entry in manifest.tensors} for manifest in chain]
    for tensor in chain[-1].tensors:
        for index in range(len(tensor.parts)):
            steps: list[AssemblyStep] = []
            origin = None
            for manifest, entries in zip(reversed(chain), reversed(tensors), strict=True):
                entry = entries.get(tensor.name)
                if entry is None or (entry.dtype, entry.shape) != (tensor.dtype, tensor.shape):
                    raise _unlike(chain[-1], tensor, f"version {manifest.number}")
                part = entry.parts[index]
                if part.coding is not Coding.SAME:
                    steps.append(AssemblyStep(manifest.pieces[part.piece].digest, part))
                if part.coding is Coding.DENSE:  # earlier versions do not matter
                    break
            else:
                stored = origins.get(tensor.name)
                fits = stored is not None and (stored.dtype, stored.shape) == (tensor.dtype, tensor.shape)
                if stored is None or not fits or stored.stop - stored.start != tensor.num_bytes:
                    raise _unlike(chain[-1], tensor, "the base's file")
                origin = stored.start + index * PIECE_BYTES
            target = places[tensor.name].start + index * PIECE_BYTES
            yield Job(tensor, index, target, origin, steps[::-1])


def _unlike(version: Manifest, tensor: TensorEntry, where: str) -> WeightsError:
    return WeightsError(
        f"version {version.number}: tensor {tensor.name} needs a base tensor of dtype {tensor.dtype} and shape "
        f"{tensor.shape}, which {where} does not have"
    )


class _Pieces:
    """Reads pieces (blocks of packed codes) on demand. Each is read once and held in memory until its last use."""

    def __init__(self, get: GetPiece, jobs: Sequence[Job]):
        self._get = get
        self._num_uses = Counter(step.piece for job in jobs for step in job.steps)
        self._locks = {digest: Lock() for digest in self._num_uses}
        self._held: dict[str, memoryview] = {}

    def take(self, step: AssemblyStep) -> memoryview:
        """Returns the coded bytes of `step`. Call it once for each step: a piece is freed after its last use."""
        with self._locks[step.piece]:
            held = self._held.pop(step.piece, None)
            if held is None:
                held = memoryview(self._get(step.piece))
            self._num_uses[step.piece] -= 1
            if self._num_uses[step.piece]:
                self._held[step.piece] = held
        return held[step.part.start : step.part.start + step.part.num_bytes]


def _write_part(number: int, old: BinaryIO | None, new: BinaryIO, pieces: _Pieces, job: Job) -> None:
    """Writes the part that `job` describes to the file `new`; `old` is the base's file, None without a base. `number`
    is the version's number, for error messages."""
    data, what = None, f"version {number}: tensor {job.tensor.name}: part {job.index}"
    if job.origin is not None:
        assert old is not None
        if not job.steps:
            return copy_at(old, job.origin, new, job.target, job.num_bytes)
        data = read_at(old, job.origin, job.num_bytes)
    for step in job.steps:
        try:
            data = decode(step.part.coding, pieces.take(step), data, job.num_bytes, job.tensor.dtype)
        except CodecError as error:
            raise WeightsError(f"{what}: {error}") from error
    assert data is not None
    digest, published = blake3(data.data).hexdigest(), job.tensor.parts[job.index].digest
    if digest != published:
        raise WeightsError(f"{what} has digest {digest[:12]}, not the published {published[:12]}")
    write_at(new, job.target, data)
