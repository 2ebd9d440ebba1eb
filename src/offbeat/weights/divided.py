"""A version that several ranks publish together: each holds some parts of each tensor, codes them, and writes them into
the one whole file.

A part (16 MiB of a tensor) belongs to the rank that a hash of its name and position chooses, in every version. The
publisher on rank 0 asks the other ranks through files in a folder that all share, the *inbox*, so that no collective is
needed while training goes on. It puts their answers together; the version's digest does not depend on the number of
ranks.
"""

from __future__ import annotations

import os
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import BinaryIO

import msgspec
import torch
from blake3 import blake3
from torch import Tensor

from offbeat.errors import DeadlineError
from offbeat.files import write_atomic
from offbeat.testing.crash_points import crash_here
from offbeat.weights.encoding import BaseFile, BaseTensor, Coder, Packing, RawPart
from offbeat.weights.manifest import Coding, Part, PieceEntry, TensorEntry
from offbeat.weights.piece_store import PieceStore
from offbeat.weights.safetensor_file import Stored, file_layout, in_parallel
from offbeat.weights.version import PIECE_BYTES, WeightsError

LOOK_EVERY_S = 0.01
"""Seconds between looks into the inbox."""
Key = tuple[str, int]
"""A part: the name of its tensor, and its position there."""


def owner_of(key: Key, num_ranks: int) -> int:
    """Returns the rank to which a part belongs."""
    name, position = key
    scores = [blake3(f"{rank} {position} {name}".encode()).digest() for rank in range(num_ranks)]
    return scores.index(max(scores))


def parts_of(num_bytes: int) -> Iterator[tuple[int, int, int]]:
    """Yields the parts of a tensor of `num_bytes`: position, offset of the first byte, and offset after the last."""
    for position, start in enumerate(range(0, max(num_bytes, 1), PIECE_BYTES)):
        yield position, start, min(start + PIECE_BYTES, num_bytes)


class _Request(msgspec.Struct):
    """A publisher's request to all ranks."""

    places: dict[str, tuple[str, list[int], int, int]]
    file: str | None
    """Whole file into which to write the parts; None: only code them."""
    base_file: str | None
    base: list[TensorEntry]
    with_codes: bool


class _Answer(msgspec.Struct):
    """A rank's result for its own parts of a version."""

    parts: list[tuple[str, int, Part]] = []
    pieces: list[PieceEntry] = []
    num_bytes: dict[Coding, int] = {}
    num_items: int = 0
    num_changed: int = 0
    problem: str = ""


class Parts:
    """One rank's parts of a version as raw bytes in host memory, sorted by name and position. They may still be on
    their way from other ranks, and arrive as they are read."""

    def __init__(self, arriving: Iterator[tuple[Key, Tensor]]):
        self._arriving, self._here = arriving, list[tuple[Key, Tensor]]()

    def __iter__(self) -> Iterator[tuple[Key, Tensor]]:
        yield from self._here
        for found in self._arriving:
            self._here.append(found)
            yield found

    def finish(self) -> None:
        """Waits until all parts are here: other ranks may wait for what this one gives."""
        deque(self, maxlen=0)


class DividedTensors(dict[str, Tensor]):
    """A version's tensors on rank 0: types and shapes of all, as tensors without memory, and rank 0's own parts."""

    def __init__(self, like: Mapping[str, Tensor], own: Parts, inbox: Path, num_ranks: int, within_s: float):
        """`own` are rank 0's parts. The other ranks look for requests in `inbox`; each answers within
        `within_s` seconds."""
        super().__init__(like)
        self.own, self.inbox, self.num_ranks, self.within_s = own, inbox, num_ranks, within_s
        self._num_requests = 0

    def code(
        self,
        places: Mapping[str, Stored],
        base: tuple[BaseFile, Path] | None,
        file: BinaryIO | None,
        store: PieceStore | None,
    ) -> Packing:
        """Lets all ranks code their parts, as changes since `base` (a version, and the path of its file; None: in
        full), write them to `file` and put the pieces into `store`. Returns everything in order."""
        request = _Request(
            places={name: tuple(place) for name, place in places.items()},  # type: ignore[misc]
            file=None if file is None else str(file.name),
            base_file=None if base is None else str(base[1]),
            base=[] if base is None else base[0].manifest.tensors,
            with_codes=store is not None,
        )
        number, self._num_requests = self._num_requests, self._num_requests + 1
        write_atomic(self.inbox / f"request{number}", msgspec.msgpack.encode(request))
        answers = [_code(self.own, request, store)]
        deadline_s = time.monotonic() + self.within_s
        for rank in range(1, self.num_ranks):
            told = self.inbox / f"answer{number}-{rank}"
            while not told.is_file():
                if time.monotonic() > deadline_s:
                    raise DeadlineError(
                        f"rank {rank} has not published its part of the weights within {self.within_s:g} s; look at "
                        "its log, its disk and its connection to the store"
                    )
                time.sleep(LOOK_EVERY_S)
            answers.append(msgspec.msgpack.decode(told.read_bytes(), type=_Answer))
            if answers[-1].problem:
                raise WeightsError(f"rank {rank}: {answers[-1].problem}")
        return _joined(answers)

    def close(self) -> None:
        """Tells the other ranks that nothing more is asked of them."""
        shutil.rmtree(self.inbox, ignore_errors=True)


def serve_parts(own: Parts, inbox: Path, rank: int, store: PieceStore | None, is_over: Callable[[], bool]) -> None:
    """Answers the requests for this rank's parts until rank 0 removes the inbox, or `is_over` returns True."""
    number = 0
    while inbox.is_dir() and not is_over():
        asked = inbox / f"request{number}"
        if not asked.is_file():
            time.sleep(LOOK_EVERY_S)
            continue
        with suppress(FileNotFoundError):  # rank 0 has given up and removed the inbox
            request = msgspec.msgpack.decode(asked.read_bytes(), type=_Request)
            answer = _answered(own, request, store)
            crash_here("parts-coded")
            write_atomic(inbox / f"answer{number}-{rank}", msgspec.msgpack.encode(answer))
        number += 1


def _answered(own: Parts, request: _Request, store: PieceStore | None) -> _Answer:
    try:
        return _code(own, request, store)
    except Exception as error:  # noqa: BLE001 - rank 0 raises it
        return _Answer(problem=" ".join(str(error).split()) or type(error).__name__)


def _code(own: Parts, request: _Request, store: PieceStore | None) -> _Answer:
    places = {name: Stored(*place) for name, place in request.places.items()}
    keys: list[Key] = []
    packing = Packing()
    with ExitStack() as files:
        files.callback(own.finish)
        olds: dict[str, BaseTensor] = {}
        if request.base_file is not None:
            old = files.enter_context(open(request.base_file, "rb"))
            stored = file_layout(old)
            for entry in request.base:
                if (place := places.get(entry.name)) and (place.dtype, place.shape) == (entry.dtype, entry.shape):
                    olds[entry.name] = BaseTensor(old, stored[entry.name].start, entry)
        file = None if request.file is None else files.enter_context(open(request.file, "r+b", buffering=0))

        def raw() -> Iterator[RawPart]:
            for (name, position), data in own:
                keys.append((name, position))
                start = places[name].start + position * PIECE_BYTES
                yield RawPart(name, places[name].dtype, position, data, start, olds.get(name))

        with closing(in_parallel(Coder(file, with_codes=request.with_codes).code, raw())) as coded:
            if store is None:
                deque(packing.pack(coded), maxlen=0)
            else:
                with closing(in_parallel(lambda piece: _put(store, piece), packing.pack(coded))) as pieces:
                    packing.pieces = list(pieces)
        if file is not None:
            os.fsync(file.fileno())
        if store is not None:
            store.sync()
    left = {name: iter(parts) for name, parts in packing.parts.items()}
    parts = [(name, position, next(left[name])) for name, position in keys]
    return _Answer(parts, packing.pieces, packing.num_bytes, packing.num_items, packing.num_changed)


def _put(store: PieceStore, piece: bytes) -> PieceEntry:
    digest = blake3(piece).hexdigest()
    store.put(digest, piece)
    return PieceEntry(digest, len(piece))


def _joined(answers: list[_Answer]) -> Packing:
    """Returns the parts and pieces of all ranks as if one had coded them."""
    packing, found = Packing(), dict[Key, Part]()
    for answer in answers:
        offset = len(packing.pieces)
        for name, position, part in answer.parts:
            moved = part if part.coding is Coding.SAME else msgspec.structs.replace(part, piece=part.piece + offset)
            found[name, position] = moved
        packing.pieces += answer.pieces
        packing.num_items += answer.num_items
        packing.num_changed += answer.num_changed
        for coding, num_bytes in answer.num_bytes.items():
            packing.num_bytes[coding] += num_bytes
    for name, position in sorted(found):
        packing.parts.setdefault(name, []).append(found[name, position])
    return packing


def like(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Returns a tensor without memory."""
    return torch.empty(shape, dtype=dtype, device="meta")
